"""Guarantees that peers with different models agree on the public samples: all are drawn to their mean logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from peer.methods.distillation import check_lesson
from peer.methods.local import train
from peer.methods.public import Lesson, PublicTeaching, follow
from peer.methods.uniform import uniform_target

if TYPE_CHECKING:
    from peer.peer import Peer


def consensus(logits: Tensor) -> Tensor:
    """Mean (U, C) over the peers of their raw logits (K, U, C) on the public samples (FedMD, Li and Wang 2019).

    Arithmetic and errors are those of `uniform_target`.
    """
    return uniform_target(logits)


def align_loss(logits: Tensor, consensus: Tensor) -> Tensor:
    """Mean over samples and classes of |logits - consensus|, both (B, C): FedMD's step "digest", as its code has it.

    The logits carry the gradient. Raises ValueError for another shape, or without a sample.
    """
    check_lesson(consensus, logits)
    return F.l1_loss(logits, consensus.detach().to(logits.dtype))


class FedMd(PublicTeaching):
    """Digest what all say of the public samples, then revisit the own shard."""

    summary = "clients align their logits on public samples with the mean of all, then fit their shard (FedMD)"

    def improve(self, peer: Peer, teacher: Tensor | None) -> dict[str, float]:
        digested = {} if teacher is None else follow(peer, teacher, lambda rows, logits: align_loss(logits, rows))
        return digested | {"loss": train(peer, "fit")}

    def combine(self, predictions: Tensor, classes: int) -> Lesson:
        mean = consensus(predictions)
        return Lesson(mean, mean.argmax(1), {})
