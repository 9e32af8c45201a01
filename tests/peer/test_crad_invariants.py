"""What holds for CRAD's target whatever the teachers say."""

import hypothesis.extra.numpy as arrays_of
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.methods import crad, weighting
from peer.methods.distillation import soften

DTYPES = [torch.float64, torch.float32]
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@st.composite
def batches(draw: st.DrawFn, least: int = 1, most: int = 6, least_support: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of a batch and statistics a teacher can have: a is a whole number of n samples."""
    teachers, samples, classes = (
        draw(st.integers(least, most)),
        draw(st.integers(1, 3)),
        draw(st.integers(2, 4)),
    )
    logits = draw(arrays_of.arrays(float, (teachers, samples, classes), elements=st.floats(-8, 8, width=32)))
    counts = draw(arrays_of.arrays(np.int64, (teachers, classes), elements=st.integers(least_support, 60)))
    shares = draw(arrays_of.arrays(float, (teachers, classes), elements=st.floats(0, 1, width=32)))
    n = torch.from_numpy(counts)
    right = (torch.from_numpy(shares) * n).round()
    return torch.from_numpy(logits).softmax(-1), n, right / n.clamp(min=1)


rules = st.sampled_from(sorted(weighting.WEIGHTINGS))
deviations = st.sampled_from(sorted(crad.DEVIATIONS))
seeds = st.integers(0, 2**31)


def shuffled(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


@quick
@given(batches(), rules, deviations, st.booleans(), st.integers(1, 5), st.sampled_from(DTYPES))
def test_rows_are_probabilities(
    batch: tuple[Tensor, Tensor, Tensor],
    rule: str,
    deviation: str,
    agreement: bool,
    min_support: int,
    dtype: torch.dtype,
) -> None:
    q, n, a = batch
    for empty_class in crad.EMPTY_CLASSES:
        target = crad.class_target(
            q.to(dtype),
            n,
            a.to(dtype),
            weighting=rule,
            deviation=deviation,
            agreement=agreement,
            min_support=min_support,
            empty_class=empty_class,
            student=q[0].to(dtype),
        )
        assert target.dtype == dtype
        assert (target >= 0).all()
        whole = 0.0 if empty_class == "zero" and not (n >= min_support).any() else 1.0
        torch.testing.assert_close(target.double().sum(1), torch.full((q.shape[1],), whole).double(), atol=1e-6, rtol=0)


@quick
@given(batches(), rules, deviations, seeds)
def test_order_of_teachers_and_of_classes_means_nothing(
    batch: tuple[Tensor, Tensor, Tensor], rule: str, deviation: str, seed: int
) -> None:
    q, n, a = batch
    target = crad.class_target(q, n, a, weighting=rule, deviation=deviation)
    teachers, classes = shuffled(q.shape[0], seed), shuffled(q.shape[2], seed)
    other = crad.class_target(q[teachers], n[teachers], a[teachers], weighting=rule, deviation=deviation)
    torch.testing.assert_close(other, target, atol=1e-9, rtol=0)
    other = crad.class_target(q[:, :, classes], n[:, classes], a[:, classes], weighting=rule, deviation=deviation)
    torch.testing.assert_close(other, target[:, classes], atol=1e-9, rtol=0)


@quick
@given(batches(), rules)
def test_identical_teachers_are_followed(batch: tuple[Tensor, Tensor, Tensor], rule: str) -> None:
    q, n, a = batch
    target = crad.class_target(q[:1].expand_as(q), n, a, weighting=rule)
    torch.testing.assert_close(target, q[0], atol=1e-12, rtol=0)


@quick
@given(batches(), st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=4))
def test_scale_of_the_weights_of_a_class_means_nothing(
    batch: tuple[Tensor, Tensor, Tensor], factors: list[float]
) -> None:
    q, n, a = batch
    kept, weights = crad.survivors(q, n), weighting.class_weights(n, a)
    scaled = weights * torch.tensor(factors, dtype=torch.float64)[: q.shape[2]]
    torch.testing.assert_close(crad._average(q, scaled, kept), crad._average(q, weights, kept), atol=1e-12, rtol=0)


@quick
@given(batches(), rules)
def test_equal_statistics_leave_the_agreement_filter_alone(batch: tuple[Tensor, Tensor, Tensor], rule: str) -> None:
    q, n, a = batch
    n, a = n[:1].expand_as(n), a[:1].expand_as(a)
    agreement_only = crad.class_target(q, n, a, weighting="uniform")
    torch.testing.assert_close(crad.class_target(q, n, a, weighting=rule), agreement_only, atol=1e-12, rtol=0)


@quick
@given(batches(least=2, least_support=1), deviations)
def test_two_supported_teachers_are_both_kept_in_float32(batch: tuple[Tensor, Tensor, Tensor], deviation: str) -> None:
    q, n, _ = batch
    n = n.clone()
    n[2:] = 0
    assert crad.survivors(q.float(), n, deviation=deviation).equal(n > 0)


def test_two_teachers_are_both_kept_over_many_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    q = soften(4 * torch.randn(200, 2, 32, 10, generator=generator), 3.0)
    n = torch.ones(2, 10)
    assert all(crad.survivors(pair, n, deviation=rule).all() for pair in q for rule in crad.DEVIATIONS)
    strict = [(pair - pair.mean(0)).abs().mean(1) for pair in q]
    assert any((gap[0] != gap[1]).any() for gap in strict)  # plain float32 would have dropped some


@quick
@given(batches(least_support=1), deviations)
def test_filter_keeps_the_nearer_half(batch: tuple[Tensor, Tensor, Tensor], deviation: str) -> None:
    q, n, _ = batch
    kept = crad.survivors(q, n, deviation=deviation)
    assert (kept.sum(0) >= (len(q) + 1) // 2).all()
    distance = crad._deviations(q, q.mean(0), deviation)
    farthest_kept = distance.masked_fill(~kept, 0).amax(0)
    assert (distance.masked_fill(kept, 1) >= farthest_kept - crad.TIE_SLACK).all()


@quick
@given(st.integers(0, 2000), st.floats(0, 1))
def test_precision_of_one_teacher(count: int, accuracy: float) -> None:
    def precision(n: float, a: float) -> float:
        return weighting.class_weights(torch.tensor([[n]]), torch.tensor([[a]], dtype=torch.float64)).item()

    weight = precision(count, accuracy)
    assert weight == pytest.approx(precision(count, 1 - accuracy), rel=1e-9)
    assert weight >= 4 * (count + weighting.Z**2) * (1 - 1e-7)  # epsilon takes off up to 4e-12 n
    assert precision(count + 1, accuracy) > weight
    if 0.01 <= accuracy <= 0.99:
        limit = 1 / (accuracy * (1 - accuracy))
        assert precision(1e6, accuracy) / 1e6 == pytest.approx(limit, rel=1e-3)  # for more, epsilon shows
