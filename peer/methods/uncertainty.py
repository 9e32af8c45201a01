"""Guarantees an average of the teachers in which, sample by sample, the more certain one weighs more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peer.methods.backbone import DistillationSettings, Evidence, distil
from peer.methods.base import Method, Notes
from peer.methods.distillation import check_teachers

if TYPE_CHECKING:
    from peer.peer import Peer


def uncertainty_weights(q: Tensor) -> Tensor:
    """Weights (J, B), adding up to 1 over the teachers: the softmax of the negative entropy of q (J, B, C).

    The entropy is in nats. The CRAD paper's Uncertainty KD weighs by negative entropy; that is never above 0,
    so it becomes a weight through a softmax over the teachers.
    """
    q = q.detach().double()
    negative_entropy: Tensor = torch.special.xlogy(q, q).sum(2)
    return negative_entropy.softmax(0)


def uncertainty_target(q: Tensor) -> Tensor:
    """Average (B, C) of q (J, B, C) by `uncertainty_weights`: Uncertainty KD (CRAD paper, Section 4).

    Averaged in float64, returned in the dtype of q, without gradient; zeros, which is no target, when J = 0.
    Raises ValueError when q has another shape or is not finite.
    """
    check_teachers(q)
    return (uncertainty_weights(q)[:, :, None] * q.detach().double()).sum(0).to(q.dtype)


class Uncertainty(Method):
    """Uncertainty KD in CRAD's backbone."""

    summary = "distils from all neighbors, the more certain one weighing more, sample by sample (Uncertainty KD)"
    settings_type = DistillationSettings
    settings: DistillationSettings

    def run_round(self, peer: Peer) -> Notes:
        def target(q: Tensor, _: Mapping[int, Evidence], __: Tensor) -> Tensor:
            return uncertainty_target(q)

        return distil(peer, self.settings, target, with_statistics=False)
