"""Finds where two runs part: the first round, its peers, and the first tensor that is not the same to the bit."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import units
from launch.journals import RunFolderError
from launch.results import Run, load
from launch.settings import differences, flatten


@dataclass(frozen=True)
class Exactness:
    """What was found, in lines for a person, and whether all weights that both runs wrote down are equal to the bit."""

    equal: bool
    lines: tuple[str, ...]


def compare_exactly(first: str | Path, second: str | Path) -> Exactness:
    """Compare the digests of every peer's weights, round by round, as far as both runs go."""
    runs = load(first), load(second)
    a, b = _labels(*runs)
    differing = differences(flatten(runs[0].topology), flatten(runs[1].topology))
    lines = [f"{key} differs: {here} in {a}; {there} in {b}" for key, (here, there) in differing.items()]
    digests = [{(e["round"], e["peer"]): e["snapshot"] for e in run.journals.rounds} for run in runs]
    both = sorted(digests[0].keys() & digests[1].keys())
    if not both:
        raise RunFolderError(f"{runs[0].path} and {runs[1].path} have no round of any peer in common to compare.")
    parted = [key for key in both if digests[0][key] != digests[1][key]]
    if parted:
        round = parted[0][0]
        peers = [peer for number, peer in parted if number == round]
        alike = sum(number == round for number, _ in both) - len(peers)
        lines.append(
            f"{a} and {b} part in round {round}: peer{'s' if len(peers) > 1 else ''} {units.ranges(peers)} "
            f"{'differ' if len(peers) > 1 else 'differs'}, {units.count(alike, 'other')} still alike."
        )
        lines.append(_compare_checkpoints(runs, (a, b), peers[0]))
    else:
        rounds = {number for number, _ in both}
        peers_compared = {peer for _, peer in both}
        lines.append(
            f"{a} and {b} are equal to the bit: {units.count(len(both), 'snapshot')}, rounds {units.ranges(rounds)} of "
            f"peers {units.ranges(peers_compared)}."
        )
    for label, mine, other in ((a, digests[0], digests[1]), (b, digests[1], digests[0])):
        if alone := sorted(mine.keys() - other.keys()):
            where = f"rounds {units.ranges({n for n, _ in alone})} of peers {units.ranges({peer for _, peer in alone})}"
            lines.append(f"Only {label} has {units.count(len(alone), 'snapshot')} more, in {where}: not compared.")
    return Exactness(not parted, tuple(lines))


def _labels(first: Run, second: Run) -> tuple[str, str]:
    names = first.path.resolve().name, second.path.resolve().name
    return names if names[0] != names[1] else (str(first.path), str(second.path))


def _compare_checkpoints(runs: Sequence[Run], labels: tuple[str, str], peer: int) -> str:
    folders = [run.path / "peers" / str(peer) for run in runs]
    rounds = []
    for folder, label in zip(folders, labels, strict=True):
        if not all((folder / f"checkpoint.{kind}").is_file() for kind in ("json", "safetensors")):
            return f"No tensors compared: {label} has no checkpoint of peer {peer}."
        rounds.append(_round_of(folder / "checkpoint.json"))
    if rounds[0] != rounds[1]:
        return (
            f"No tensors compared: the checkpoints of peer {peer} are of round {rounds[0]} in {labels[0]} and of "
            f"round {rounds[1]} in {labels[1]}."
        )
    found = first_difference(folders[0] / "checkpoint.safetensors", folders[1] / "checkpoint.safetensors")
    return f"Checkpoints of peer {peer} after round {rounds[0]}: {found or 'equal to the bit'}."


def _round_of(path: Path) -> int:
    try:
        return int(json.loads(path.read_bytes())["round"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} does not say of which round: it was changed after the run.") from error


def first_difference(first: Path, second: Path) -> str:
    """The first tensor, in the order of the first file, that is not the same to the bit, in words; empty if all are."""
    import torch  # only here: it takes seconds to load, and runs that do not part never need it
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(first, "pt") as mine, safe_open(second, "pt") as other:
            names = list(mine.offset_keys())
            for name in names:
                if name not in other.keys():  # noqa: SIM118  a file of tensors is no mapping
                    return f"{name} is in {first} alone"
                here, there = mine.get_tensor(name), other.get_tensor(name)
                if (here.shape, here.dtype) != (there.shape, there.dtype):
                    kinds = [f"{one.dtype} of shape {tuple(one.shape)}" for one in (here, there)]
                    return f"{name} is the first tensor that differs: {kinds[0]} against {kinds[1]}"
                bits = [one.contiguous().flatten().view(torch.uint8) for one in (here, there)]
                if not torch.equal(*bits):
                    largest = (here.double() - there.double()).abs().max().item()
                    return f"{name} is the first tensor that differs, by {largest:.3g} at most"
            more = [name for name in other.offset_keys() if name not in names]
            return f"{more[0]} is in {second} alone" if more else ""
    except SafetensorError as error:
        raise RunFolderError(f"{first} or {second} is no whole file of tensors ({error}): it was changed.") from error
