"""The methods FedCC is compared with, against recorded values, and what they have in common."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as arrays_of
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.methods import fedavg, fedct, feddf, fedmd, ssl
from peer.methods.averaging import weighted_average
from peer.methods.distillation import soften
from peer.methods.dpsgd import mix
from peer.methods.uniform import uniform_target

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "fedcc_golden.json").read_text())
CASES = {case["id"]: case for case in GOLDEN["cases"] if case["id"].startswith("b0")}
NOT_BUILT = {  # recorded for methods that do not exist here: FedLC, FedRS, LSR, FedVLS, FedMR
    "b01_local_losses",
    "b02_vacant_distillation_two",
    "b03_fedmr_intra",
}
PARTS_NOT_BUILT = {  # FedNova, FedProx, FedSAM; FedET, FedHKT
    "b04_parameter_aggregation": {"tau_eff", "fednova", "prox_penalty", "prox_grad", "sam_point", "sam_grad"},
    "b05_distillation_aggregation": {
        *("fedet_variance", "fedet_weight", "fedet_logits", "fedet_label"),
        *("fedet_diversity_weight", "fedet_diversity_logits", "fedhkt_weight", "fedhkt_target"),
    },
}
DTYPES = [torch.float64, torch.float32]
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
swarms = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(2, 4)).flatmap(
    lambda shape: arrays_of.arrays(float, shape, elements=st.floats(-8, 8, width=32)).map(torch.from_numpy)
)


def close(actual: Tensor, expected: Any, dtype: torch.dtype = torch.float64) -> None:
    """Within the tolerances the recorded values came with (they are rounded to 6 decimals)."""
    atol = 1e-6 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


# Recorded values


def test_every_recorded_case_is_tested() -> None:
    assert set(CASES) == {*NOT_BUILT, *PARTS_NOT_BUILT}
    built = {name: set(CASES[name]["expected"]) - parts for name, parts in PARTS_NOT_BUILT.items()}
    assert built == {
        "b04_parameter_aggregation": {"fedavg"},
        "b05_distillation_aggregation": {
            *("fedmd_mean_logits", "feddf_target", "mean_probability", "fedct_votes", "fedct_label"),
        },
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_average_of_models(dtype: torch.dtype) -> None:
    inputs, expected = (CASES["b04_parameter_aggregation"][part] for part in ("inputs", "expected"))
    models = [{"w": torch.tensor(w, dtype=dtype)} for w in inputs["local_w"]]
    averaged = fedavg.average(models, inputs["n"])
    assert averaged["w"].dtype == dtype
    close(averaged["w"], expected["fedavg"], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_teachers(dtype: torch.dtype) -> None:
    inputs, expected = (CASES["b05_distillation_aggregation"][part] for part in ("inputs", "expected"))
    logits = torch.tensor(inputs["client_logits"], dtype=dtype)
    close(fedmd.consensus(logits), expected["fedmd_mean_logits"], dtype)
    close(feddf.teacher(logits), expected["feddf_target"], dtype)
    close(uniform_target(soften(logits, 1.0)), expected["mean_probability"], dtype)
    votes = logits.argmax(2)
    counted = F.one_hot(votes, logits.shape[2]).sum(0)
    assert counted.tolist() == expected["fedct_votes"]
    assert fedct.vote(votes, logits.shape[2]).tolist() == expected["fedct_label"]


# FedAvg


def models(seed: int, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (3, 2), "scale": (), "running_mean": (4,)}
    return [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        for _ in range(count)
    ]


@quick
@given(st.integers(0, 2**31), st.lists(st.integers(1, 500), min_size=1, max_size=5))
def test_samples_count_alike_wherever_they_are(seed: int, sizes: list[int]) -> None:
    peers = models(seed, len(sizes))
    averaged = fedavg.average(peers, sizes)
    for name, tensor in averaged.items():
        each = torch.cat(
            [peer[name][None].expand(size, *tensor.shape) for peer, size in zip(peers, sizes, strict=True)]
        )
        torch.testing.assert_close(tensor, each.mean(0), atol=1e-12, rtol=1e-9)
        low, high = (bound(torch.stack([peer[name] for peer in peers]), 0) for bound in (torch.amin, torch.amax))
        assert ((tensor >= low - 1e-12) & (tensor <= high + 1e-12)).all()
    own, *others = peers
    mixed = mix(own, list(zip(map(float, sizes[1:]), others, strict=True)), own_weight=sizes[0])
    assert all(mixed[name].equal(averaged[name]) for name in averaged)  # D-PSGD's mixing is the same average


def test_average_is_new_tensors_and_the_same_bits_again() -> None:
    peers = [{name: tensor.float() for name, tensor in model.items()} for model in models(1, 6)]
    before = [{name: tensor.clone() for name, tensor in peer.items()} for peer in peers]
    sizes = [3, 1, 4, 1, 5, 9]
    averaged, again = fedavg.average(peers, sizes), fedavg.average(peers, sizes)
    for name, tensor in averaged.items():
        assert tensor.equal(again[name])
        assert tensor.dtype == torch.float32
        tensor += 1
        assert all(peer[name].equal(kept[name]) for peer, kept in zip(peers, before, strict=True))


@pytest.mark.parametrize(
    ("given", "weights", "message"),
    [
        ([], [], "there are 0 models and 0 weights"),
        ([{"w": torch.ones(2)}], [1, 2], "there are 1 models and 2 weights; each model needs one weight"),
        ([{"w": torch.ones(2)}] * 2, [0, 0], r"weights are \[0, 0\]; none may be below 0, and one must be above"),
        ([{"w": torch.ones(2)}] * 2, [3, -1], r"weights are \[3, -1\]"),
        ([{"w": torch.ones(2)}] * 2, [1, math.nan], r"weights are \[1, nan\]"),
        ([{"w": torch.ones(2)}] * 2, [1, math.inf], r"weights are \[1, inf\]"),
        (
            [{"w": torch.ones(2)}] * 2 + [{"w": torch.ones(3)}],
            [1, 1, 1],
            r"'w' is \(2,\) in model 0 and \(3,\) in model 2",
        ),
        ([{"w": torch.ones(2)}, {}], [1, 1], r"'w' is \(2,\) in model 0 and absent in model 1"),
        ([{"steps": torch.ones(1).long()}], [1], "'steps' is torch.int64; only floating-point tensors"),
    ],
)
def test_what_cannot_be_averaged_is_refused(given: list[dict[str, Tensor]], weights: list[float], message: str) -> None:
    for average in (weighted_average, fedavg.average):
        with pytest.raises(ValueError, match=message):
            average(given, weights)


# FedMD and FedDF


@quick
@given(swarms)
def test_one_peer_teaches_what_it_says(logits: Tensor) -> None:
    alone = logits[:1]
    assert fedmd.consensus(alone).equal(alone[0])
    torch.testing.assert_close(feddf.teacher(alone), alone[0].softmax(1))


@quick
@given(swarms, st.floats(-100, 100))
def test_a_shift_of_a_peers_logits_moves_the_consensus_and_not_the_teacher(logits: Tensor, shift: float) -> None:
    shifted = logits.clone()
    shifted[0] += shift
    moved = fedmd.consensus(shifted) - fedmd.consensus(logits)
    torch.testing.assert_close(moved, torch.full_like(moved, shift / len(logits)), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(feddf.teacher(shifted), feddf.teacher(logits), atol=1e-9, rtol=1e-9)


@quick
@given(swarms)
def test_losses_are_those_of_the_papers_and_vanish_at_their_goal(logits: Tensor) -> None:
    model = logits[-1].clone().requires_grad_()
    together = fedmd.consensus(logits)
    loss = fedmd.align_loss(model, together)
    torch.testing.assert_close(loss.detach(), (logits[-1] - together).abs().mean())
    assert fedmd.align_loss(together, together) == 0
    loss.backward()
    assert model.grad is not None
    torch.testing.assert_close(model.grad, (logits[-1] - together).sign() / together.numel())

    model.grad = None
    teacher = feddf.teacher(logits)
    loss = feddf.distillation_loss(teacher, model)
    by_hand = (teacher * (teacher.log() - logits[-1].log_softmax(1))).sum(1).mean()
    torch.testing.assert_close(loss.detach(), by_hand, atol=1e-10, rtol=1e-9)
    assert abs(feddf.distillation_loss(teacher, together)) < 1e-12
    loss.backward()
    torch.testing.assert_close(model.grad, (logits[-1].softmax(1) - teacher) / len(teacher), atol=1e-12, rtol=1e-9)


def test_teachers_carry_no_gradient() -> None:
    logits = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert not fedmd.consensus(logits).requires_grad
    assert not feddf.teacher(logits).requires_grad
    model = torch.zeros(2, 4, requires_grad=True)
    (fedmd.align_loss(model, logits[0]) + feddf.distillation_loss(logits[1].softmax(1), model)).backward()
    assert logits.grad is None


@pytest.mark.parametrize("combine", [fedmd.consensus, feddf.teacher])
def test_diverged_peer_is_named(combine: Callable[[Tensor], Tensor]) -> None:
    logits = torch.zeros(3, 2, 4)
    logits[1, 1, 2] = math.nan
    with pytest.raises(ValueError, match="teacher 1 of 3 gives answers that are not finite"):
        combine(logits)
    with pytest.raises(ValueError, match=r"shape \(2, 4\); they must be \(teachers, samples, classes\)"):
        combine(logits[0])


@pytest.mark.parametrize(("teacher", "logits"), [((2, 3), (2, 4)), ((2, 3), (3, 3)), ((0, 3), (0, 3)), ((3,), (3,))])
def test_a_lesson_needs_samples_and_one_shape(teacher: tuple[int, ...], logits: tuple[int, ...]) -> None:
    for loss in (feddf.distillation_loss, lambda teacher, logits: fedmd.align_loss(logits, teacher)):
        with pytest.raises(ValueError, match=r"both must be \(samples, classes\) with at least one sample"):
            loss(torch.ones(teacher), torch.ones(logits))


# FedCT


@quick
@given(swarms)
def test_the_majority_is_followed_and_the_lowest_among_equals(logits: Tensor) -> None:
    labels, classes = logits.argmax(2), logits.shape[2]
    voted = fedct.vote(labels.to(torch.uint8), classes)
    assert voted.dtype == torch.int64
    for sample, winner in enumerate(voted.tolist()):
        ballot = labels[:, sample].tolist()
        assert winner == max(range(classes), key=lambda label: (ballot.count(label), -label))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(3).long(), r"torch.int64 of shape \(3,\); they must be class ids \(peers, samples\)"),
        (torch.zeros(0, 3).long(), "with at least one peer"),
        (torch.zeros(2, 3), "the labels are torch.float32"),
        (torch.tensor([[0, 1], [2, 4]]), r"peer 1 of 2 names class 4; ids lie in 0\.\.3"),
        (torch.tensor([[0, -1], [2, 3]]), "peer 0 of 2 names class -1"),
    ],
)
def test_ballots_that_cannot_be_counted(labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fedct.vote(labels, 4)


# SSL


@quick
@given(swarms, st.floats(0, 2))
def test_self_training_is_cross_entropy_on_both_parts(logits: Tensor, weight: float) -> None:
    model, labels = logits[-1], logits[0].argmin(1)
    pseudo = ssl.pseudo_labels(logits[0])
    assert pseudo.equal(logits[0].argmax(1))
    loss = ssl.refine_loss(model, labels, model[:1], pseudo[:1], unlabelled_weight=weight)
    rows = -model.log_softmax(1)
    by_hand = rows[range(len(rows)), labels].mean() + weight * rows[0, pseudo[0]]
    torch.testing.assert_close(loss, by_hand, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.zeros(3).long()}, r"labels has shape \(3,\), its logits have \(2, 4\).* labels \(2,\)"),
        ({"pseudo": torch.ones(5, 3)}, r"pseudo has shape \(5, 3\), .* pseudo \(5,\) or \(5, 4\)"),
        ({"labelled_logits": torch.ones(0, 4), "labels": torch.zeros(0).long()}, "none empty"),
        ({"public_logits": torch.ones(0, 4), "pseudo": torch.zeros(0, 4)}, "none empty"),
        ({"unlabelled_weight": -0.1}, "unlabelled_weight is -0.1; it must not be below 0"),
    ],
)
def test_mistakes_in_self_training_are_explained(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "labelled_logits": torch.ones(2, 4),
        "labels": torch.zeros(2).long(),
        "public_logits": torch.ones(5, 4),
        "pseudo": torch.full((5, 4), 0.25),
    } | changes
    with pytest.raises(ValueError, match=message):
        ssl.refine_loss(**given)
