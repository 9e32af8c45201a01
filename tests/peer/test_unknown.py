"""Accuracies and margins of models that may say "unknown", against recorded values; their limits and mistakes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as arrays_of
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.unknown import margins, prior_accuracy, recognised

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "fedcc_golden.json").read_text())
CASE = next(case for case in GOLDEN["cases"] if case["id"] == "f13_metrics")
DTYPES = [torch.float64, torch.float32]
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@st.composite
def answers(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, C+1), labels (B,) and majority classes (C,)."""
    samples, classes = draw(st.integers(1, 8)), draw(st.integers(2, 4))
    logits = draw(arrays_of.arrays(float, (samples, classes + 1), elements=st.floats(-8, 8, width=32)))
    labels = draw(arrays_of.arrays(np.int64, samples, elements=st.integers(0, classes - 1)))
    majority = draw(arrays_of.arrays(bool, classes))
    return torch.from_numpy(logits), torch.from_numpy(labels), torch.from_numpy(majority)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_metrics(dtype: torch.dtype) -> None:
    inputs, expected = CASE["inputs"], CASE["expected"]
    logits, labels = torch.tensor(inputs["probs"], dtype=dtype).log(), torch.tensor(inputs["labels"])
    majority = torch.zeros(inputs["C"], dtype=torch.bool)
    majority[inputs["C_J"]] = True
    assert logits.argmax(1).tolist() == expected["pred_C_plus_1"]
    assert logits[:, :-1].argmax(1).tolist() == expected["pred_C"]
    assert recognised(logits, labels, majority) == expected["global_valid_accuracy"]
    assert recognised(logits, labels, torch.ones_like(majority)) == pytest.approx(expected["global_plain_accuracy"])
    prior = torch.tensor(inputs["label_prior"], dtype=dtype)
    assert prior_accuracy(logits, labels, prior) == pytest.approx(expected["local_weighted_accuracy"])
    by_class = [prior_accuracy(logits, labels, one) for one in torch.eye(inputs["C"])]
    assert by_class == pytest.approx(expected["per_class_accuracy"])
    for rule in ("valid", "plain"):
        found = margins(logits, labels, majority, rule=rule)
        recorded = torch.tensor(expected[f"margin_{rule}"], dtype=torch.float64)
        torch.testing.assert_close(found, recorded, atol=1e-6 if dtype == torch.float64 else 2e-5, rtol=0)
        assert found.mean().item() == pytest.approx(expected[f"margin_{rule}_mean"], abs=1e-6)
    assert margins(logits, labels, majority).equal(margins(logits, labels, majority, rule="valid"))


@quick
@given(answers())
def test_a_margin_is_positive_where_the_answer_is_right(found: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, labels, majority = found
    for rule, owned in (("valid", majority), ("plain", torch.ones_like(majority))):
        margin = margins(logits, labels, majority, rule=rule)
        assert (margin.abs() <= 1).all()
        right = [recognised(logits[[row]], labels[[row]], owned) for row in range(len(labels))]
        assert all(margin[row] >= 0 for row in range(len(labels)) if right[row] == 1)
        assert all(margin[row] <= 0 for row in range(len(labels)) if right[row] == 0)
        assert recognised(logits, labels, owned) == pytest.approx(sum(right) / len(right))
    assert (margins(logits, labels, majority) >= margins(logits, labels, majority, rule="plain")).all()


@quick
@given(answers())
def test_without_an_unknown_output_only_the_label_is_right(found: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, labels, majority = found
    known = logits[:, :-1]
    assert recognised(known, labels, majority) == pytest.approx((known.argmax(1) == labels).double().mean().item())
    plain = margins(known, labels, majority, rule="plain")
    assert plain.equal(margins(known, labels, majority))
    never = torch.cat([known, torch.full_like(known[:, :1], -1000)], 1)
    torch.testing.assert_close(margins(never, labels, majority), plain)
    shares = torch.bincount(labels, minlength=len(majority)) / len(labels)
    accuracy = prior_accuracy(known, labels, shares)
    assert accuracy == pytest.approx((known.argmax(1) == labels).double().mean().item())
    assert prior_accuracy(logits, labels, shares) == accuracy
    assert prior_accuracy(logits, labels, torch.bincount(labels, minlength=len(majority))) == pytest.approx(accuracy)


def test_a_class_without_samples_is_left_out() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    labels = torch.tensor([0, 1])
    assert prior_accuracy(logits, labels, torch.tensor([0.3, 0.2, 0.5])) == pytest.approx(0.6)
    with pytest.raises(ValueError, match="no sample is of a class the peer holds"):
        prior_accuracy(logits, labels, torch.tensor([0.0, 0.0, 1.0]))


@pytest.mark.parametrize("measure", [recognised, prior_accuracy, margins])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.ones(2, 5)}, r"logits have shape \(2, 5\) and there are 3 classes; .* \(samples, 3\) or"),
        ({"logits": torch.ones(3)}, r"logits have shape \(3,\)"),
        ({"logits": torch.ones(0, 4), "labels": torch.zeros(0).long()}, "at least one sample"),
        ({"logits": torch.ones(2, 2), "by_class": torch.ones(1)}, "and 2 classes"),
        ({"labels": torch.zeros(3).long()}, r"labels have shape \(3,\); for these logits they must be \(2,\)"),
        ({"labels": torch.tensor([0, 3])}, r"labels go from 0 to 3; they must be in 0\.\.2"),
        ({"labels": torch.tensor([-1, 2])}, "labels go from -1 to 2"),
    ],
)
def test_mistakes_are_explained(measure: Callable[..., Any], changes: dict[str, Tensor], message: str) -> None:
    given = {"logits": torch.ones(2, 4), "labels": torch.zeros(2).long(), "by_class": torch.ones(3).bool()} | changes
    with pytest.raises(ValueError, match=message):
        measure(*given.values())


def test_unknown_rule_is_explained() -> None:
    with pytest.raises(ValueError, match="rule is 'strict'; choose one of valid, plain"):
        margins(torch.ones(1, 4), torch.zeros(1).long(), torch.ones(3).bool(), rule="strict")
