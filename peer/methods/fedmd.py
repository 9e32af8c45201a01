"""Guarantees that peers with different models agree on the public samples: all are drawn to their mean logits."""

import torch.nn.functional as F
from torch import Tensor

from peer.methods.distillation import check_lesson
from peer.methods.uniform import uniform_target


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
