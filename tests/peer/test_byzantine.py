"""Lies: what each mode makes of a message, what it leaves alone, and what nobody can lie about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch import Tensor

from peer import snapshot
from peer.byzantine import Lies
from peer.plan import make_plan
from topology import TopologyError, load
from topology.faults import Byzantine
from transport.faultlog import FaultLog


def rule(mode: Any, **keys: Any) -> Byzantine:
    return Byzantine(id=mode, kind="byzantine", peer=0, mode=mode, **keys)


def message(value: float) -> dict[str, Tensor]:
    n, a = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([0.5, 0.0])
    return {"model.w": torch.full((2, 2), value), "n": n, "a": a}


@pytest.fixture
def log(tmp_path: Path) -> FaultLog:
    return FaultLog(tmp_path, 0.0)


def logged(folder: Path) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
    return [(line["mode"], line["round"]) for line in lines]


@pytest.mark.parametrize(
    ("mode", "weight"), [("nan", torch.nan), ("scale", -20.0), ("sign_flip", -2.0), ("lying_statistics", 2.0)]
)
def test_a_lie_is_in_what_it_says_it_is_in(mode: str, weight: float, log: FaultLog, tmp_path: Path) -> None:
    truth = message(2.0)
    told = Lies([rule(mode)], log).messages(1, 1, {1: truth, 2: truth})
    assert told[1] is told[2], "one lie for all, so that it is sealed once"
    torch.testing.assert_close(told[1]["model.w"], torch.full((2, 2), weight), equal_nan=True)
    assert told[1]["n"].dtype == torch.int32
    assert told[1]["n"].tolist() == ([1000, 1000] if mode == "lying_statistics" else [3, 0])
    assert told[1]["a"].tolist() == ([1.0, 1.0] if mode == "lying_statistics" else [0.5, 0.0])
    assert truth["model.w"].tolist() == [[2.0, 2.0]] * 2, "the liar's own model"
    assert logged(tmp_path) == [(mode, 1)]


def test_what_is_stale_is_of_the_round_before_and_the_first_is_true(log: FaultLog, tmp_path: Path) -> None:
    lies, weights = Lies([rule("stale")], log), []
    for round in (1, 2, 3):
        truth = message(float(round))
        weights.append(lies.messages(round, 1, {1: truth})[1]["model.w"][0, 0].item())
        truth["model.w"] += 100.0  # it goes on learning in the same memory
    assert weights == [1.0, 1.0, 2.0]
    assert logged(tmp_path) == [("stale", 2), ("stale", 3)]


def test_lies_keep_to_their_rounds_and_labels_move_on_by_one(log: FaultLog, tmp_path: Path) -> None:
    lies, labels = Lies([rule("label_flip", rounds="2")], log), np.array([0, 1, 2])
    assert [lies.labels(round, labels, 3).tolist() for round in (1, 2, 2, 3)] == [
        [0, 1, 2], [1, 2, 0], [1, 2, 0], [0, 1, 2],
    ]  # fmt: skip
    truths = {1: message(1.0)}
    assert lies.messages(2, 1, truths)[1] is truths[1]
    assert logged(tmp_path) == [("label_flip", 2)]


@pytest.mark.parametrize("worst", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_nonsense(worst: float) -> None:
    assert snapshot.nonsense({"w": torch.tensor([0.0, worst])}, {}) == "its weights are not finite"
    assert snapshot.nonsense({"w": torch.tensor([0.0, -3e38])}, {}) is None


@pytest.mark.parametrize("extras", [{"n": -1}, {"a": 1.5}, {"a": -0.1}, {"a": torch.nan}, {"counts": -1}])
def test_statistics_that_nobody_can_have_measured_are_nonsense(extras: dict[str, float]) -> None:
    said = {"n": torch.tensor([2]), "a": torch.tensor([0.5])}
    assert snapshot.nonsense({}, said) is None
    wrong = {name: torch.tensor([value]) for name, value in extras.items()}
    assert snapshot.nonsense({}, said | wrong) == "its statistics are no counts and fractions"


@pytest.mark.parametrize(
    ("method", "mode", "said"),
    [
        ("uniform", "lying_statistics", "the method 'uniform' shares no statistics"),
        ("local", "scale", "the method 'local' shares nothing"),
        ("local", "label_flip", None),
        ("crad", "lying_statistics", None),
    ],
)
def test_nobody_lies_about_what_is_never_said(method: str, mode: str, said: str | None, tmp_path: Path) -> None:
    file = tmp_path / "swarm.toml"
    fault = {"id": "liar", "kind": "byzantine", "peer": 1, "mode": mode}
    models = {"pool": [{"name": "mlp", "hidden": [8]}]}
    file.write_text(tomli_w.dumps({"method": {"name": method}, "models": models, "fault": [fault]}))
    if said is None:
        make_plan(load(file))
        return
    with pytest.raises(TopologyError, match=said):
        make_plan(load(file))
