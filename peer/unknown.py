"""How well a model that may answer "unknown" does: accuracies and margins on labelled samples (FedCC paper, V).

Shapes: B samples, C classes, C >= 2. `logits` (B, C+1) have "unknown" last; logits (B, C) of a model that knows no
unknown are taken as well. `labels` (B,) are class ids, `majority` (C,) bool the classes a peer holds more than a
few samples of. Every function raises ValueError for other shapes and for ids outside 0..C-1.
"""

import torch
from torch import Tensor

from peer.methods.distillation import check_choice

RULES = ("valid", "plain")
MARGIN_BINS = 50
MAJORITY_THRESHOLD = 0.02


def recognised(logits: Tensor, labels: Tensor, majority: Tensor) -> float:
    """Share of the samples whose argmax over all outputs is right (Table II, "global").

    Right is the label itself and, where that is outside the majority classes, "unknown" too. With all classes in
    the majority this is plain accuracy.
    """
    _check(logits, labels, majority)
    chosen = logits.argmax(1)
    excused = (chosen == len(majority)) & ~majority.to(labels.device)[labels]
    return ((chosen == labels) | excused).double().mean().item()


def prior_accuracy(logits: Tensor, labels: Tensor, prior: Tensor) -> float:
    """Accuracy on samples distributed like the peer's own: sum over c of pi_c acc_c (Table II, "local").

    `prior` pi (C,) are the peer's label shares, or its counts: they are divided by their sum. acc_c is the accuracy
    on the samples of class c of the argmax over the C known logits. Classes that no sample has are left out of both
    sums. Raises ValueError if none is left.
    """
    _check(logits, labels, prior)
    classes = len(prior)
    right = logits[:, :classes].argmax(1) == labels
    samples = torch.bincount(labels, minlength=classes).double()
    correct = torch.bincount(labels[right], minlength=classes).double()
    shares = torch.where(samples > 0, prior.to(samples), 0.0)
    if not shares.sum() > 0:
        raise ValueError("no sample is of a class the peer holds, so there is no accuracy on samples like its own")
    return ((shares * correct / samples.clamp(min=1)).sum() / shares.sum()).item()


def margins(logits: Tensor, labels: Tensor, majority: Tensor, *, rule: str = "valid") -> Tensor:
    """Score of the right answer minus the best wrong one (B,), float64 in -1..1; scores are softmax (Fig. 2).

    "plain": right is the label alone. "valid": for a label outside the majority classes "unknown" is right too, the
    better of the two counts, and neither competes. Raises ValueError for an unknown rule.
    """
    check_choice("rule", rule, RULES)
    _check(logits, labels, majority)
    p = logits.double().softmax(1)
    right = torch.zeros_like(p, dtype=torch.bool).scatter_(1, labels[:, None], True)
    if rule == "valid" and p.shape[1] > len(majority):
        right[:, -1] = ~majority.to(labels.device)[labels]
    return p.masked_fill(~right, -torch.inf).amax(1) - p.masked_fill(right, -torch.inf).amax(1)


def _check(logits: Tensor, labels: Tensor, by_class: Tensor) -> None:
    classes = len(by_class)
    if logits.dim() != 2 or logits.shape[1] not in (classes, classes + 1) or classes < 2 or len(logits) == 0:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and there are {classes} classes; logits must be (samples, "
            f"{classes}) or, with unknown, (samples, {classes + 1}), with at least one sample and 2 classes"
        )
    if labels.shape != logits.shape[:1]:
        raise ValueError(f"labels have shape {tuple(labels.shape)}; for these logits they must be ({len(logits)},)")
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"labels go from {int(labels.min())} to {int(labels.max())}; they must be in 0..{classes - 1}")


def evidence(logits: Tensor, labels: Tensor, counts: Tensor) -> dict[str, object]:
    """What Table II and Figure 2 need of one client, from its logits on the common test set and its label counts (C,).

    Majority classes are those of the label shares, so that the measure does not move with the model.
    """
    if not logits.isfinite().all():
        return {}  # a model that has diverged has no margins
    owned = counts > MAJORITY_THRESHOLD * counts.sum()
    found: dict[str, object] = {"recognised": recognised(logits, labels, owned)}
    for rule in RULES:
        margin = margins(logits, labels, owned, rule=rule)
        found[f"margins_{rule}"] = torch.histc(margin, MARGIN_BINS, -1, 1).long().tolist()
        found[f"mean_margin_{rule}"] = float(margin.mean())
    return found
