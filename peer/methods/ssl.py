"""Guarantees learning from labels and, with less weight, from labels a model gave to the public samples itself."""

import torch.nn.functional as F
from torch import Tensor


def pseudo_labels(public_logits: Tensor) -> Tensor:
    """Hard labels (U,) int64: argmax of the logits (U, C) of the model before its refinement (FedCC paper, Eq. 3).

    The lowest id among equals.
    """
    return public_logits.argmax(1)


def refine_loss(
    labelled_logits: Tensor, labels: Tensor, public_logits: Tensor, pseudo: Tensor, *, unlabelled_weight: float = 0.2
) -> Tensor:
    """L = L_l + lambda L_u, a scalar in nats (FedCC paper, Eqs. 3 and 4).

        L_l = mean over b of CE(f_b, y_b)        L_u = mean over u of CE(f_u, pseudo_u)

    `labelled_logits` (B, C) and `public_logits` (U, C) carry the gradient; `labels` (B,) are class ids; `pseudo`,
    a constant, is class ids (U,) in Eq. 3 and probabilities (U, C) in Eq. 4. lambda is `unlabelled_weight`.
    Raises ValueError for other shapes, an empty part, or a negative weight.
    """
    if not unlabelled_weight >= 0:
        raise ValueError(f"unlabelled_weight is {unlabelled_weight}; it must not be below 0")
    for name, logits, answers, allowed in (
        ("labels", labelled_logits, labels, [labelled_logits.shape[:1]]),
        ("pseudo", public_logits, pseudo, [public_logits.shape[:1], public_logits.shape]),
    ):
        if logits.dim() != 2 or 0 in logits.shape or answers.shape not in allowed:
            raise ValueError(
                f"{name} has shape {tuple(answers.shape)}, its logits have {tuple(logits.shape)}; logits must be "
                f"(samples, classes) and {name} {' or '.join(str(tuple(shape)) for shape in allowed)}, none empty"
            )
    labelled, public = _cross_entropy(labelled_logits, labels), _cross_entropy(public_logits, pseudo.detach())
    return labelled + unlabelled_weight * public


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target.to(logits.dtype) if target.is_floating_point() else target.long())
