"""Turns a run folder into numbers: each is counted from what the peers wrote, what is unknown is null."""

import importlib.metadata
import json
import math
import os
import platform
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import topology
from launch import frames
from launch.journals import Event, Journals, RunFolderError, read_faults, read_journals
from topology import Topology

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["EXIT_STATUS", "SCHEMA", "Exit", "Journals", "Outcome", "Run", "RunFolderError"]
__all__ += ["load", "load_summary", "load_topology", "summarize", "write_summary"]

SCHEMA = 2
EXIT_STATUS = {"complete": 0, "degraded": 3, "failed": 1}
PACKAGES = ("distill-swarm", "torch", "torchvision", "numpy", "pyzmq", "msgspec", "xxhash")


@dataclass(frozen=True)
class Exit:
    """How one peer process ended, as its parent saw it."""

    status: int | None  # exit status, or minus the signal that ended it; None if it could not be learned
    reason: str = ""  # in words, when the supervisor knows more than the number says


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The facts about a run that only its supervisor knows."""

    status: Literal["complete", "degraded", "failed"]
    started_at: str  # ISO 8601 with its offset from UTC
    wall_s: float
    startup_s: float | None = None  # start to the first round of the last peer; None if that was never reached
    reason: str = ""  # why the run ended early, in words
    exits: Mapping[int, Exit] = field(default_factory=dict)
    foretold_payload_by_round: Sequence[int] = ()  # what `swarm check` says each round will cost, bytes


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder in memory: the file, the summary and all journals (see docs/run-folder.md).

    The data frames are made when they are first asked for, and need pandas.
    """

    path: Path
    topology: Topology
    summary: dict[str, Any]
    journals: Journals

    @cached_property
    def rounds(self) -> "DataFrame":
        """One row for each peer and round."""
        return frames.of_rounds(self.journals)

    @cached_property
    def transfers(self) -> "DataFrame":
        """One row for each delivered message."""
        return frames.of_transfers(self.journals)

    @cached_property
    def peers(self) -> "DataFrame":
        """One row for each peer."""
        return frames.of_peers(self.journals, self.summary)

    @cached_property
    def faults(self) -> "DataFrame":
        """One row for each fault as it fired."""
        return frames.of_faults(self.path)


def load(run_dir: str | Path) -> Run:
    """Read a run folder whole; RunFolderError says what is missing when it is not one."""
    run_dir = Path(run_dir)
    summary = load_summary(run_dir)
    return Run(path=run_dir, topology=load_topology(run_dir), summary=summary, journals=read_journals(run_dir))


def load_summary(run_dir: str | Path) -> dict[str, Any]:
    """Read summary.json, refusing a folder that has none and one from another version of the program."""
    run_dir = Path(run_dir)
    _check_folder(run_dir)
    path = run_dir / "summary.json"
    if not path.is_file():
        raise RunFolderError(
            f"{run_dir} has no summary.json: the run is still going, or its supervisor was killed before it "
            "could write one."
        )
    try:
        summary = json.loads(path.read_bytes())
    except ValueError as error:
        raise RunFolderError(f"{path} is not JSON ({error}): the file was changed after the run.") from error
    schema = summary.get("schema") if isinstance(summary, dict) else None
    if schema != SCHEMA:
        raise RunFolderError(
            f"{path} has schema {schema!r}, this version reads schema {SCHEMA}: read the folder with the "
            "distill-swarm that wrote it."
        )
    return dict(summary)


def load_topology(run_dir: str | Path) -> Topology:
    """Read the resolved topology file that every run folder holds."""
    _check_folder(Path(run_dir))
    return topology.load(Path(run_dir) / "topology.toml")


def _check_folder(run_dir: Path) -> None:
    hint = "give a folder that `swarm run` made, such as runs/NAME-TIME."
    if not run_dir.exists():
        raise RunFolderError(f"{run_dir} does not exist: {hint}")
    if not run_dir.is_dir():
        raise RunFolderError(f"{run_dir} is a file, not a run folder: {hint}")
    if not (run_dir / "topology.toml").is_file():
        raise RunFolderError(f"{run_dir} is not a run folder, it has no topology.toml: {hint}")


def write_summary(run_dir: str | Path, summary: Mapping[str, Any]) -> Path:
    """Write summary.json so that a reader sees the old file or the new one, never half of one."""
    path = Path(run_dir) / "summary.json"
    part = path.with_suffix(".json.part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(summary, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    return path


def summarize(run_dir: str | Path, outcome: Outcome) -> dict[str, Any]:
    """Compute the summary of docs/run-folder.md from the topology file, the journals and the outcome."""
    plan = load_topology(run_dir)
    journals = read_journals(Path(run_dir))
    lost = _find_lost(plan.swarm.peers, journals, outcome)
    survivors = set(range(plan.swarm.peers)) - {one["peer"] for one in lost}
    judged = _judged_at(plan, journals)
    curves = _average_rounds(journals.rounds, plan.coordinator, judged)
    selected = _select_round(curves, survivors, by_validation=judged is None)
    at_selection = curves[selected - 1] if selected else None
    complete = outcome.status == "complete" and not lost
    return {
        "schema": SCHEMA,
        "name": plan.swarm.name,
        "method": plan.method.name,
        "dataset": plan.data.name,
        "peers": plan.swarm.peers,
        "rounds": plan.swarm.rounds,
        "seed": plan.swarm.seed,
        "status": outcome.status,
        "reason": outcome.reason,
        "started_at": outcome.started_at,
        "wall_s": outcome.wall_s,
        "startup_s": outcome.startup_s,
        "rounds_completed": max((r for r, one in enumerate(curves, 1) if one.holds(survivors)), default=0),
        "selected_round": selected,
        "global_accuracy": at_selection.global_accuracy if at_selection else None,
        "global_accuracy_of": "peers" if judged is None else "coordinator",
        "local_accuracy": at_selection.local_accuracy if at_selection else None,
        "global_accuracy_by_round": [one.global_accuracy for one in curves],
        "client_accuracy_by_round": [one.client_accuracy for one in curves],
        "local_accuracy_by_round": [one.local_accuracy for one in curves],
        "validation_accuracy_by_round": [one.validation_accuracy for one in curves],
        "peers_by_round": [len(one.peers) for one in curves],
        "bytes": _count_bytes(plan.swarm.peers, journals, outcome.foretold_payload_by_round, complete),
        "latency_ms": _measure_latency([event["observed_ms"] for event in journals.delivered]),
        "injected_ms": math.fsum(event["injected_ms"] for event in journals.delivered),
        "connections": _check_connections(journals),
        "peak_rss_mb": _find_peak_memory(journals),
        "faults": _count_faults(plan, Path(run_dir)),
        "missing": [list(one) for one in sorted({(e["round"], e["peer"], e["sender"]) for e in journals.missing})],
        "peers_lost": lost,
        "versions": _list_versions(),
    }


def _count_faults(plan: Topology, run_dir: Path) -> dict[str, int]:
    """How often each rule of the plan fired, those that never did included."""
    fired = Counter(line["rule"] for line in read_faults(run_dir))
    return {fault.id: fired[fault.id] for fault in plan.fault}


@dataclass(frozen=True)
class _Averages:
    """One round, averaged over the peers that completed it, without the coordinator."""

    peers: frozenset[int]
    global_accuracy: float | None  # the coordinator's, where the method is judged there
    client_accuracy: float | None  # on the common test set
    local_accuracy: float | None
    validation_accuracy: float | None

    def holds(self, peers: Collection[int]) -> bool:
        return bool(peers) and self.peers.issuperset(peers)


def _judged_at(plan: Topology, journals: Journals) -> int | None:
    """The coordinator, where the method is judged by what is measured there and not by the mean of the peers."""
    coordinator = plan.coordinator
    evaluates = coordinator is not None and journals.started.get(coordinator, {}).get("evaluates", True)
    return coordinator if evaluates else None


def _average_rounds(rounds: Iterable[Event], coordinator: int | None, judged: int | None) -> list[_Averages]:
    """One entry a round, from the first to the last that any peer completed."""
    by_round: dict[int, list[Event]] = {}
    for event in rounds:
        by_round.setdefault(event["round"], []).append(event)

    def average(events: list[Event], key: str) -> float | None:
        known = [event[key] for event in events if event[key] is not None and event["peer"] != coordinator]
        return math.fsum(known) / len(known) if known else None

    def judge(events: list[Event]) -> float | None:
        return next((event["global_accuracy"] for event in events if event["peer"] == judged), None)

    return [
        _Averages(
            frozenset(event["peer"] for event in events),
            average(events, "global_accuracy") if judged is None else judge(events),
            average(events, "global_accuracy"),
            average(events, "local_accuracy"),
            average(events, "validation_accuracy"),
        )
        for events in (by_round.get(number, []) for number in range(1, max(by_round, default=0) + 1))
    ]


def _select_round(curves: Sequence[_Averages], survivors: Collection[int], *, by_validation: bool) -> int | None:
    """The best mean validation accuracy, earliest on ties; without held-out data, or a coordinator, the last tested."""
    tested = [
        (number, one.validation_accuracy)
        for number, one in enumerate(curves, start=1)
        if one.holds(survivors) and one.global_accuracy is not None
    ]
    scored = [(accuracy, -number) for number, accuracy in tested if accuracy is not None]
    if scored and by_validation:
        return -max(scored)[1]
    return tested[-1][0] if tested else None


def _find_lost(peers: int, journals: Journals, outcome: Outcome) -> list[dict[str, Any]]:
    """The peers that did not end in order: no word of a good end, or an exit status that is not 0."""
    last_round = dict.fromkeys(range(peers), 0)
    for event in journals.rounds:
        last_round[event["peer"]] = max(last_round[event["peer"]], event["round"])
    lost = []
    for peer in range(peers):
        end = outcome.exits.get(peer, Exit(None))
        ended_well = journals.finished.get(peer, {}).get("status") in ("complete", "stopped")
        if not ended_well or end.status:
            reason = end.reason or _explain_end(end.status, [e for e in journals.errors if e["peer"] == peer])
            lost.append({"peer": peer, "reason": reason, "last_round": last_round[peer]})
    return lost


def _explain_end(status: int | None, errors: Sequence[Event]) -> str:
    if errors:
        return str(errors[-1]["traceback"]).strip().rpartition("\n")[2]
    if status is not None and status < 0:
        known = {member.value: member.name for member in signal.Signals}
        return f"killed by {known.get(-status, f'signal {-status}')}"
    if status:
        return f"exit status {status} without a word in its journal"
    return "its journal ends without a finished event"


def _count_bytes(peers: int, journals: Journals, foretold_by_round: Sequence[int], complete: bool) -> dict[str, Any]:
    last = max((event["round"] for event in (*journals.rounds, *journals.delivered)), default=0)
    by_round = [0] * last
    received: dict[tuple[int, int], int] = {}
    for event in journals.delivered:
        edge = event["sender"], event["peer"]
        by_round[event["round"] - 1] += event["payload"]
        received[edge] = received.get(edge, 0) + event["payload"]
    booked = [(event["peer"], edge) for event in journals.books for edge in event["edges"]]
    sent: dict[tuple[int, int], int] = {}
    for peer, edge in booked:
        key = peer, edge["receiver"]
        sent[key] = sent.get(key, 0) + edge["payload"]
    # Only between two that closed their books: one that was killed may have had more than it came to write down.
    keepers = {event["peer"] for event in journals.books}
    disagreements = [
        {"sender": edge[0], "receiver": edge[1], "sent": sent.get(edge, 0), "received": received.get(edge, 0)}
        for edge in sorted(sent.keys() | received.keys())
        if keepers.issuperset(edge) and sent.get(edge, 0) != received.get(edge, 0)
    ]
    return {
        "payload": sum(by_round),
        "payload_by_round": by_round,
        "foretold_payload": sum(foretold_by_round) if complete and foretold_by_round else None,
        "stream": sum(edge["stream"] for _, edge in booked),
        "retransmitted": sum(edge["retransmitted"] for _, edge in booked),
        "without_books": sorted(set(range(peers)) - keepers),
        "disagreements": disagreements,
    }


def _measure_latency(observed_ms: Sequence[float]) -> dict[str, float | None]:
    if not observed_ms:
        return {"p50": None, "p95": None, "p99": None}
    p50, p95, p99 = np.percentile(observed_ms, (50, 95, 99))
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99)}


def _check_connections(journals: Journals) -> dict[str, Any]:
    talked = {(event["peer"], event["sender"]) for event in journals.delivered}
    talked |= {(sender, peer) for peer, sender in talked}
    checked = {(event["peer"], event["neighbor"]) for event in journals.connections}
    shown = ("peer", "neighbor", "direction", "stream_out", "kernel_out", "stream_in", "kernel_in", "note")
    return {
        "verified": sum(event["verified"] is True for event in journals.connections),
        "mismatched": [
            {key: event.get(key) for key in shown} for event in journals.connections if event["verified"] is False
        ],
        "not_available": sum(event["verified"] is None for event in journals.connections),
        "unaccounted": [list(pair) for pair in sorted(talked - checked)],
    }


def _find_peak_memory(journals: Journals) -> float | None:
    # A peer that was lost never wrote its peak; what it had at its start is then the least it used.
    peaks = {peer: event["rss_mb"] for peer, event in journals.started.items()}
    peaks |= {peer: event["peak_rss_mb"] for peer, event in journals.finished.items()}
    return max(peaks.values(), default=None)


def _list_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions | {"platform": platform.platform()}
