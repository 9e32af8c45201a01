"""What holds for FedBST's choices, losses and predictions whatever the model says."""

import itertools
import math
from fractions import Fraction

import hypothesis.extra.numpy as arrays_of
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.methods import copl, fedbst, prompt_baselines

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float64, torch.float32])


@st.composite
def logits(draw: st.DrawFn, least: int = 1, most: int = 12) -> Tensor:
    """What a model says of some samples; whole numbers make ties."""
    shape = (draw(st.integers(least, most)), draw(st.integers(2, 5)))
    elements = draw(st.sampled_from([st.floats(-8, 8, width=32), st.integers(-2, 2).map(float)]))
    return torch.from_numpy(draw(arrays_of.arrays(float, shape, elements=elements)))


@st.composite
def tables(draw: st.DrawFn) -> Tensor:
    """Counts of some clients, many of them 0."""
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    elements = st.one_of(st.just(0), st.integers(0, 4), st.integers(0, 10**6))
    return torch.from_numpy(draw(arrays_of.arrays(np.int64, shape, elements=elements)))


def shuffled(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Quotas


@quick
@given(tables(), st.integers(0, 10**6), st.integers(0, 20))
def test_quotas_are_the_formula_in_exact_fractions(counts: Tensor, size: int, period: int) -> None:
    clients, classes = counts.shape
    total = int(counts.sum())
    for rounding in copl.ROUNDINGS:
        quota = copl.allocate(counts, train_size=size, period=period, rounding=rounding)
        budget: Fraction | int = Fraction(total, classes)
        if rounding == "code":
            budget = math.ceil(budget)
        for k in range(clients):
            for c in range(classes):
                of_class = int(counts[:, c].sum())
                if of_class:
                    expected = math.ceil(int(counts[k, c]) * budget / Fraction(of_class))
                else:
                    expected = math.ceil(Fraction(size * (period + 1), 4 * classes * clients)) if total else 0
                assert quota[k, c] == expected


@quick
@given(tables(), seeds)
def test_budget_is_shared_out_and_order_means_nothing(counts: Tensor, seed: int) -> None:
    clients, classes = counts.shape
    quota = copl.allocate(counts)
    budget = -(-int(counts.sum()) // classes)
    known = counts.sum(0) > 0
    assert (quota.sum(0)[known] >= budget).all()
    assert (quota.sum(0)[known] < budget + clients).all()
    assert not quota[counts == 0].any()
    assert (copl.allocate(counts, rounding="paper") <= quota).all()
    rows, columns = shuffled(clients, seed), shuffled(classes, seed)
    assert copl.allocate(counts[rows][:, columns]).equal(quota[rows][:, columns])


@quick
@given(tables(), seeds)
def test_client_that_is_late_gets_no_more_than_in_time(counts: Tensor, seed: int) -> None:
    late = seed % len(counts)
    others = counts.clone()
    others[late] = 0
    if int(others.sum()):
        # each class has the same denominator as in time, but a budget without the late client's own counts
        assert (copl.allocate_late(counts[late], others) <= copl.allocate(counts)[late]).all()


# Which samples


@quick
@given(logits(), dtypes, seeds)
def test_reliable_are_at_most_half_and_the_order_of_samples_means_nothing(
    said: Tensor, dtype: torch.dtype, seed: int
) -> None:
    p = said.softmax(1).to(dtype)
    reliable = fedbst.reliable_set(p)
    assert reliable.sum() <= len(p) // 2
    order = shuffled(len(p), seed)
    assert fedbst.reliable_set(p[order]).equal(reliable[order])
    assert copl.class_counts(p).sum() == reliable.sum()
    if reliable.any():
        assert p.double().amax(1)[reliable].min() > p.double().amax(1).median()


@quick
@given(logits(), dtypes, st.data())
def test_selection_takes_the_most_confident_of_each_class(
    said: Tensor, dtype: torch.dtype, data: st.DataObject
) -> None:
    p = said.softmax(1).to(dtype)
    quota = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=p.shape[1], max_size=p.shape[1])))
    chosen, labels = fedbst.select(p, quota)
    confidence, predicted = p.max(1)
    assert len(set(chosen.tolist())) == len(chosen)
    assert labels.equal(predicted[chosen])
    rest = copl.remaining(len(p), chosen)
    assert int(rest.sum()) + len(chosen) == len(p)
    for label in range(p.shape[1]):
        of_class = chosen[labels == label]
        assert len(of_class) == min(int(quota[label]), int((predicted == label).sum()))
        passed_over = rest & (predicted == label)
        if len(of_class):
            assert confidence[of_class].equal(confidence[of_class].sort(descending=True).values)
            if passed_over.any():
                assert confidence[of_class].min() >= confidence[passed_over].max()


@quick
@given(logits(), st.floats(0, 0.5), st.floats(0, 1), st.sampled_from(fedbst.UNITS))
def test_readings_of_the_dual_filter_fit_together(said: Tensor, tau_con: float, tau_ent: float, unit: str) -> None:
    p = said.softmax(1)
    sides = [
        fedbst.dual_filter(p, tau_con=tau_con, tau_ent=tau_ent, entropy_unit=unit, entropy_side=side)
        for side in fedbst.SIDES
    ]
    middling = (p.amax(1) - 0.5).abs() <= tau_con + fedbst.SLACK
    assert (sides[0] | sides[1]).equal(middling)
    other = fedbst.dual_filter(p, tau_con=0.5 - tau_con, tau_ent=tau_ent, entropy_unit=unit, interval="threshold")
    nearly = ((p.amax(1) - 0.5).abs() - tau_con - fedbst.SLACK).abs() < 1e-12
    assert (other == sides[0])[~nearly].all()
    wider = fedbst.dual_filter(p, tau_con=tau_con + 0.1, tau_ent=tau_ent, entropy_unit=unit)
    assert (wider | ~sides[0]).all()


# UACP


@quick
@given(logits(), dtypes)
def test_uacp_pushes_down_the_highest_alone(said: Tensor, dtype: torch.dtype) -> None:
    said = said.to(dtype).requires_grad_()
    loss = fedbst.uacp(said)
    assert 1 / said.shape[1] - 1e-6 <= loss <= 1 + 1e-6
    (gradient,) = torch.autograd.grad(loss, said)
    top = torch.nn.functional.one_hot(said.argmax(1), said.shape[1]).bool()
    assert (gradient[top] >= 0).all()
    assert (gradient[~top] <= 0).all()
    assert gradient.abs().max() <= 0.25 / len(said) + 1e-7
    torch.testing.assert_close(gradient.sum(1), torch.zeros(len(said), dtype=dtype), atol=1e-6, rtol=0)
    p = said.softmax(1).detach()
    by_hand = p[top][:, None] * (top.to(dtype) - p) / len(said)
    torch.testing.assert_close(gradient, by_hand, atol=1e-6, rtol=0)


@quick
@given(st.integers(0, 40), st.integers(1, 16), st.integers(0, 30))
def test_every_ambiguous_sample_has_its_turn(samples: int, size: int, start: int) -> None:
    order = shuffled(samples, 0)
    batches = [fedbst.ambiguous_batch(order, start + step, size) for step in range(-(-samples // size))]
    assert all(len(batch) == min(size, samples) for batch in batches)
    assert all(len(set(batch.tolist())) == len(batch) for batch in batches)
    assert set().union(*(batch.tolist() for batch in batches)) == set(range(samples))


# Prototypes and prediction


@quick
@given(st.integers(0, 12), st.integers(1, 5), seeds)
def test_prototypes_are_unit_directions_or_nothing(samples: int, classes: int, seed: int) -> None:
    features = random(samples, 4, seed=seed)
    labels = torch.randint(classes, (samples,), generator=torch.Generator().manual_seed(seed))
    found, mask = fedbst.prototypes(features, labels, classes)
    assert mask.tolist() == [label in labels.tolist() for label in range(classes)]
    torch.testing.assert_close(found.norm(dim=1), mask.double(), atol=1e-12, rtol=0)
    order = shuffled(samples, seed)
    lengths = random(samples, 1, seed=seed + 1).exp()
    other, _ = fedbst.prototypes((lengths * features)[order], labels[order], classes)
    torch.testing.assert_close(other, found, atol=1e-9, rtol=0)


@quick
@given(st.integers(1, 6), st.integers(1, 5), st.floats(0, 1), st.floats(0.1, 100), dtypes, seeds)
def test_ensemble_gives_probabilities(
    samples: int, classes: int, alpha: float, scale: float, dtype: torch.dtype, seed: int
) -> None:
    features, text, seen = (random(size, 4, seed=seed + i) for i, size in enumerate((samples, classes, classes)))
    mask = random(classes, seed=seed + 3) > 0
    tensors = [features.to(dtype), text.to(dtype), torch.nn.functional.normalize(seen, dim=1).to(dtype) * mask[:, None]]
    found = fedbst.ensemble(*tensors, mask, scale=scale, alpha=alpha)
    assert (found >= 0).all()
    torch.testing.assert_close(found.sum(1), torch.ones(samples, dtype=dtype), atol=1e-5, rtol=0)
    text_alone = fedbst.ensemble(*tensors, mask, scale=scale, alpha=1)
    if not mask.any():
        assert found.equal(text_alone)
    else:
        torch.testing.assert_close(found[:, ~mask], alpha * text_alone[:, ~mask])


# When, and who


@quick
@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 10))
def test_learning_rate_falls_from_one_relabelling_to_the_next(round: int, every: int, epochs: int) -> None:
    rates = [copl.learning_rate(0.1, round, epoch, every=every, epochs=epochs) for epoch in range(epochs)]
    assert all(earlier > later for earlier, later in itertools.pairwise(rates))
    assert 0 < rates[-1] <= rates[0] <= 0.1
    assert (rates[0] == 0.1) == copl.relabels(round, every)


@quick
@given(st.integers(1, 30), st.floats(0.01, 1), st.integers(1, 30), seeds)
def test_those_who_join_are_drawn_fairly_and_reproducibly(count: int, rate: float, round: int, seed: int) -> None:
    clients = [3 * number + 1 for number in range(count)]
    found = copl.joining(clients, round, rate=rate, seed=seed)
    assert found == copl.joining(clients[::-1], round, rate=rate, seed=seed)
    assert found == sorted(set(found) & set(clients))
    assert len(found) >= 1
    assert abs(len(found) - rate * count) <= 0.5 or len(found) == 1
    assert copl.joining(clients, round, rate=1, seed=seed) == clients


def test_everyone_joins_sooner_or_later() -> None:
    rounds = [copl.joining(range(10), round, rate=0.3, seed=1) for round in range(1, 40)]
    assert set().union(*map(set, rounds)) == set(range(10))
    assert rounds[0] != rounds[1]


# What it is compared with


@quick
@given(st.integers(1, 9), st.integers(1, 3), seeds)
def test_transport_gives_each_prompt_its_mass(patches: int, prompts: int, seed: int) -> None:
    similarity = random(2, patches, prompts, seed=seed).tanh()
    plan = prompt_baselines.transport(similarity, tolerance=1e-9, most=2000)
    received = torch.full((2, prompts), 0.8 / prompts, dtype=torch.float64)
    torch.testing.assert_close(plan.sum(1), received, atol=1e-9, rtol=0)
    assert (plan >= 0).all()


@quick
@given(logits(), st.floats(0, 1), st.floats(0, 1), st.integers(1, 3))
def test_candidates_include_the_prediction_or_nothing(said: Tensor, q: float, beta: float, most: int) -> None:
    p = said.softmax(1)
    found = prompt_baselines.candidate_sets(p, q=q, beta=beta)
    within = prompt_baselines.candidate_sets(p, q=q, beta=0.0)
    assert within.gather(1, p.argmax(1, keepdim=True)).all()
    assert (within | ~found).all()
    taken = prompt_baselines.admitted(p, found, most=most)
    assert found[taken].any(1).all()
    assert len(taken) <= most * p.shape[1]
