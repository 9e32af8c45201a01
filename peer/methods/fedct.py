"""Guarantees that peers exchange nothing but hard labels of the public samples, and follow the majority."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from peer.methods.local import descend, train
from peer.methods.public import Lesson, PublicTeaching
from topology.errors import TopologyError
from transport.layout import Field

if TYPE_CHECKING:
    from peer.peer import Peer
    from peer.plan import Plan

NO_LABEL = 255  # of a public sample nobody named


def vote(labels: Tensor, classes: int) -> Tensor:
    """The label (U,) int64 that most of the K peers gave each public sample; the lowest id among equals.

    FedCT (Abourayya et al. 2023), its consensus by majority. `labels` (K, U) are class ids of any integer type.
    Raises ValueError for another shape, no peer, or, naming the peer, an id outside 0..classes-1.
    """
    if labels.dim() != 2 or len(labels) == 0 or labels.is_floating_point():
        raise ValueError(
            f"the labels are {labels.dtype} of shape {tuple(labels.shape)}; they must be class ids (peers, samples), "
            "with at least one peer"
        )
    ids = labels.long()
    strange = (ids < 0) | (ids >= classes)
    if strange.any():
        peer = int(strange.any(1).nonzero()[0])
        raise ValueError(
            f"peer {peer} of {len(ids)} names class {int(ids[peer][strange[peer]][0])}; ids lie in 0..{classes - 1}"
        )
    votes = torch.zeros(ids.shape[1], classes, device=ids.device).scatter_add_(1, ids.T, torch.ones_like(ids.T).float())
    return votes.argmax(1)  # the first of equals


class FedCt(PublicTeaching):
    """Co-training: the majority's labels of the public samples are learnt beside one's own."""

    summary = "clients share hard labels of public samples and learn those that most of them gave (FedCT)"
    nothing = NO_LABEL

    def check(self, plan: Plan) -> None:
        super().check(plan)
        if plan.data.classes > NO_LABEL:
            raise TopologyError(
                f"data.name = {plan.topology.data.name!r}: has {plan.data.classes} classes; FedCT sends labels in one "
                f"byte, so at most {NO_LABEL} are allowed"
            )

    def answer(self, samples: int, classes: int, dtype: str) -> Field:
        return Field("predictions", "uint8", (samples,))

    def lesson(self, samples: int, classes: int, dtype: str) -> Field:
        return Field("teacher", "uint8", (samples,))

    def improve(self, peer: Peer, teacher: Tensor | None) -> dict[str, float]:
        if teacher is None:
            return {"loss": train(peer, "fit")}
        voted = teacher.long()

        def losses() -> Iterator[Tensor]:
            for (x, y), (u, positions) in peer.batches("fit").beside(peer.public_batches("fit")):
                labels = torch.cat([y, voted[positions]])
                yield F.cross_entropy(peer.model(torch.cat([x, u])), labels, ignore_index=NO_LABEL)

        return {"loss": descend(peer, peer.model, losses())}

    def predict(self, peer: Peer) -> Tensor:
        return super().predict(peer).argmax(1).to(torch.uint8)

    def combine(self, predictions: Tensor, classes: int) -> Lesson:
        labels = vote(predictions, classes)
        return Lesson(labels.to(torch.uint8), labels, {})
