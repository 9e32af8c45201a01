"""What holds for FedCC's pseudo-labels, target and losses whatever the models say."""

import math

import hypothesis.extra.numpy as arrays_of
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.methods import fedcc
from peer.methods.distillation import teaching_loss
from peer.methods.fedmd import consensus

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31)
thresholds = st.sampled_from([0.02, 0.2, 0.6])


def doubles(*shape: int, spread: float = 8) -> st.SearchStrategy[Tensor]:
    return arrays_of.arrays(float, shape, elements=st.floats(-spread, spread, width=32)).map(torch.from_numpy)


@st.composite
def clients(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Logits (U, C+1) of public samples and (C+1,) of the probe."""
    samples, outputs = draw(st.integers(1, 4)), draw(st.integers(3, 5))
    return draw(doubles(samples, outputs)), draw(doubles(outputs))


@st.composite
def swarms(draw: st.DrawFn, least: int = 1, most: int = 4) -> Tensor:
    """Logits (K, U, C+1) of several peers."""
    return draw(doubles(draw(st.integers(least, most)), draw(st.integers(1, 3)), draw(st.integers(3, 5))))


def shuffled(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def same(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-9)


# Pseudo-labels


@quick
@given(clients(), thresholds, st.floats(1e-6, 0.5))
def test_trust_lies_between_nothing_and_that_of_certainty(
    client: tuple[Tensor, Tensor], threshold: float, smoothing: float
) -> None:
    public, probe_logits = client
    how = {"majority_threshold": threshold, "smoothing": smoothing}
    probe, h = fedcc.known(probe_logits), fedcc.entropy(fedcc.known(public))
    classes, owned = len(probe), int(fedcc.majority(probe, threshold).sum())
    w_l, w_u = fedcc.trust_weights(probe, **how)
    assert 0 < w_l <= math.log(classes) + 1e-12
    assert 0 <= w_u <= math.log(classes + 1)
    trust, most = fedcc.alpha(probe, h, **how), fedcc.alpha(probe, torch.zeros(1), **how)
    assert ((trust >= 0) & (trust <= most) & (most <= 1)).all()
    assert (trust == 0).equal(h >= w_l)
    same(trust, most * (1 - h / w_l).clamp(min=0))  # linear in the entropy
    if owned == classes:
        assert w_u == 0
        same(trust, 1 - torch.minimum(h, w_l) / w_l)
    else:
        assert (trust < 1).all()


@quick
@given(clients(), thresholds)
def test_pseudo_labels_are_one_majority_class_and_unknown(client: tuple[Tensor, Tensor], threshold: float) -> None:
    public, probe_logits = client
    labels = fedcc.pseudo_labels(public, probe_logits, majority_threshold=threshold)
    probe = fedcc.known(probe_logits)
    same(labels.sum(1), torch.ones(len(labels)).double())
    assert ((labels >= 0) & (labels <= 1)).all()
    assert ((labels[:, :-1] > 0).sum(1) <= 1).all()
    same(
        labels[:, :-1].sum(1),
        fedcc.alpha(probe, fedcc.entropy(fedcc.known(public)), majority_threshold=threshold),
    )
    owned = fedcc.majority(probe, threshold)
    if owned.any():
        assert not labels[:, :-1][:, ~owned].any()
    for row, chosen in zip(labels[:, :-1], public[:, :-1].masked_fill(~owned & owned.any(), -math.inf), strict=True):
        assert not row.any() or chosen[row.argmax()] == chosen.max()


@quick
@given(clients(), thresholds, st.floats(-50, 50), seeds)
def test_neither_the_unknown_logit_nor_the_names_of_classes_matter_to_pseudo_labels(
    client: tuple[Tensor, Tensor], threshold: float, shift: float, seed: int
) -> None:
    public, probe = client
    labels = fedcc.pseudo_labels(public, probe, majority_threshold=threshold)
    other_public, other_probe = public.clone(), probe.clone()
    other_public[:, -1] += shift
    other_probe[-1] -= shift
    assert labels.equal(fedcc.pseudo_labels(other_public, other_probe, majority_threshold=threshold))

    classes = shuffled(len(probe) - 1, seed)
    known = public[:, :-1]
    if all(len(set(row.tolist())) == len(row) for row in known):  # ties go by the id
        renamed = torch.cat([classes, torch.tensor([len(classes)])])
        other = fedcc.pseudo_labels(public[:, renamed], probe[renamed], majority_threshold=threshold)
        same(other, labels[:, renamed])


@quick
@given(clients(), thresholds)
def test_float32_pseudo_labels_follow_float64(client: tuple[Tensor, Tensor], threshold: float) -> None:
    public, probe = client
    exact = fedcc.pseudo_labels(public, probe, majority_threshold=threshold)
    labels = fedcc.pseudo_labels(public.float(), probe.float(), majority_threshold=threshold)
    assert labels.dtype == torch.float32
    assert labels.equal(exact.float())  # the drawn logits are float32 numbers


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_one_class_bias_trusts_next_to_nothing(classes: int) -> None:
    public = 4 * torch.randn(500, classes + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probe = torch.zeros(classes + 1).double()
    probe[0] = 60
    labels = fedcc.pseudo_labels(public, probe)
    assert (labels[:, -1] > 0.99).all()
    assert not labels[:, 1:-1].any()


# The coordinator


@quick
@given(swarms(), seeds)
def test_order_of_peers_and_of_classes_means_nothing(logits: Tensor, seed: int) -> None:
    target, valid = fedcc.aggregate(logits.softmax(2))
    assert valid.all()
    same(target.sum(1), torch.ones(len(target)).double())
    peers, classes = shuffled(len(logits), seed), shuffled(logits.shape[2] - 1, seed)
    same(fedcc.aggregate(logits[peers].softmax(2))[0], target)
    renamed = torch.cat([classes, torch.tensor([len(classes)])])
    same(fedcc.aggregate(logits[:, :, renamed].softmax(2))[0], target[:, classes])


@quick
@given(swarms(), st.sampled_from([torch.float32, torch.float16]))
def test_the_target_is_computed_in_float64(logits: Tensor, dtype: torch.dtype) -> None:
    p = logits.softmax(2).to(dtype)
    found, exact = fedcc.teach(p), fedcc.teach(p.double())
    assert found.target.dtype == dtype
    assert found.target.equal(exact.target.to(dtype))
    assert found.weights.equal(exact.weights)


@quick
@given(swarms())
def test_known_mass_counts_twice(logits: Tensor) -> None:
    p = logits.softmax(2)
    found = fedcc.teach(p)
    s = p[:, :, :-1].sum(2)
    same(found.weights, s / s.sum(0))
    same(found.weights.sum(0), torch.ones(p.shape[1]).double())
    closed = (s.square()[:, :, None] * fedcc.known(logits)).sum(0)
    same(found.target, closed / closed.sum(1, keepdim=True))


@quick
@given(swarms())
def test_one_peer_is_followed(logits: Tensor) -> None:
    for peer in logits:
        same(fedcc.aggregate(peer[None].softmax(2))[0], fedcc.known(peer))
        same(fedcc.scores(peer[None]).softmax(1), fedcc.known(peer))


@quick
@given(swarms())
def test_where_nothing_is_unknown_the_target_is_the_mean_of_probabilities(logits: Tensor) -> None:
    known = logits[:, :, :-1].softmax(2)
    p = torch.cat([known, torch.zeros_like(known[:, :, :1])], 2)
    target, valid = fedcc.aggregate(p)
    assert valid.all()
    same(target, consensus(known))


@quick
@given(swarms(least=2), st.sampled_from([math.nan, -0.5, 0.5]), seeds)
def test_a_dropped_row_counts_as_if_the_peer_were_absent(logits: Tensor, mistake: float, seed: int) -> None:
    p = logits.softmax(2)
    peer, row = seed % len(p), seed % p.shape[1]
    p[peer, row, 0] += mistake
    found = fedcc.teach(p)
    assert found.dropped.tolist() == [int(number == peer) for number in range(len(p))]
    others = [number for number in range(len(p)) if number != peer]
    same(found.target[row], fedcc.aggregate(p[others])[0][row])
    assert found.weights[peer, row] == 0


@quick
@given(swarms(), st.integers(1, 3))
def test_a_peer_certain_of_unknown_has_no_weight(logits: Tensor, copies: int) -> None:
    p = logits.softmax(2)
    silent = torch.zeros_like(p[:1])
    silent[:, :, -1] = 1
    found = fedcc.teach(torch.cat([p, silent.expand(copies, -1, -1)]))
    same(found.target, fedcc.aggregate(p)[0])
    assert not found.weights[len(p) :].any()


@quick
@given(swarms())
def test_inference_is_the_argmax_of_the_target(logits: Tensor) -> None:
    target, _ = fedcc.aggregate(logits.softmax(2))
    same(fedcc.scores(logits).softmax(1), target)
    chosen = target.gather(1, fedcc.infer(logits)[:, None])[:, 0]
    same(chosen, target.amax(1))


@quick
@given(swarms(), st.floats(100, 5000))
def test_inference_is_defined_where_all_are_certain_of_unknown(logits: Tensor, certainty: float) -> None:
    sure = logits.clone()
    sure[:, :, -1] += certainty
    found = fedcc.scores(sure)
    assert found.isfinite().all()
    # With s so small, s_k is the known part of e^(f - f_u), so twice the certainty is an offset of all scores.
    limit = logits[:, :, :-1] - logits[:, :, -1:]
    expected = (limit.logsumexp(2, keepdim=True) + limit).logsumexp(0) - 2 * certainty
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-9)


# Losses


@quick
@given(swarms())
def test_padded_is_restricted_minus_the_log_of_the_known_mass(logits: Tensor) -> None:
    teacher, model = fedcc.known(logits[0]), logits[-1]
    padded, restricted = (fedcc.sync_loss(teacher, model, space=space) for space in fedcc.SPACES)
    known_mass = model[:, :-1].logsumexp(1) - model.logsumexp(1)
    same(padded, restricted - known_mass.mean(), atol=1e-9)
    assert restricted >= -1e-12
    same(restricted, teaching_loss(teacher, model[:, :-1]))
    by_hand = (teacher * (teacher / fedcc.known(model)).log()).sum(1).mean()
    same(restricted, by_hand, atol=1e-9)


@quick
@given(swarms())
def test_gradients_are_differences_of_probabilities(logits: Tensor) -> None:
    model = logits[-1].clone().requires_grad_()
    teacher = fedcc.known(logits[0])
    fedcc.sync_loss(teacher, model).backward()
    padded = torch.cat([teacher, torch.zeros(len(teacher), 1).double()], 1)
    assert model.grad is not None
    same(model.grad, (logits[-1].softmax(1) - padded) / len(model))

    model.grad = None
    pseudo = fedcc.pseudo_labels(logits[0], logits[0, 0])
    labels = logits[0, :, :-1].argmax(1)
    fedcc.refine_loss(model, labels, model, pseudo, unlabelled_weight=0.3).backward()
    one_hot = torch.nn.functional.one_hot(labels, model.shape[1])
    p = logits[-1].softmax(1)
    same(model.grad, (p - one_hot + 0.3 * (p - pseudo)) / len(model))


@quick
@given(swarms())
def test_refinement_with_certain_pseudo_labels_is_plain_self_training(logits: Tensor) -> None:
    labels = logits[0].argmax(1)
    one_hot = torch.nn.functional.one_hot(labels, logits.shape[2]).double()
    model = logits[-1]
    same(fedcc.refine_loss(model, labels, model, one_hot), fedcc.refine_loss(model, labels, model, labels))
