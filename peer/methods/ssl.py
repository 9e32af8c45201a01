"""Guarantees learning from labels and, with less weight, from labels a model gave to the public samples itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from peer.methods.base import Notes, Settings
from peer.methods.coordinated import needs_public_samples
from peer.methods.local import Local, descend, train

if TYPE_CHECKING:
    from peer.peer import Peer
    from peer.plan import Plan


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


def refine(peer: Peer, pseudo: Tensor, unlabelled_weight: float) -> float:
    """Learn from the shard's labels and from `pseudo` labels of the public samples; returns the mean loss.

    Both kinds go through the model together, for batch norm would otherwise tell them apart.
    """

    def losses() -> Iterator[Tensor]:
        for (x, y), (u, positions) in peer.batches("refine").beside(peer.public_batches("refine")):
            logits = peer.model(torch.cat([x, u]))
            yield refine_loss(
                logits[: len(x)], y, logits[len(x) :], pseudo[positions], unlabelled_weight=unlabelled_weight
            )

    return descend(peer, peer.model, losses())


class SslSettings(Settings):
    """The keys of plain semi-supervised learning."""

    unlabelled_weight: Annotated[float, Field(ge=0)] = 0.2  # lambda of Eq. 3


class Ssl(Local):
    """Fit the labels, name the public samples once, learn from both."""

    summary = "each peer learns from its shard and from labels it gives the public samples itself (plain SSL)"
    settings_type = SslSettings
    settings: SslSettings

    def check(self, plan: Plan) -> None:
        needs_public_samples(plan)

    def run_round(self, peer: Peer) -> Notes:
        fit_loss = train(peer, "fit")
        with peer.timing("teachers"):
            pseudo = pseudo_labels(peer.predict_public(peer.model))
        return {"fit_loss": fit_loss, "loss": refine(peer, pseudo, self.settings.unlabelled_weight)}
