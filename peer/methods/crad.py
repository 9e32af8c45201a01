"""Guarantees a distillation target whose rows are probabilities, or zeros where there is no target at all.

CRAD: Class-wise Reliability-Aware Distillation for Decentralized Heterogeneous Federated Learning; equation
numbers are the paper's. For each class apart: drop the teachers without support for it, drop those far from
the consensus of the rest (Eqs. 4 and 5), average the survivors by the precision of their accuracy (Eqs. 6-8).

Shapes: J teachers, B samples of one mini-batch, C classes.
    q (J, B, C)  teacher probabilities at temperature T (Eq. 2)
    n (J, C)     number of validation samples of each class a teacher was measured on
    a (J, C)     its accuracy on them, in 0..1
Everything is computed in float64 and nothing carries a gradient. n and a may live on another device than q.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from peer.methods.backbone import DistillationSettings, Evidence, distil
from peer.methods.base import Method, Notes
from peer.methods.distillation import check_choice, check_teachers
from peer.methods.distillation import student_loss as student_loss  # Eqs. 9 and 10
from peer.methods.weighting import EPSILON, Z, agresti_coull, class_weights
from peer.methods.weighting import WEIGHTINGS as WEIGHTINGS  # Eq. 7 and the rules it is compared with
from topology.errors import TopologyError
from transport import layout as wire

if TYPE_CHECKING:
    from peer.peer import Peer
    from peer.plan import Plan

TIE_SLACK = 1e-9  # two teachers are equally far from their midpoint; rounding must not drop one of them
ROW_MINIMUM = 1e-8  # a row with less mass than this carries no opinion to renormalize

EMPTY_CLASSES = ("uniform", "zero", "student")

DEVIATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean_abs": lambda gap: gap.abs().mean(1),
    "rms": lambda gap: gap.square().mean(1).sqrt(),
}


class Aggregate(NamedTuple):
    """One batch's target and how it came about."""

    survivors: Tensor  # (J, C) bool, Eq. 5
    p_tilde: Tensor  # (J, C) float64, Eq. 6
    weights: Tensor  # (J, C) float64, Eq. 7, of survivors and others alike
    raw: Tensor  # (B, C) float64, Eq. 8 before renormalization, empty classes filled
    row_sum: Tensor  # (B,) float64, of raw
    target: Tensor  # (B, C) in q's dtype, Eq. 8


@dataclass(frozen=True)
class Reliability:
    """How far one batch's target can be trusted."""

    doubtful: float  # of the classes with a survivor, the share whose heaviest one has p_tilde < 1/2
    empty: float  # share of classes without a survivor
    survivors: float  # mean number a class, empty classes included
    row_sum_mean: float  # of Eq. 8 before renormalization: 1 when the classes' teachers agree
    row_sum_min: float
    row_sum_max: float
    survivors_by_class: list[float]
    doubtful_by_class: list[float]  # 1 where that is so, 0 where it is not


def survivors(
    q: Tensor, n: Tensor, *, min_support: int = 1, agreement: bool = True, deviation: str = "mean_abs"
) -> Tensor:
    """Which teachers (J, C) bool are kept for which class: support filter, then median filter (Eqs. 4 and 5).

    Supported are those with n >= `min_support`; of them stay those at most the median deviation from their
    consensus: all of one or two, else the nearer half. `agreement=False` leaves out the median filter.
    Raises ValueError for wrong shapes, an unknown deviation or a min_support below 1.
    """
    check_choice("deviation", deviation, DEVIATIONS)
    if n.shape != (q.shape[0], q.shape[-1]):
        raise ValueError(
            f"n has shape {tuple(n.shape)}; with teacher probabilities {tuple(q.shape)} it must be "
            f"(teachers, classes) = {(q.shape[0], q.shape[-1])}"
        )
    if min_support < 1:
        raise ValueError(f"min_support is {min_support}; it must be at least 1")
    supported = n.to(q.device) >= min_support
    if not agreement or len(q) == 0:
        return supported
    distance = _deviations(q, _consensus(q, supported), deviation)
    return supported & (distance <= _lower_median(distance, supported) + TIE_SLACK)


def aggregate(
    q: Tensor,
    n: Tensor,
    a: Tensor,
    *,
    weighting: str = "precision",
    min_support: int = 1,
    empty_class: str = "uniform",
    agreement: bool = True,
    student: Tensor | None = None,
    deviation: str = "mean_abs",
    z: float = Z,
    epsilon: float = EPSILON,
) -> Aggregate:
    """Class-wise average of the surviving teachers, renormalized over the classes, with its parts (Eq. 8).

    A class that no teacher supports takes, by `empty_class`: "uniform", the mean of all teachers (Eq. 3);
    "zero", nothing; "student", the student's own probabilities `student` (B, C). Survivors whose weights are
    all 0 count alike. A row left without mass falls back to Eq. 3. There is no target, and rows are zeros,
    when there is no teacher (J = 0), or under "zero" when no class has one.
    Raises ValueError for wrong shapes, unknown choices, statistics out of range and, naming the teacher,
    probabilities that are not finite.
    """
    check_teachers(q)
    check_choice("empty_class", empty_class, EMPTY_CLASSES)
    dtype, q = q.dtype, q.detach().double()
    kept = survivors(q, n, min_support=min_support, agreement=agreement, deviation=deviation)
    weights = class_weights(n, a, weighting=weighting, z=z, epsilon=epsilon).to(q.device)
    everyone = q.sum(0) / max(len(q), 1)  # Eq. 3
    empty = ~kept.any(0)

    filling = fallback = everyone
    if empty_class == "zero":
        filling, fallback = torch.zeros_like(everyone), everyone * ~empty.all()
    elif empty_class == "student" and len(q) > 0:
        if student is None or student.shape != q.shape[1:]:
            raise ValueError(
                "empty_class is 'student', so `student` must be its probabilities (samples, classes) = "
                f"{tuple(q.shape[1:])}; it is {None if student is None else tuple(student.shape)}"
            )
        filling = student.detach().to(everyone)

    raw = torch.where(empty, filling, _average(q, weights, kept))
    row_sum = raw.sum(1)
    target = torch.where(row_sum[:, None] > ROW_MINIMUM, raw / row_sum[:, None], fallback).to(dtype)
    return Aggregate(kept, agresti_coull(n, a, z)[0].to(q.device), weights, raw, row_sum, target)


def class_target(
    q: Tensor,
    n: Tensor,
    a: Tensor,
    *,
    weighting: str = "precision",
    min_support: int = 1,
    empty_class: str = "uniform",
    agreement: bool = True,
    student: Tensor | None = None,
    deviation: str = "mean_abs",
    z: float = Z,
    epsilon: float = EPSILON,
) -> Tensor:
    """The target (B, C) of Eq. 8, detached, in q's dtype; arguments, edge cases and errors as `aggregate`."""
    return aggregate(
        q,
        n,
        a,
        weighting=weighting,
        min_support=min_support,
        empty_class=empty_class,
        agreement=agreement,
        student=student,
        deviation=deviation,
        z=z,
        epsilon=epsilon,
    ).target


def reliability(found: Aggregate) -> Reliability:
    """Summarize one `aggregate`; one transfer from the device, so cheap enough for every batch."""
    kept = found.survivors
    if len(kept) == 0:
        none = [0.0] * kept.shape[1]
        return Reliability(0, 1, 0, 0, 0, 0, survivors_by_class=none, doubtful_by_class=none)
    heaviest = found.weights.masked_fill(~kept, -torch.inf).argmax(0, keepdim=True)
    decided = kept.any(0)
    doubtful = (found.p_tilde.gather(0, heaviest)[0] < 0.5) & decided
    figures = [
        doubtful.sum() / decided.sum().clamp(min=1),
        (~decided).double().mean(),
        kept.sum(0).double().mean(),
        *(found.row_sum.mean(), found.row_sum.min(), found.row_sum.max()),
    ]
    known = torch.cat([torch.stack([figure.double() for figure in figures]), kept.sum(0), doubtful]).tolist()
    share, empty, survivors, mean, least, most, *by_class = known
    classes = len(by_class) // 2
    return Reliability(share, empty, survivors, mean, least, most, by_class[:classes], by_class[classes:])


def _consensus(q: Tensor, supported: Tensor) -> Tensor:
    """Mean (B, C) of the supported teachers, class by class; 0 where there is none (Eq. 4)."""
    return (q.double() * supported[:, None, :]).sum(0) / supported.sum(0).clamp(min=1)


def _deviations(q: Tensor, consensus: Tensor, deviation: str) -> Tensor:
    """How far (J, C) each teacher's column is from the consensus over the batch (Eq. 4)."""
    return DEVIATIONS[deviation](q.double() - consensus)


def _lower_median(distance: Tensor, supported: Tensor) -> Tensor:
    """The lower middle value (C,) among the supported teachers of each class; infinite where there is none.

    The upper one, or their mean rounded up, could keep more than half.
    """
    ranked = distance.masked_fill(~supported, torch.inf).sort(dim=0).values
    middle = (supported.sum(0, keepdim=True) - 1).clamp(min=0) // 2
    return ranked.gather(0, middle)[0]


def _average(q: Tensor, weights: Tensor, kept: Tensor) -> Tensor:
    """Weighted mean (B, C) of the kept teachers, class by class (Eq. 8, before renormalization).

    The plain mean where all of them weigh 0, and 0 where none is kept.
    """
    weights = torch.where(kept, weights, 0.0)
    weights = torch.where(weights.sum(0) > 0, weights, kept.double())
    total = weights.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
    return (weights[:, None, :] * q).sum(0) / total


def _mean(values: Sequence[float | list[float]]) -> float | list[float]:
    """Over the batches; class by class where there is a number a class."""
    mean: float | list[float] = torch.tensor(values, dtype=torch.float64).mean(0).tolist()
    return mean


class CradSettings(DistillationSettings):
    """The keys of CRAD."""

    weighting: str = "precision"
    min_support: Annotated[int, Field(ge=1)] = 1
    empty_class: Literal["uniform", "zero", "student"] = "uniform"
    agreement: bool = True
    deviation: Literal["mean_abs", "rms"] = "mean_abs"
    z: Annotated[float, Field(gt=0)] = Z
    epsilon: Annotated[float, Field(gt=0)] = EPSILON

    @field_validator("weighting")
    @classmethod
    def _known(cls, weighting: str) -> str:
        check_choice("weighting", weighting, WEIGHTINGS)
        return weighting


class Crad(Method):
    """Algorithm 1, seen from one peer."""

    summary = "trusts a teacher for a class as far as it agrees with the others and its accuracy is well evidenced"
    settings_type: ClassVar[type[CradSettings]] = CradSettings
    settings: CradSettings

    def check(self, plan: Plan) -> None:
        if plan.topology.data.held_out == 0:
            raise TopologyError(
                "data.held_out = 0: this method weighs teachers by their accuracy on held-out data. "
                "Set it above 0, e.g. 0.2"
            )

    def fields(self, model: nn.Module, classes: int, dtype: str) -> tuple[wire.Field, ...]:
        """A snapshot, and 2C scalars of statistics from the same weights."""
        n, a = wire.Field("n", "int32", (classes,)), wire.Field("a", "float32", (classes,))
        return (n, a, *super().fields(model, classes, dtype))

    def run_round(self, peer: Peer) -> Notes:
        reliabilities: list[Reliability] = []
        loss = distil(peer, self.settings, partial(self._target, reliabilities), with_statistics=True)
        found = [asdict(one) for one in reliabilities]
        return loss | {name: _mean([one[name] for one in found]) for name in (found[0] if found else ())}

    def _target(
        self, reliabilities: list[Reliability], q: Tensor, evidence: Mapping[int, Evidence], student: Tensor
    ) -> Tensor:
        how = self.settings
        found = aggregate(  # Eqs. 4 to 8
            q,
            torch.stack([n for n, _ in evidence.values()]),
            torch.stack([a for _, a in evidence.values()]),
            weighting=how.weighting,
            min_support=how.min_support,
            empty_class=how.empty_class,
            agreement=how.agreement,
            student=student,
            deviation=how.deviation,
            z=how.z,
            epsilon=how.epsilon,
        )
        reliabilities.append(reliability(found))
        return found.target
