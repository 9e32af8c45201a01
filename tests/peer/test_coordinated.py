"""Coordinated methods: what a file must say for them, who sends what to whom, and what their rounds are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch import nn
from torch.nn import functional

from peer.data.sets import load as load_data
from peer.data.shard import Batches
from peer.features import balanced, watch
from peer.methods.fedcc import probe_image
from peer.methods.public import mean_probability
from peer.methods.registry import make
from peer.peer import RoundBatches
from peer.plan import Plan, make_plan
from peer.unknown import evidence, margins, recognised
from topology import TopologyError, load

COORDINATED: dict[str, dict[str, Any]] = {
    "swarm": {"peers": 5, "rounds": 4},
    "graph": {"kind": "star"},
    "data": {"public": 0.1, "partition": "pathological", "classes_per_peer": 5, "held_out": 0.0},
    "models": {"pool": [{"name": "mlp", "hidden": [8]}, {"name": "cnn3", "width": 4}]},
    "method": {"name": "fedcc"},
}
COORDINATOR = [{"id": 0, "role": "coordinator"}]
MakePlan = Callable[..., Plan]


@pytest.fixture
def plan(tmp_path: Path) -> MakePlan:
    def plan(peer: list[dict[str, Any]] = COORDINATOR, **sections: dict[str, Any]) -> Plan:
        described: dict[str, Any] = {name: COORDINATED[name] | sections.get(name, {}) for name in COORDINATED}
        described |= {name: section for name, section in sections.items() if name not in COORDINATED}
        path = tmp_path / "swarm.toml"
        path.write_text(tomli_w.dumps(described | {"peer": peer}))
        return make_plan(load(path))

    return plan


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peer": []}, "method.name = 'fedcc': it needs a coordinator, and no peer has that role"),
        ({"method": {"name": "crad"}}, "role = 'coordinator': the method 'crad' goes from peer to peer"),
        ({"graph": {"kind": "complete"}}, "graph.kind = 'complete': with the method 'fedcc' clients talk to the"),
        ({"graph": {"kind": "ring"}}, "Set graph.kind = 'star'"),
        ({"data": {"public": 0.0}}, "data.public = 0: the method 'fedcc' learns from public samples"),
        ({"data": {"public": 0.0}, "method": {"name": "ssl"}}, "data.public = 0: the method 'ssl'"),
        ({"data": {"public": 0.0}, "method": {"name": "feddf"}}, "data.public = 0: the method 'feddf'"),
        ({"transport": {"dtype": "bfloat16"}}, "Choose 'float32' or 'float16'"),
        ({"method": {"name": "fedavg"}}, "models.pool: FedAvg averages parameters one by one"),
        ({"peer": [*COORDINATOR, {"id": 1, "role": "coordinator"}]}, "peer 0 is the coordinator already"),
        ({"swarm": {"participants": 5}}, "swarm.participants = 5: are drawn from the clients, of which there are 4"),
        ({"method": {"probe": "red"}}, "method.probe: 'red' is not allowed"),
        ({"method": {"lambda": 1}}, "method.lambda: the method 'fedcc' has no such key"),
        (
            {"peer": [{"id": 0, "role": "coordinator", "model": "resnet8"}], "method": {"name": "feddf"}},
            "no client has a resnet8. Give it one of theirs: cnn3(width=4), mlp(hidden=[8])",
        ),
    ],
)
def test_what_cannot_be_coordinated_is_refused(plan: MakePlan, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TopologyError) as caught:
        plan(**changes)
    assert said in str(caught.value)


def test_the_coordinator_holds_no_data_and_everything_else_is_dealt_or_public(plan: MakePlan) -> None:
    made = plan()
    assert made.coordinator == 0 and made.clients == (1, 2, 3, 4)
    assert len(made.shards[0].train) == len(made.shards[0].validation) == len(made.shards[0].test) == 0
    dealt = np.concatenate([made.public, *(made.shards[k].train for k in made.clients)])
    assert np.array_equal(np.sort(dealt), np.arange(len(made.data.y_train)))
    assert np.array_equal(made.public_positions[made.public], np.arange(len(made.public)))
    assert (np.delete(made.public_positions, made.public) == -1).all()


def test_any_peer_can_coordinate_and_is_then_the_hub(plan: MakePlan) -> None:
    made = plan(peer=[{"id": 3, "role": "coordinator"}])
    assert sorted(made.neighbors.receivers[3]) == [0, 1, 2, 4]
    assert made.neighbors.receivers[0] == (3,)


def test_participants_are_drawn_from_the_clients(plan: MakePlan) -> None:
    made = plan(swarm={"participants": 2, "rounds": 30})
    drawn = [made.topology.participants(round) for round in made.rounds]
    assert all(len(chosen) == 3 and chosen[0] == 0 for chosen in drawn)
    assert {peer for chosen in drawn for peer in chosen} == {0, 1, 2, 3, 4}
    for round, chosen in zip(made.rounds, drawn, strict=True):
        assert made.senders(0, round) == chosen[1:]


def test_a_client_waits_for_the_coordinator_as_long_as_that_may_wait_for_others(plan: MakePlan) -> None:
    made = plan(swarm={"round_deadline_s": 50.0})
    assert [made.deadline_s(peer) for peer in made.peers] == [50.0, 100.0, 100.0, 100.0, 100.0]


def test_the_models_of_fedcc_have_one_output_more_and_others_have_not(plan: MakePlan) -> None:
    assert plan().outputs == 11
    assert plan(method={"name": "fedmd"}).outputs == 10
    named, unnamed = plan().facts[2].parameters, plan(method={"name": "fedmd"}).facts[2].parameters
    assert named - unnamed == 8 + 1  # of the head of mlp(8)


def test_no_teacher_follows_the_last_round_and_the_models_go_up_in_it(plan: MakePlan) -> None:
    made = plan()
    samples = len(made.public)
    assert made.receivers(0, 3) == (1, 2, 3, 4) and made.receivers(0, 4) == ()
    assert made.message(1, 0, 3).bytes == 4 * samples * 11
    assert made.message(1, 0, 4).bytes == 4 * samples * 11 + made.facts[1].snapshot_bytes
    assert made.message(0, 1, 3).bytes == 4 * samples * 10


def test_each_step_of_a_round_draws_its_own_batches() -> None:
    data = load_data("digits")
    options: dict[str, Any] = {"batch_size": 32, "seed": 7, "peer": 3, "round": 5}
    first = [Batches(data, np.arange(100), step=step, **options)[0][1] for step in ("", "fit", "refine")]
    assert not any(torch.equal(one, other) for one, other in pairwise(first))


@pytest.mark.parametrize(("private", "public"), [(100, 40), (40, 100), (64, 64)])
def test_the_shorter_of_two_sets_starts_over_in_another_order(plan: MakePlan, private: int, public: int) -> None:
    made = plan(training={"epochs": 3, "batch_size": 16})
    fake: Any = SimpleNamespace(
        topology=made.topology, data=made.data, id=1, round=2, device="cpu", node=SimpleNamespace(check=lambda: None)
    )
    positions = np.arange(len(made.data.y_train))
    one = RoundBatches(fake, np.arange(private), "refine", positions)
    other = RoundBatches(fake, np.arange(200, 200 + public), "public refine", positions)
    pairs = list(one.beside(other))
    assert len(pairs) == 3 * -(-max(private, public) // 16) == max(len(one), len(other))
    for part, size, start in ((0, private, 0), (1, public, 200)):
        drawn = torch.cat([pair[part][1] for pair in pairs])
        epochs = [epoch for epoch in drawn.split(size) if len(epoch) == size]
        assert len(epochs) >= 3
        for epoch in epochs:
            assert torch.equal(epoch.sort().values, torch.arange(start, start + size))
        assert not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize(("colour", "value"), [("white", 255), ("black", 0)])
def test_a_plain_probe_is_what_an_image_of_that_colour_becomes(colour: str, value: int) -> None:
    data = load_data("digits")
    data = replace(data, scale=255.0)
    image = np.full((1, 8, 8, 1), value, np.uint8)
    assert torch.allclose(probe_image(data, colour), data.normalize(image))


def test_the_other_probes_are_constants_after_normalization() -> None:
    data = load_data("digits")
    assert torch.equal(probe_image(data, "ones"), torch.ones(1, 1, 8, 8))
    assert torch.equal(probe_image(data, "mean"), torch.zeros(1, 1, 8, 8))


def test_the_plain_ensemble_asks_for_known_classes_only() -> None:
    logits = torch.tensor([[[0.0, 1.0, 50.0]], [[2.0, 0.0, -50.0]]])
    expected = (functional.softmax(logits[:, :, :2].double(), 2)).mean(0)
    assert torch.allclose(mean_probability(logits, 2), expected)


def test_few_images_are_as_many_of_each_class_and_the_first() -> None:
    labels = torch.tensor([0, 1, 1, 2, 0, 2, 1, 0, 2, 2])
    assert balanced(labels, 3).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert balanced(labels, 3, images=6).tolist() == [0, 1, 2, 3, 4, 5]


def test_features_are_what_the_last_linear_layer_is_given() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    x = torch.randn(5, 4)
    with watch(model) as seen:
        model(x[:3])
        model(x[3:])
    assert torch.equal(torch.cat(seen), model[:2](x))
    model(x)
    assert len(seen) == 2


def test_evidence_is_that_of_the_majority_classes_by_label_shares() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 4), torch.arange(40) % 3
    counts = torch.tensor([98, 0, 2])  # two of a hundred are no majority
    owned = torch.tensor([True, False, False])
    found = evidence(logits, labels, counts)
    assert found["recognised"] == recognised(logits, labels, owned)
    for rule in ("valid", "plain"):
        margin = margins(logits, labels, owned, rule=rule)
        assert found[f"mean_margin_{rule}"] == pytest.approx(float(margin.mean()))
        counted, _ = np.histogram(margin.numpy(), 50, (-1, 1))
        assert found[f"margins_{rule}"] == counted.tolist()


def test_what_travels_is_as_long_as_the_recorded_costs() -> None:
    cases = json.loads((Path(__file__).parents[1] / "golden" / "fedcc_golden.json").read_text())["cases"]
    rows = next(case for case in cases if case["id"] == "c01_costs")["expected"]["rows"]
    methods: dict[str, Any] = {name: make(name, {}) for name in ("fedcc", "fedmd", "feddf-logits", "fedct")}
    assert len(rows) == 3
    for row in rows:
        size = {
            name: (
                method.answer(row["public"], row["C"], "float32").bytes,
                method.lesson(row["public"], row["C"], "float32").bytes,
            )
            for name, method in methods.items()
        }
        assert size["fedcc"] == (row["fedcc_up"], row["fedcc_down"])
        assert size["fedmd"] == size["feddf-logits"] == (row["logits_C_up"], row["logits_C_up"])
        assert size["fedct"] == (row["hard_label_uint8"], row["hard_label_uint8"])
