"""Swarms that learn prompts of a frozen CLIP: who sends what, that no context leaves its client, and a client lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

SWARM = Path(sys.executable).with_name("swarm")
EXAMPLE = Path(__file__).parents[2] / "examples" / "fedbst-digits.toml"
CLIENTS, CLASSES = 3, 10
VISUAL = 4 * 2 * 5 * 48  # bytes of a prompt for all blocks but the last of three, five tokens, width 48


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A folder with the small CLIP for digits, made by the command that makes it."""
    folder = tmp_path_factory.mktemp("cache")
    environment = os.environ | {"DISTILL_SWARM_CACHE": str(folder)}
    done = subprocess.run([SWARM, "pretrain-clip", "digits"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 30/30" in done.stdout and "zero-shot accuracy" in done.stdout
    again = subprocess.run([SWARM, "pretrain-clip", "digits"], env=environment, capture_output=True, text=True)
    assert "epoch" not in again.stdout  # it is there already
    assert again.stdout == done.stdout.splitlines(keepends=True)[-1]
    return folder


def described(name: str = "fedbst", **sections: Any) -> dict[str, Any]:
    given = {
        "swarm": {"peers": CLIENTS + 1, "rounds": 3},
        "graph": {"kind": "star"},
        "peer": [{"id": 0, "role": "coordinator"}],
        "data": {"name": "shifted:digits", "partition": "dirichlet-capped", "alpha": 0.1, "test": "dealt",
                 "held_out": 0.0, "augment": "none"},
        "models": {"pool": [{"name": "tiny-clip", "recipe": "digits"}]},
        "method": {"name": name} | ({} if name == "zeroshot" else {"relabel_every": 2}),
        "training": {"optimizer": "sgd", "learning_rate": 0.03, "momentum": 0.9, "weight_decay": 0.05,
                     "batch_size": 64},
    }  # fmt: skip
    changed = {name: given[name] | section if name in given else section for name, section in sections.items()}
    return given | changed


@pytest.fixture(scope="session")
def prompt_run(run, cache):
    return lambda *names, **sections: run(
        environment={"DISTILL_SWARM_CACHE": str(cache)}, **described(*names, **sections)
    )


@pytest.fixture(scope="session")
def fedbst(prompt_run):
    return prompt_run()


def test_the_example_runs_and_is_not_worse_than_what_it_began_with(cache, tmp_path):
    environment = os.environ | {"DISTILL_SWARM_CACHE": str(cache)}
    found = {}
    for method in ("fedbst", "zeroshot"):
        out = tmp_path / method
        command = [SWARM, "run", EXAMPLE, "--quiet", "--out", out, "--set", f"method.name={method}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        found[method] = json.loads((out / "summary.json").read_text())
    assert found["fedbst"]["local_accuracy"] > found["zeroshot"]["local_accuracy"] - 0.05
    assert found["zeroshot"]["bytes"]["payload"] == 0


def test_bytes_are_prompts_and_counts_to_the_byte(fedbst):
    assert fedbst.status == 0, fedbst.output
    relabelling = CLIENTS * 2 * 4 * CLASSES
    training = CLIENTS * (2 * VISUAL + 4)
    expected = [relabelling + training, training, relabelling + training]  # labels are made anew in rounds 1 and 3
    assert fedbst.summary["bytes"]["payload_by_round"] == expected
    assert fedbst.summary["bytes"]["foretold_payload"] == sum(expected)
    assert fedbst.summary["bytes"]["disagreements"] == [] == fedbst.summary["connections"]["mismatched"]
    sizes = {event["payload"] for event in fedbst.events("delivered")}
    assert sizes == {4 * CLASSES, VISUAL, VISUAL + 4}
    assert {event["round"] for event in fedbst.events("delivered")} == {1, 2, 3}


def test_the_score_is_the_mean_of_the_clients_accuracy_on_their_own_part_of_the_test_set(fedbst):
    last = [event["local_accuracy"] for event in fedbst.events("round") if event["round"] == 3 and event["peer"]]
    assert fedbst.summary["local_accuracy"] == pytest.approx(sum(last) / CLIENTS)
    assert fedbst.summary["global_accuracy_of"] == "peers"
    for event in fedbst.events("round"):
        if event["peer"]:
            relabelled = event["round"] in (1, 3)
            assert ("selected" in event["method"]) == relabelled == ("ambiguous" in event["method"])


def test_it_is_the_same_twice_and_leaves_the_backbone_as_it_was(prompt_run, fedbst, cache):
    (weights,) = cache.glob("*.safetensors")
    before = weights.read_bytes()
    again = prompt_run()
    assert again.snapshots() == fedbst.snapshots()
    assert weights.read_bytes() == before
    kept = load_file(again.folder / "peers" / "1" / "checkpoint.safetensors")
    assert sorted(kept) == ["context", "visual"]


def test_after_a_round_all_have_the_same_visual_prompt_and_each_its_own_context(fedbst):
    kept = [load_file(fedbst.folder / "peers" / str(peer) / "checkpoint.safetensors") for peer in range(CLIENTS + 1)]
    assert len({one["visual"].tobytes() for one in kept}) == 1
    assert len({one["context"].tobytes() for one in kept}) == CLIENTS + 1


def test_with_few_drawn_all_relabel_and_listen_and_only_those_train(prompt_run):
    ended = prompt_run(swarm={"participants": 1})
    assert ended.status == 0, ended.output
    relabelling, training = CLIENTS * 2 * 4 * CLASSES, VISUAL + 4 + CLIENTS * VISUAL
    assert ended.summary["bytes"]["payload_by_round"] == [relabelling + training, training, relabelling + training]
    for round in (1, 2, 3):
        events = [event for event in ended.events("round") if event["round"] == round and event["peer"]]
        assert sum(event["loss"] is not None for event in events) == 1
        assert all(event["local_accuracy"] is not None for event in events)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedcopl", {}),
        ("promptfl", {"labels": "fpl"}),
        ("promptfl", {"labels": "cpl"}),
        ("promptfl", {"labels": "copl"}),
        ("promptprox", {}),
        ("zeroshot", {}),
    ],
)
def test_what_it_is_compared_with_runs_whole(prompt_run, method, options):
    ended = prompt_run(method, method=options, swarm={"rounds": 1})
    assert ended.status == 0, ended.output
    assert ended.summary["status"] == "complete"
    assert 0.3 < ended.summary["local_accuracy"] <= 1


def test_a_client_that_dies_is_left_out(prompt_run):
    dies = {"id": "dies", "kind": "crash", "peer": 2, "at": {"round": 2, "phase": "train"}}
    ended = prompt_run(swarm={"rounds": 4}, fault=[dies])
    assert ended.status == 3, ended.output
    last = ended.events("round", 0)[-1]
    assert (last["round"], last["present"], last["missing"]) == (4, [1, 3], [2])


def test_without_the_small_clip_the_command_that_makes_it_is_named(tmp_path):
    environment = os.environ | {"DISTILL_SWARM_CACHE": str(tmp_path)}
    command = [SWARM, "run", EXAMPLE, "--out", tmp_path / "run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "swarm pretrain-clip digits" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
