"""CRAD's target against values recorded from a separate, literal numpy program; its edges and mistakes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from peer.methods import crad, weighting
from peer.methods.distillation import soften
from peer.methods.uncertainty import uncertainty_target
from peer.methods.uniform import uniform_target

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "crad_golden.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}
CHAIN = [name for name, case in CASES.items() if "supported" in case["expected"]]
ELSEWHERE = {
    "baseline_pieces",  # its part that exists (the consensus of FedMD) is in test_distillation.py
    "sizes_and_traffic",  # parameter counts: with the models
}
DTYPES = [torch.float64, torch.float32]


def close(actual: Tensor, expected: Any, dtype: torch.dtype = torch.float64, *, weights: bool = False) -> None:
    """Within the tolerances the recorded values came with (they are rounded to 6 decimals)."""
    atol, rtol = (1e-6, 1e-6) if dtype == torch.float64 else (2e-5, 1e-4)
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, atol=atol, rtol=rtol if weights else 0)


def statistics(inputs: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.tensor(inputs["n"], dtype=torch.int32), torch.tensor(inputs["a"], dtype=dtype)


def probabilities(inputs: dict[str, Any], dtype: torch.dtype) -> Tensor:
    if "q" in inputs:
        return torch.tensor(inputs["q"], dtype=dtype)
    return soften(torch.tensor(inputs["teacher_logits"], dtype=dtype), inputs["T"])


def arguments(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    names = {"tau": "min_support", "use_filter": "agreement", "empty": "empty_class", "student": "student"}
    given = {names[name]: value for name, value in inputs.get("options", {}).items()}
    if "student" in given:
        given["student"] = torch.tensor(given["student"], dtype=dtype)
    return given


def by_class(kept: Tensor) -> list[list[int]]:
    return [kept[:, label].nonzero()[:, 0].tolist() for label in range(kept.shape[1])]


def row_status(found: crad.Aggregate) -> list[str]:
    return [
        "renormalised" if mass > crad.ROW_MINIMUM else "uniform_fallback" if row.sum() > 0 else "no_target"
        for mass, row in zip(found.row_sum, found.target, strict=True)
    ]


# Recorded values


def test_every_recorded_case_is_tested() -> None:
    special = {"no_support_at_all_zero", "weight_table", "weight_alternatives", "nine_teachers_ten_classes"}
    assert set(CASES) == {*CHAIN, *special, *ELSEWHERE}
    assert len(CASES) == 20
    assert GOLDEN["meta"]["z"] == weighting.Z
    assert GOLDEN["meta"]["eps"] == weighting.EPSILON
    assert GOLDEN["meta"]["tie_slack"] == crad.TIE_SLACK
    assert GOLDEN["meta"]["row_min"] == crad.ROW_MINIMUM


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHAIN)
def test_recorded_chain(name: str, dtype: torch.dtype) -> None:
    inputs, expected = CASES[name]["inputs"], CASES[name]["expected"]
    q, (n, a), given = probabilities(inputs, dtype), statistics(inputs, dtype), arguments(inputs, dtype)
    supported = crad.survivors(q, n, min_support=given.get("min_support", 1), agreement=False)
    assert by_class(supported) == expected["supported"]

    known = supported.any(0)
    consensus = crad._consensus(q, supported).masked_fill(~known, math.nan)
    deviation = crad._deviations(q, consensus, "mean_abs").masked_fill(~supported, math.nan)
    median = crad._lower_median(deviation.nan_to_num(), supported).masked_fill(~known, math.nan)
    for actual, key in ((consensus, "consensus"), (deviation, "deviation"), (median, "median")):
        recorded = np.array(expected[key], dtype=float)  # null becomes nan
        assert np.array_equal(actual.isnan().numpy(), np.isnan(recorded))
        close(actual.nan_to_num(), np.nan_to_num(recorded).tolist(), dtype)

    found = crad.aggregate(q, n, a, **given)
    p_tilde, variance = weighting.agresti_coull(n, a)
    assert by_class(found.survivors) == expected["survivors"]
    close(p_tilde, expected["p_tilde"], dtype)
    close(found.p_tilde, expected["p_tilde"], dtype)
    close(variance, expected["variance"], dtype)
    close(found.weights, expected["weight"], dtype, weights=True)
    close(found.raw, expected["raw"], dtype)
    close(found.row_sum, expected["row_sum"], dtype)
    assert row_status(found) == expected["row_status"]
    assert found.target.dtype == dtype
    close(found.target, expected["target"], dtype)
    assert torch.equal(crad.class_target(q, n, a, **given), found.target)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_variants_and_losses(dtype: torch.dtype) -> None:
    case = CASES["three_teachers_all_supported"]
    inputs, expected = case["inputs"], case["expected"]
    q, (n, a) = probabilities(inputs, dtype), statistics(inputs, dtype)
    close(q, expected["q"], dtype)
    close(crad.class_target(q, n, a, weighting="uniform"), expected["stage1_only"], dtype)
    for target, key in ((crad.class_target(q, n, a), "loss"), (uniform_target(q), "loss_uniform_kd")):
        check_loss(inputs, target, expected[key], dtype)
    for weight, key in ((0.0, "loss_lambda0"), (1.0, "loss_lambda1")):
        check_loss(inputs | {"lam": weight}, crad.class_target(q, n, a), {"total": expected[key]}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_case_without_any_target(dtype: torch.dtype) -> None:
    case = CASES["no_support_at_all_zero"]
    inputs, expected = case["inputs"], case["expected"]
    n, a = statistics(inputs, dtype)
    found = crad.aggregate(probabilities(inputs, dtype), n, a, **arguments(inputs, dtype))
    assert row_status(found) == expected["row_status"]
    assert found.row_sum.tolist() == expected["row_sum"]
    assert not found.target.any()
    check_loss(inputs, found.target, expected["loss"], dtype)
    check_loss(inputs, None, expected["loss"], dtype)


def check_loss(inputs: dict[str, Any], target: Tensor | None, expected: dict[str, Any], dtype: torch.dtype) -> None:
    logits = torch.tensor(inputs["student_logits"], dtype=dtype, requires_grad=True)
    labels = torch.tensor(inputs["labels"])
    loss = crad.student_loss(logits, labels, target, distillation_weight=inputs["lam"], temperature=inputs["T"])
    close(loss.detach(), expected["total"], dtype)
    if "grad_logits" in expected:
        loss.backward()
        assert logits.grad is not None
        close(logits.grad, expected["grad_logits"], dtype)
        close(loss.detach(), expected["ce_part"] + expected["kd_part"], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_weight_table(dtype: torch.dtype) -> None:
    rows = CASES["weight_table"]["expected"]["rows"]
    assert [[row["n"], row["a"]] for row in rows] == CASES["weight_table"]["inputs"]["grid"]
    n = torch.tensor([[row["n"]] for row in rows])
    a = torch.tensor([[row["a"]] for row in rows], dtype=dtype)
    p_tilde, variance = weighting.agresti_coull(n, a)
    close(p_tilde[:, 0], [row["p_tilde"] for row in rows], dtype)
    close(variance[:, 0], [row["variance"] for row in rows], dtype, weights=True)
    precision = weighting.class_weights(n, a)
    close(precision[:, 0], [row["precision"] for row in rows], dtype, weights=True)
    textbook = weighting.class_weights(n, a, z=2.0)
    close(textbook[:, 0], [row["precision_z2"] for row in rows], dtype, weights=True)
    for rule in weighting.WEIGHTINGS:
        listed = [number for number, row in enumerate(rows) if rule in row["alternatives"]]
        assert len(listed) == len(rows) or rule == "raw_precision"
        weights = weighting.class_weights(n, a, weighting=rule)[listed, 0]
        close(weights, [rows[number]["alternatives"][rule] for number in listed], dtype, weights=True)


def test_raw_precision_without_variance_is_limited_by_epsilon_alone() -> None:
    weights = weighting.class_weights(
        torch.tensor([[0, 7, 7]]), torch.tensor([[0.0, 0.0, 1.0]]), weighting="raw_precision"
    )
    close(weights, [[1e12, 1e12, 1e12]], weights=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", weighting.WEIGHTINGS)
def test_recorded_weight_rules(rule: str, dtype: torch.dtype) -> None:
    inputs, expected = CASES["weight_alternatives"]["inputs"], CASES["weight_alternatives"]["expected"]
    assert set(expected["by_rule"]) == set(weighting.WEIGHTINGS)
    n, a = statistics(inputs, dtype)
    found = crad.aggregate(probabilities(inputs, dtype), n, a, weighting=rule)
    assert by_class(found.survivors) == expected["survivors"]
    close(found.weights, expected["by_rule"][rule]["weight"], dtype, weights=True)
    close(found.raw, expected["by_rule"][rule]["raw"], dtype)
    close(found.target, expected["by_rule"][rule]["target"], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["accuracy", "accuracy_x_support", "wilson_lower", "gated_precision"])
def test_weights_that_are_all_zero_count_alike(rule: str, dtype: torch.dtype) -> None:
    inputs, expected = CASES["weight_alternatives"]["inputs"], CASES["weight_alternatives"]["expected"]
    n, a = statistics(inputs, dtype)
    target = crad.class_target(probabilities(inputs, dtype), n, torch.zeros_like(a), weighting=rule)
    close(target, expected["zero_accuracy"], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_nine_teachers(dtype: torch.dtype) -> None:
    inputs, expected = (
        CASES["nine_teachers_ten_classes"]["inputs"],
        CASES["nine_teachers_ten_classes"]["expected"],
    )
    assert inputs["logits_formula"] == "2*sin(1 + 3*j + 5*b + 7*c*(j+1))"
    j, b, c = (
        torch.arange(inputs[size], dtype=torch.float64).view(shape)
        for size, shape in (("J", (-1, 1, 1)), ("B", (1, -1, 1)), ("C", (1, 1, -1)))
    )
    q = soften((2 * torch.sin(1 + 3 * j + 5 * b + 7 * c * (j + 1))).to(dtype), inputs["T"])
    n, a = statistics(inputs, dtype)
    found = crad.aggregate(q, n, a)
    supported = n >= 1
    distance = crad._deviations(q, crad._consensus(q, supported), "mean_abs")
    close(crad._lower_median(distance, supported), expected["median"], dtype)
    assert by_class(found.survivors) == expected["survivors"]
    close(found.row_sum, expected["row_sum"], dtype)
    close(found.target, expected["target"], dtype)
    close(uniform_target(q), expected["uniform_kd"], dtype)
    close(uncertainty_target(q), expected["uncertainty_kd"], dtype)


# Edges, diagnostics and mistakes


def test_target_carries_no_gradient_to_teachers_or_student() -> None:
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    student = torch.randn(4, 5, generator=torch.Generator().manual_seed(2)).requires_grad_()
    n = torch.ones(3, 5, dtype=torch.int32)
    n[:, 2] = 0
    target = crad.class_target(
        soften(logits, 3.0), n, torch.rand(3, 5), empty_class="student", student=soften(student, 3.0)
    )
    assert not target.requires_grad
    loss = crad.student_loss(student, torch.zeros(4).long(), target, distillation_weight=0.7, temperature=3.0)
    loss.backward()
    assert logits.grad is None
    assert student.grad is not None
    assert student.grad.any()


@pytest.mark.parametrize("empty_class", crad.EMPTY_CLASSES)
def test_without_teachers_there_is_no_target(empty_class: str) -> None:
    found = crad.aggregate(torch.empty(0, 4, 3), torch.empty(0, 3), torch.empty(0, 3), empty_class=empty_class)
    assert found.target.equal(torch.zeros(4, 3))
    assert crad.reliability(found) == crad.Reliability(0, 1, 0, 0, 0, 0, [0, 0, 0], [0, 0, 0])


def test_a_row_without_mass_falls_back_alone() -> None:
    q = torch.eye(3).expand(2, 3, 3).transpose(0, 1).contiguous()
    q[:, 1] = torch.tensor([0.2, 0.3, 0.5])
    found = crad.aggregate(q, torch.full((3, 3), 9), torch.full((3, 3), 0.5), empty_class="zero")
    close(found.target, [[1 / 3, 1 / 3, 1 / 3], [0.2, 0.3, 0.5]], torch.float32)
    assert row_status(found) == ["uniform_fallback", "renormalised"]


def test_reliability_tells_of_decisive_but_wrong_teachers() -> None:
    case = CASES["decisive_but_wrong_teacher"]
    n, a = statistics(case["inputs"], torch.float64)
    found = crad.reliability(crad.aggregate(probabilities(case["inputs"], torch.float64), n, a))
    assert found.doubtful == pytest.approx(1 / 3)
    assert (found.empty, found.survivors) == (0, 2)
    assert found.row_sum_mean == pytest.approx(0.858273, abs=1e-6)


def test_reliability_ignores_the_weight_of_removed_teachers() -> None:
    near, far = torch.tensor([[0.6, 0.4]]), torch.tensor([[0.1, 0.9]])
    n, a = torch.tensor([[9, 9], [9, 9], [900, 900]]), torch.tensor([[0.7, 0.7], [0.7, 0.7], [0.0, 0.0]])
    found = crad.aggregate(torch.stack([near, near, far]), n, a)
    assert by_class(found.survivors) == [[0, 1], [0, 1]]
    assert crad.reliability(found).doubtful == 0


def test_deviation_is_a_mean_over_the_batch() -> None:
    q = torch.tensor([[[0.5], [0.9]], [[0.5], [0.1]]])
    for rule, expected in (("mean_abs", 0.2), ("rms", 0.08**0.5)):
        close(crad._deviations(q, q.mean(0), rule), [[expected], [expected]], torch.float32)


def test_reliability_counts_empty_classes_apart() -> None:
    case = CASES["empty_class_zero"]
    n, a = statistics(case["inputs"], torch.float64)
    a[:, 0] = 0
    found = crad.reliability(crad.aggregate(probabilities(case["inputs"], torch.float64), n, a, empty_class="zero"))
    assert found.survivors_by_class == [2, 0, 2]
    assert found.doubtful_by_class == [1, 0, 0]
    assert found.doubtful == pytest.approx(1 / 2)
    assert found.empty == pytest.approx(1 / 3)
    assert found.survivors == pytest.approx(4 / 3)
    assert found.row_sum_min < found.row_sum_mean < found.row_sum_max < 1


def test_diverged_teacher_is_named() -> None:
    q = torch.full((4, 2, 3), 1 / 3)
    q[2, 1, 0] = math.nan
    q[3, 0, 0] = math.inf
    for combine in (
        uniform_target,
        uncertainty_target,
        lambda q: crad.class_target(q, torch.zeros(4, 3), torch.zeros(4, 3)),
    ):
        with pytest.raises(ValueError, match=r"teacher 2 of 4 .* not finite"):
            combine(q)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.ones(2, 3)}, r"shape \(2, 3\); they must be \(teachers, samples, classes\)"),
        ({"q": torch.ones(2, 0, 3)}, "at least one sample"),
        ({"n": torch.ones(3, 3)}, r"n has shape \(3, 3\).* must be \(teachers, classes\) = \(2, 3\)"),
        ({"a": torch.ones(2, 4)}, r"a has \(2, 4\)"),
        ({"a": torch.tensor([[0, 0, 0], [0, math.nan, 0]])}, "teacher 1 reports accuracy nan for class 1"),
        ({"a": torch.full((2, 3), 1.5)}, "teacher 0 reports accuracy 1.5 for class 0"),
        ({"weighting": "precise"}, "weighting is 'precise'; choose one of precision, accuracy"),
        ({"empty_class": "drop"}, "empty_class is 'drop'; choose one of uniform, zero, student"),
        ({"deviation": "max"}, "deviation is 'max'; choose one of mean_abs, rms"),
        ({"min_support": 0}, "min_support is 0; it must be at least 1"),
        ({"z": 0.0}, "z is 0.0 and epsilon is 1e-12; both must be above 0"),
        ({"epsilon": 0.0}, "both must be above 0"),
        ({"empty_class": "student"}, r"\(samples, classes\) = \(4, 3\); it is None"),
        ({"empty_class": "student", "student": torch.ones(4, 2)}, r"it is \(4, 2\)"),
    ],
)
def test_mistakes_are_explained(changes: dict[str, Any], message: str) -> None:
    given = {"q": torch.full((2, 4, 3), 1 / 3), "n": torch.ones(2, 3), "a": torch.ones(2, 3)} | changes
    with pytest.raises(ValueError, match=message):
        crad.class_target(**given)
