"""Guarantees that the coordinator's models learn from what all peers' models say together on the public samples."""

from torch import Tensor

from peer.methods.distillation import teaching_loss as distillation_loss  # KL(teacher || student)
from peer.methods.fedmd import consensus

__all__ = ["distillation_loss", "teacher"]


def teacher(logits: Tensor) -> Tensor:
    """softmax of the mean logits (U, C) of the peers' logits (K, U, C) (FedDF, Lin et al. 2020, Algorithm 1).

    Errors are those of `consensus`.
    """
    return consensus(logits).softmax(-1)
