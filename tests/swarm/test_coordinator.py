"""Swarms with a coordinator: every method whole, bytes as the cost model has them, and what losing somebody does."""

import json
import os
import signal
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from peer.data import sets
from peer.data.partition import public_split
from topology.seeds import stream

CLIENTS = 4
CLASSES = 10
POOL = [{"name": "mlp", "hidden": [32]}, {"name": "cnn3", "width": 4}]
ONE_MODEL = [{"name": "mlp", "hidden": [32]}]
METHODS = ("fedcc", "fedavg", "fedmd", "feddf", "feddf-logits", "fedct", "ssl", "local")


def coordinated(method: str, **sections: Any) -> dict[str, Any]:
    """Peer 0 coordinates four clients that hold five classes each."""
    given = {
        "swarm": {"peers": CLIENTS + 1, "rounds": 3},
        "graph": {"kind": "star"},
        "peer": [{"id": 0, "role": "coordinator"}],
        "data": {"public": 0.1, "partition": "pathological", "classes_per_peer": 5, "held_out": 0.0},
        "models": {"pool": ONE_MODEL if method == "fedavg" else POOL},
        "method": {"name": method},
    }
    return given | {name: given.get(name, {}) | section for name, section in sections.items()}


@pytest.fixture(scope="module")
def check(command, tmp_path_factory):
    """The plan of a topology file as `swarm check --json` prints it."""
    cwd = tmp_path_factory.mktemp("check")

    def check(file):
        status, said, attempts = command("check", file, "--json", cwd=cwd)
        assert (status, attempts) == (0, []), said
        return json.loads(said)

    return check


@pytest.fixture(scope="module")
def fedcc(run):
    return run(**coordinated("fedcc"))


def model_bytes(plan, peer):
    """A snapshot in float32: parameters, and mean and variance of each batch norm."""
    (described,) = [one for one in plan["plan"] if one["peer"] == peer]
    norms = {"cnn3": 2 * (4 + 8 + 16), "mlp": 0}[described["model"].partition("(")[0]]
    return 4 * (described["parameters"] + norms)


def foretold(method, plan):
    """Bytes by round, by the cost model of the papers: K clients, U public samples, C classes, float32."""
    samples, rounds = plan["public_samples"], plan["rounds"]
    models = sum(model_bytes(plan, client) for client in range(1, CLIENTS + 1))
    if method in ("ssl", "local"):
        return [0] * rounds
    if method in ("fedavg", "feddf"):
        return [2 * models] * rounds
    each, back = {
        "fedcc": (4 * samples * (CLASSES + 1), 4 * samples * CLASSES),
        "fedct": (samples, samples),
    }.get(method, (4 * samples * CLASSES, 4 * samples * CLASSES))
    return [CLIENTS * (each + back)] * (rounds - 1) + [CLIENTS * each + models]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_runs_whole_and_its_bytes_are_the_cost_models(method, run, check, request):
    ended = request.getfixturevalue("fedcc") if method == "fedcc" else run(**coordinated(method))
    assert ended.status == 0, ended.output
    plan = check(ended.folder / "topology.toml")
    assert plan["public_samples"] == 150
    assert ended.summary["bytes"]["payload_by_round"] == plan["payload_bytes_by_round"] == foretold(method, plan) or (
        foretold(method, plan) == plan["payload_bytes_by_round"] == [0, 0, 0]
    )
    assert ended.summary["connections"]["mismatched"] == []
    assert ended.summary["bytes"]["disagreements"] == []
    judged_there = method not in ("ssl", "local")
    assert ended.summary["global_accuracy_of"] == ("coordinator" if judged_there else "peers")
    assert ended.summary["selected_round"] == 3
    assert 0.15 < ended.summary["global_accuracy"] <= 1
    at_end = {event["peer"]: event["global_accuracy"] for event in ended.events("round") if event["round"] == 3}
    assert (at_end[0] is not None) == judged_there
    clients = [at_end[client] for client in range(1, CLIENTS + 1)]
    assert ended.summary["client_accuracy_by_round"][2] == pytest.approx(sum(clients) / CLIENTS)
    expected = at_end[0] if judged_there else sum(clients) / CLIENTS
    assert ended.summary["global_accuracy"] == pytest.approx(expected)


def test_half_precision_halves_what_predictions_cost(run, check, fedcc):
    ended = run(**coordinated("fedcc", transport={"dtype": "float16"}))
    assert ended.status == 0, ended.output
    whole = fedcc.summary["bytes"]["payload_by_round"]
    assert ended.summary["bytes"]["payload_by_round"] == [size // 2 for size in whole]
    assert all(event["method"].get("dropped", 0) == 0 for event in ended.events("round", 0))


def test_fedcc_is_the_same_twice_and_with_a_client_held_up(start, fedcc):
    running = start(**coordinated("fedcc"))
    running.wait_for(lambda: running.events("round", 2))
    os.kill(running.pid(2), signal.SIGSTOP)
    running.wait_for(lambda: len(running.events("delivered", 0)) >= 2 * CLIENTS - 1)
    os.kill(running.pid(2), signal.SIGCONT)
    ended = running.end()
    assert ended.status == 0, ended.output
    assert ended.snapshots() == fedcc.snapshots()
    teachers = [[event["method"] for event in one.events("round", 0)] for one in (ended, fedcc)]
    assert teachers[0] == teachers[1]


def test_only_drawn_clients_take_part_and_the_coordinator_always_does(run, check):
    ended = run(**coordinated("fedcc", swarm={"participants": 2}))
    assert ended.status == 0, ended.output
    plan = check(ended.folder / "topology.toml")
    assert ended.summary["bytes"]["payload_by_round"] == plan["payload_bytes_by_round"]
    for event in ended.events("round", 0):
        assert event["participates"]
        assert len(event["present"]) == 2


def test_nobody_learns_from_the_labels_of_public_samples(run, fedcc, tmp_path):
    """With other labels on the public samples only the coordinator's diagnosis comes out otherwise."""
    digits = sets.load("digits")
    samples, seed = len(digits.y_train), 1
    public, _ = public_split(samples, 0.1, stream(seed, "public"))
    runs = []
    for name, shift in (("true", 0), ("false", 1)):
        labels = digits.y_train.copy()
        labels[public] = (labels[public] + shift) % CLASSES
        arrays = {"x_train": digits.x_train, "y_train": labels, "x_test": digits.x_test, "y_test": digits.y_test}
        np.savez(tmp_path / f"{name}.npz", **arrays)
        described = coordinated("fedcc", data={"name": f"npz:{tmp_path / name}.npz"}, swarm={"seed": seed})
        runs.append(run(**described))
    assert [ended.status for ended in runs] == [0, 0], runs[0].output + runs[1].output
    assert runs[0].snapshots() == runs[1].snapshots()
    right, wrong = ([event["method"]["teacher_accuracy"] for event in one.events("round", 0)] for one in runs)
    assert all(high > low for high, low in zip(right, wrong, strict=True))


def test_a_client_that_dies_is_left_out_and_the_others_go_on(start):
    running = start(**coordinated("fedcc", swarm={"rounds": 4}))
    running.wait_for(lambda: running.events("round", 3))
    os.kill(running.pid(3), signal.SIGKILL)
    ended = running.end()
    assert ended.status == 3, ended.output
    assert ended.summary["status"] == "degraded"
    assert [one["peer"] for one in ended.summary["peers_lost"]] == [3]
    last = ended.events("round", 0)[-1]
    assert (last["round"], last["present"], last["missing"]) == (4, [1, 2, 4], [3])
    assert ended.summary["global_accuracy"] == last["global_accuracy"] > 0.15
    assert [4, 0, 3] in ended.summary["missing"]


@pytest.mark.parametrize(("method", "how"), [("fedcc", signal.SIGKILL), ("fedavg", signal.SIGSTOP)])
def test_without_its_coordinator_the_run_fails_soon_and_keeps_what_was_learnt(start, method, how):
    impatient = {"beat_s": 0.2, "suspect_s": 1.0, "dead_s": 2.0}
    running = start(**coordinated(method, swarm={"rounds": 500}, transport=impatient))
    running.wait_for(lambda: all(running.events("round", client) for client in range(1, CLIENTS + 1)))
    os.kill(running.pid(0), how)
    ended = running.end(limit_s=40)
    assert ended.status == 1, ended.output
    assert ended.summary["status"] == "failed"
    assert "the coordinator, peer 0, is lost" in ended.summary["reason"]
    assert "Traceback" not in ended.output
    for client in range(1, CLIENTS + 1):
        folder = ended.folder / "peers" / str(client)
        (finished,) = ended.events("finished", client)
        assert finished["status"] == "stopped"
        done = ended.events("round", client)[-1]["round"]
        assert json.loads((folder / "checkpoint.json").read_text())["round"] == done
        interrupted = json.loads((folder / "interrupted.json").read_text())
        assert interrupted["round"] in (done, done + 1)
        assert interrupted["snapshot"] == finished["snapshot"]
        assert load_file(folder / "interrupted.safetensors")
    assert (ended.folder / "report.html").exists()


def test_without_any_client_the_run_fails(start):
    running = start(**coordinated("fedcc", swarm={"rounds": 500}))
    running.wait_for(lambda: all(running.events("round", client) for client in range(1, CLIENTS + 1)))
    for client in range(1, CLIENTS + 1):
        os.kill(running.pid(client), signal.SIGKILL)
    ended = running.end(limit_s=60)
    assert ended.status == 1, ended.output
    assert ended.summary["reason"] == "every client was lost"


@pytest.mark.parametrize("method", ["fedavg", "fedcc"])
def test_clients_that_diverge_say_so_and_what_was_done_is_reported(run, method):
    ended = run(**coordinated(method, training={"optimizer": "sgd", "learning_rate": 1e6}))
    assert ended.status == 1, ended.output
    assert ended.summary["reason"] == "every client was lost"
    assert "has diverged; lower" in ended.output
    assert (ended.folder / "report.html").exists()
