"""Mistakes: one clear message that names the key and what is allowed, status 2, and nothing was started."""

import socket

import numpy as np
import pytest
import tomli_w

MLP = {"models": {"pool": [{"name": "mlp", "hidden": [8]}]}}
TWO_MODELS = {"models": {"pool": ["mlp", "cnn3"]}}
MISTAKES = {
    "unknown key": ({"swarm": {"round": 3}}, ["swarm.round", "rounds"]),
    "unknown section": ({"swarms": {"rounds": 3}}, ["swarms", "swarm"]),
    "wrong type": ({"swarm": {"rounds": "three"}}, ["swarm.rounds", "whole number"]),
    "peer id out of range": ({"swarm": {"peers": 4}, "peer": [{"id": 4}]}, ["[[peer]] 4", "0 to 3"]),
    "edge out of range": (
        {"swarm": {"peers": 2}, "graph": {"kind": "edges"}, "edge": [{"from": 0, "to": 2}]},
        ["[[edge]] 0 -> 2", "0 to 1"],
    ),
    "isolated peer": (
        {"swarm": {"peers": 3}, "graph": {"kind": "edges"}, "edge": [{"from": 0, "to": 1}]},
        ["[[edge]]", "peer 2", "isolated", "0 to 2"],
    ),
    "self loop": (
        {"swarm": {"peers": 2}, "graph": {"kind": "edges"}, "edge": [{"from": 0, "to": 1}, {"from": 1, "to": 1}]},
        ["[[edge]] 1 -> 1", "two different peers"],
    ),
    "impossible degree": (
        {"swarm": {"peers": 5}, "graph": {"kind": "k-regular", "degree": 3}},
        ["graph.degree = 3", "even number from 2 to 4"],
    ),
    "degree too high": (
        {"swarm": {"peers": 4}, "graph": {"kind": "k-regular", "degree": 4}},
        ["graph.degree = 4", "from 2 to 3"],
    ),
    "unknown model": ({"models": {"pool": ["resnet19"]}}, ["models.pool", "resnet19", "resnet18", "cnn6", "mlp"]),
    "model option": ({"models": {"pool": [{"name": "mlp", "width": 3}]}}, ["models.pool", "width", "hidden"]),
    "unknown data set": ({"data": {"name": "digit"}}, ["data.name", "digits", "cifar10", "npz:PATH"]),
    "missing data set": ({"data": {"name": "cifar10", "root": "nowhere"}}, ["data.root", "nowhere", "Download"]),
    "unknown method": ({"method": {"name": "crud"}}, ["method.name", "crud", "crad", "dpsgd", "local"]),
    "unknown method key": (
        {"method": {"name": "crad", "temprature": 2.0}},
        ["method.temprature", "crad", "temperature", "min_support"],
    ),
    "weight rule": ({"method": {"name": "crad", "weighting": "best"}}, ["method.weighting", "best", "precision"]),
    "method module": ({"method": {"name": "nowhere:Method"}}, ["method.name", "nowhere"]),
    "port taken": ({**MLP, "peer": []}, ["[[peer]] 1", "port", "in use", "any free port"]),
    "host": (
        {"peer": [{"id": 0, "host": "0.0.0.0"}]},
        ["[[peer]] 0", "host", "0.0.0.0", "transport.security = 'curve'", "loopback"],
    ),
    "device": ({**MLP, "devices": {"assign": "cuda:7"}}, ["devices.assign", "cuda:7", "There is: cpu"]),
    "device of a peer": ({**MLP, "peer": [{"id": 2, "device": "cuda:7"}]}, ["[[peer]] 2", "cuda:7", "There is: cpu"]),
    "one class": ({**MLP, "data": {"name": "npz:one-class.npz"}}, ["data.name", "one class", "at least 2"]),
    "fewer samples than peers": (
        {**MLP, "swarm": {"peers": 9}, "data": {"name": "npz:six-samples.npz", "min_samples": 1}},
        ["swarm.peers = 9", "6 samples", "fewer peers"],
    ),
    "too few samples": ({**MLP, "swarm": {"peers": 200}}, ["data.min_samples = 10", "200 peers", "1500"]),
    "two architectures": ({**TWO_MODELS, "method": {"name": "dpsgd"}}, ["models.pool", "D-PSGD", "mlp", "cnn3"]),
    "nothing held out": (
        {**MLP, "method": {"name": "crad"}, "data": {"held_out": 0.0}},
        ["data.held_out = 0", "above 0"],
    ),
    "alone": ({**MLP, "swarm": {"peers": 1}}, ["swarm.peers = 1", "at least 2"]),
    "more participants than peers": (
        {"swarm": {"peers": 3, "participants": 4}},
        ["swarm.participants = 4", "from 1 to 3"],
    ),
}


@pytest.fixture(scope="module")
def refusals(command, tmp_path_factory):
    """What `swarm run` says to every mistake."""
    cwd = tmp_path_factory.mktemp("mistakes")
    images = np.zeros((6, 8, 8), np.uint8)
    np.savez(cwd / "one-class.npz", x_train=images, y_train=np.zeros(6, int), x_test=images, y_test=np.zeros(6, int))
    labels = np.arange(6) % 2
    np.savez(cwd / "six-samples.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = {}
        for number, (mistake, (sections, _)) in enumerate(MISTAKES.items()):
            if mistake == "port taken":
                sections = sections | {"peer": [{"id": 1, "port": taken.getsockname()[1]}]}
            file, out = cwd / f"{number}.toml", cwd / f"out-{number}"
            file.write_text(tomli_w.dumps(sections))
            found[mistake] = (*command("run", file, "--out", out, cwd=cwd), out)
    return found


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_before_anything_is_started(refusals, mistake):
    status, said, attempts, out = refusals[mistake]
    assert status == 2, said
    assert "Traceback" not in said
    assert attempts == []
    assert not out.exists()
    for expected in MISTAKES[mistake][1]:
        assert expected in said, said
    assert len(said.splitlines()) == 1, said


def test_all_mistakes_of_a_file_are_told_at_once(command, tmp_path):
    file = tmp_path / "many.toml"
    file.write_text("[swarm]\npeers = 0\nround = 1\n[transport]\nkind = 'udp'\n")
    status, said, _ = command("check", file, cwd=tmp_path)
    assert status == 2
    assert len(said.splitlines()) == 3
    assert [key in said for key in ("swarm.peers", "swarm.round", "transport.kind")] == [True] * 3


def test_a_folder_with_something_in_it_is_left_alone(reference, command, tmp_path):
    full, file = tmp_path / "full", tmp_path / "a file"
    full.mkdir()
    (full / "thesis.txt").write_text("dear")
    file.write_text("dear")
    for place in (full, file, file / "below", reference.folder):
        status, said, attempts = command("run", reference.file, "--out", place, cwd=tmp_path)
        assert status == 2, said
        assert "--out" in said
        assert attempts == []
    assert [path.name for path in full.iterdir()] == ["thesis.txt"]
    assert file.read_text() == "dear"


@pytest.mark.parametrize("verb", ["run", "check"])
def test_files_that_are_none(command, tmp_path, verb):
    (tmp_path / "broken.toml").write_text("[swarm\npeers = 3")
    for name, expected in {"nowhere.toml": "no such file", ".": "is a folder", "broken.toml": "line 1"}.items():
        status, said, attempts = command(verb, name, cwd=tmp_path)
        assert status == 2, said
        assert name in said
        assert expected in said
        assert attempts == []
    assert [path.name for path in tmp_path.iterdir()] == ["broken.toml"]


@pytest.mark.parametrize("override", ["swarm.rouds=3", "swarm.rounds=many", "rounds=3", "peer.id=3", "models.pool=[1"])
def test_a_wrong_override_is_refused(reference, command, tmp_path, override):
    status, said, attempts = command("run", reference.file, "--set", override, cwd=tmp_path)
    assert status == 2, said
    assert override.partition("=")[0].partition(".")[0] in said
    assert attempts == []
    assert list(tmp_path.iterdir()) == []


def test_the_real_command_ends_with_status_2(swarm, reference):
    for wrong in ("swarm.rouds=3", "devices.assign=cuda:7"):
        done = swarm("run", reference.file, "--set", wrong)
        assert done.returncode == 2
        assert done.stdout == ""
        assert wrong.partition("=")[0] in done.stderr
        assert "Traceback" not in done.stderr


def test_two_runs_do_not_share_a_folder(start, tmp_path):
    """Both find it empty when they begin."""
    both = [start("--set", f"swarm.seed={seed}", out=tmp_path / "run") for seed in (1, 2)]
    ended = sorted((running.end() for running in both), key=lambda one: one.status)
    assert [one.status for one in ended] == [0, 2], [one.output for one in ended]
    assert "--out" in ended[1].output
    assert ended[0].summary["bytes"]["payload"] == ended[0].summary["bytes"]["foretold_payload"]
