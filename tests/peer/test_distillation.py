"""What all distilling methods share: softening, the student's loss, and the targets that are averages."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.methods.distillation import soften, student_loss
from peer.methods.uncertainty import uncertainty_target, uncertainty_weights
from peer.methods.uniform import uniform_target

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "crad_golden.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}
DTYPES = [torch.float64, torch.float32]
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31)
temperatures = st.floats(0.5, 8)
shares = st.floats(0, 1)


def close(actual: Tensor, expected: Any, dtype: torch.dtype) -> None:
    """Within the tolerances the recorded values came with (they are rounded to 6 decimals)."""
    atol = 1e-6 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


def draw(seed: int, samples: int = 3, classes: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Student logits, labels and a target, in float64."""
    generator = torch.Generator().manual_seed(seed)
    logits, other = 3 * torch.randn(2, samples, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (samples,), generator=generator), other.softmax(-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_averages(dtype: torch.dtype) -> None:
    inputs, expected = (CASES["three_teachers_all_supported"][part] for part in ("inputs", "expected"))
    q = soften(torch.tensor(inputs["teacher_logits"], dtype=dtype), inputs["T"])
    close(q, expected["q"], dtype)
    close(uniform_target(q), expected["uniform_kd"], dtype)
    close(uncertainty_weights(q), expected["uncertainty_weight"], dtype)
    close(uncertainty_target(q), expected["uncertainty_kd"], dtype)
    assert uniform_target(q).dtype == uncertainty_target(q).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_consensus_of_fedmd(dtype: torch.dtype) -> None:
    # The other recorded pieces of this case belong to DFML and FedMKD, which are not built yet.
    case = CASES["baseline_pieces"]
    target = uniform_target(torch.tensor(case["inputs"]["q"], dtype=dtype))
    close(target, case["expected"]["fedmd_consensus"], dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits, labels, target = draw(0)
    logits = logits.to(dtype)
    assert soften(logits, 3.0).equal(soften(logits.float(), 3.0))
    loss = student_loss(logits, labels, target, distillation_weight=0.7, temperature=3.0)
    same = student_loss(logits.float(), labels, target, distillation_weight=0.7, temperature=3.0)
    assert loss.dtype == torch.float32
    assert loss.equal(same)


def test_temperature_flattens() -> None:
    logits = torch.tensor([[2.0, 0.0]])
    assert soften(logits, 1.0)[0, 0].item() == pytest.approx(1 / (1 + math.exp(-2)))
    assert soften(logits, 4.0)[0, 0].item() == pytest.approx(1 / (1 + math.exp(-0.5)))


def test_certain_teachers_weigh_more_sample_by_sample() -> None:
    q = torch.tensor([[[0.9, 0.1], [0.5, 0.5]], [[0.5, 0.5], [1.0, 0.0]]])
    weights = uncertainty_weights(q)
    assert weights[0, 0] > weights[1, 0]
    assert weights[1, 1].item() == pytest.approx(2 / 3)  # e^0 against e^-ln 2; 0 log 0 counts as 0
    torch.testing.assert_close(weights.sum(0), torch.ones(2).double())


@pytest.mark.parametrize("average", [uniform_target, uncertainty_target])
def test_averages_without_teachers_and_without_gradient(average: Any) -> None:
    assert average(torch.empty(0, 2, 3)).equal(torch.zeros(2, 3))
    q = torch.rand(3, 2, 4, generator=torch.Generator().manual_seed(0)).softmax(-1).requires_grad_()
    target = average(q)
    assert not target.requires_grad
    torch.testing.assert_close(target.sum(1), torch.ones(2))
    with pytest.raises(ValueError, match=r"shape \(2, 4\); they must be \(teachers, samples, classes\)"):
        average(q[0])


@quick
@given(seeds, temperatures)
def test_without_weight_on_distillation_it_is_plain_cross_entropy(seed: int, temperature: float) -> None:
    logits, labels, target = draw(seed)
    plain = F.cross_entropy(logits, labels)
    loss = student_loss(logits, labels, target, distillation_weight=0, temperature=temperature)
    torch.testing.assert_close(loss, plain, atol=1e-14, rtol=1e-14)
    loss = student_loss(logits, labels, None, distillation_weight=0.7, temperature=temperature)
    torch.testing.assert_close(loss, plain, atol=1e-14, rtol=1e-14)


@quick
@given(seeds, shares, temperatures)
def test_loss_and_gradient_are_those_of_the_equations(seed: int, share: float, temperature: float) -> None:
    logits, labels, target = draw(seed)
    logits.requires_grad_()
    loss = student_loss(logits, labels, target, distillation_weight=share, temperature=temperature)
    loss.backward()

    z = logits.detach()
    rows = torch.arange(len(z))
    cross_entropy = -z.softmax(-1)[rows, labels].log()
    divergence = (target * (target / soften(z, temperature)).log()).sum(1)
    expected = (1 - share) * cross_entropy.mean() + share * temperature**2 * divergence.mean()
    torch.testing.assert_close(loss.detach(), expected, atol=1e-10, rtol=1e-10)

    one_hot = F.one_hot(labels, z.shape[1])
    by_label, by_teachers = z.softmax(-1) - one_hot, soften(z, temperature) - target
    gradient = ((1 - share) * by_label + share * temperature * by_teachers) / len(z)
    torch.testing.assert_close(logits.grad, gradient, atol=1e-12, rtol=1e-10)


@quick
@given(seeds, shares, temperatures, st.booleans())
def test_gradient_matches_finite_differences(
    seed: int, share: float, temperature: float, one_without_target: bool
) -> None:
    logits, labels, target = draw(seed, samples=2, classes=3)
    if one_without_target:
        target[1] = 0
    logits.requires_grad_()

    def loss_at(z: Tensor) -> Tensor:
        return student_loss(z, labels, target, distillation_weight=share, temperature=temperature)

    loss_at(logits).backward()
    step = 1e-5
    moves = step * torch.eye(logits.numel(), dtype=torch.float64).view(-1, *logits.shape)
    z = logits.detach()
    slopes = [(loss_at(z + move) - loss_at(z - move)).item() / (2 * step) for move in moves]
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.flatten(), torch.tensor(slopes, dtype=torch.float64), atol=1e-7, rtol=1e-6)


def test_a_row_of_zeros_learns_from_its_label_alone() -> None:
    logits, labels, target = draw(3, samples=4)
    target[1] = 0
    loss = student_loss(logits, labels, target, distillation_weight=0.7, temperature=3.0)
    parts = [
        student_loss(logits[[row]], labels[[row]], target[[row]], distillation_weight=0.7, temperature=3.0)
        for row in range(4)
    ]
    parts[1] = F.cross_entropy(logits[[1]], labels[[1]])
    torch.testing.assert_close(loss, torch.stack(parts).mean())


def test_a_target_of_certainty_is_finite() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    target = torch.tensor([[0.0, 1.0, 0.0]], requires_grad=True)
    loss = student_loss(logits, torch.tensor([1]), target, distillation_weight=1.0, temperature=2.0)
    assert loss.item() == pytest.approx(4 * math.log(3))
    loss.backward()
    assert target.grad is None
    assert logits.grad is not None
    close(logits.grad, [[2 / 3, -4 / 3, 2 / 3]], torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": torch.ones(2, 4)}, r"target has shape \(2, 4\), the student's logits have \(2, 3\)"),
        ({"distillation_weight": 1.5}, r"distillation_weight is 1.5; it must lie in 0\.\.1"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
    ],
)
def test_mistakes_are_explained(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "target": torch.full((2, 3), 1 / 3),
        "distillation_weight": 0.5,
        "temperature": 3.0,
    } | changes
    with pytest.raises(ValueError, match=message):
        student_loss(torch.zeros(2, 3), torch.zeros(2).long(), **given)
