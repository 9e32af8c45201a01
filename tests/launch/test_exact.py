"""Two runs, snapshot by snapshot: where they part is found, and nothing else is taken for a parting."""

import json

import pytest
import torch
from safetensors.torch import save_file

from launch.exact import compare_exactly, first_difference
from launch.results import RunFolderError


@pytest.fixture
def play(make_run):
    """play(name, digests) -> the path of a run whose peers wrote these digests, by (round, peer)."""

    def play(name, digests, **settings):
        run = make_run(name, peers=2, rounds=3, **settings)
        for (number, peer), digest in sorted(digests.items()):
            run.round(peer, number, snapshot=digest)
        for peer in range(2):
            run.finish(peer)
        run.close()
        return run.path

    return play


def keep(folder, peer, number, **tensors):
    save_file({name: torch.tensor(values) for name, values in tensors.items()}, place(folder, peer, "safetensors"))
    place(folder, peer, "json").write_text(json.dumps({"peer": peer, "round": number}))


def place(folder, peer, kind):
    return folder / "peers" / str(peer) / f"checkpoint.{kind}"


ALIKE = {(number, peer): f"{number}{peer}" for number in (1, 2, 3) for peer in (0, 1)}


def test_equal_runs_are_equal(play):
    found = compare_exactly(play("a", ALIKE), play("b", ALIKE))
    assert found.equal
    assert found.lines == ("a and b are equal to the bit: 6 snapshots, rounds 1–3 of peers 0–1.",)


def test_the_first_round_and_its_peers_are_named_and_the_tensor_of_the_first_of_them(play):
    a, b = play("a", ALIKE), play("b", ALIKE | {(2, 1): "other", (3, 0): "other", (3, 1): "other"})
    for folder, value in ((a, 2.0), (b, 2.5)):
        keep(folder, 0, 3, first=[9.0 * value])
        keep(folder, 1, 3, first=[1.0, 1.0], second=[0.0, value, 1.0], third=[value])
    found = compare_exactly(a, b)
    assert not found.equal
    assert found.lines == (
        "a and b part in round 2: peer 1 differs, 1 other still alike.",
        "Checkpoints of peer 1 after round 3: second is the first tensor that differs, by 0.5 at most.",
    )


def test_a_longer_run_is_compared_as_far_as_the_shorter_goes(play):
    short = {key: digest for key, digest in ALIKE.items() if key[0] < 3}
    found = compare_exactly(play("a", ALIKE), play("b", short))
    assert found.equal
    assert found.lines == (
        "a and b are equal to the bit: 4 snapshots, rounds 1–2 of peers 0–1.",
        "Only a has 2 snapshots more, in rounds 3 of peers 0–1: not compared.",
    )


def test_checkpoints_of_different_rounds_are_not_compared(play):
    a, b = play("a", ALIKE), play("b", {(1, 0): "other"})
    keep(a, 0, 3, weight=[1.0])
    assert compare_exactly(a, b).lines[1] == "No tensors compared: b has no checkpoint of peer 0."
    keep(b, 0, 1, weight=[2.0])
    told = compare_exactly(a, b).lines[1]
    assert told == "No tensors compared: the checkpoints of peer 0 are of round 3 in a and of round 1 in b."


def test_settings_that_differ_are_told_first_but_for_the_name(play):
    a, b = play("a", ALIKE), play("b", ALIKE, seed=2, extra="[training]\nlearning_rate = 0.5\n")
    file = b / "topology.toml"
    file.write_text(file.read_text().replace('"digits-ring"', '"another"'))
    assert compare_exactly(a, b).lines[:-1] == (
        "swarm.seed differs: 1 in a; 2 in b",
        "training.learning_rate differs: 0.01 in a; 0.5 in b",
    )


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({"a": [1.0], "b": [2.0]}, ""),
        ({"a": [-1.0], "b": [7.0]}, "a is the first tensor that differs, by 2 at most"),
        ({"a": [1.0], "b": [[2.0]]}, "b is the first tensor that differs: torch.float32 of shape (1,) against"),
        ({"a": [1.0]}, "b is in"),
        ({"a": [1.0], "b": [2.0], "c": [3.0]}, "c is in"),
    ],
)
def test_the_first_tensor_that_differs(tmp_path, there, told):
    for name, tensors in (("here", {"a": [1.0], "b": [2.0]}), ("there", there)):
        save_file({key: torch.tensor(values) for key, values in tensors.items()}, tmp_path / name)
    found = first_difference(tmp_path / "here", tmp_path / "there")
    assert found.startswith(told) and bool(found) == bool(told)


def test_bits_decide_not_values(tmp_path):
    """A negative zero is not a zero, and a number that is none is the same as itself."""
    for name, zero in (("plus", 0.0), ("minus", -0.0)):
        tensors = {"a": torch.tensor([float("nan")]), "b": torch.tensor([zero])}
        save_file({key: value.bfloat16() for key, value in tensors.items()}, tmp_path / name)
    assert first_difference(tmp_path / "plus", tmp_path / "plus") == ""
    assert first_difference(tmp_path / "plus", tmp_path / "minus") == "b is the first tensor that differs, by 0 at most"


def test_what_cannot_be_compared_is_refused(play, make_run, tmp_path):
    a, nothing = play("a", ALIKE), play("nothing", {})
    with pytest.raises(RunFolderError, match="no round of any peer in common"):
        compare_exactly(a, nothing)
    with pytest.raises(RunFolderError, match="does not exist"):
        compare_exactly(a, tmp_path / "nowhere")
    other = play("other", ALIKE | {(1, 0): "other"})
    for folder in (a, other):
        keep(folder, 0, 3, weight=[1.0])
    place(other, 0, "safetensors").write_bytes(b"torn")
    with pytest.raises(RunFolderError, match="is no whole file of tensors"):
        compare_exactly(a, other)
    place(other, 0, "json").write_text("{}")
    with pytest.raises(RunFolderError, match="does not say of which round"):
        compare_exactly(a, other)
