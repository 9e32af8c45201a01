"""Guarantees the plain average of all teachers: no filter, no weight, whatever they know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from peer.methods.backbone import DistillationSettings, Evidence, distil
from peer.methods.base import Method, Notes
from peer.methods.distillation import check_teachers

if TYPE_CHECKING:
    from peer.peer import Peer


def uniform_target(q: Tensor) -> Tensor:
    """Mean over the teachers of their probabilities q (J, B, C), as (B, C): Uniform KD (CRAD paper, Eq. 3).

    Averaged in float64, returned in the dtype of q, without gradient; zeros, which is no target, when J = 0.
    Raises ValueError when q has another shape or is not finite.
    """
    check_teachers(q)
    return (q.detach().double().sum(0) / max(len(q), 1)).to(q.dtype)


class Uniform(Method):
    """Uniform KD in CRAD's backbone."""

    summary = "distils from the plain average of all neighbors (Uniform KD)"
    settings_type = DistillationSettings
    settings: DistillationSettings

    def run_round(self, peer: Peer) -> Notes:
        def target(q: Tensor, _: Mapping[int, Evidence], __: Tensor) -> Tensor:
            return uniform_target(q)

        return distil(peer, self.settings, target, with_statistics=False)
