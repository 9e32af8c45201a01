"""The life of one peer's process: bind, learn round by round, settle the books, leave. It always ends, and says how."""

import faulthandler
import io
import os
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from peer import snapshot
from peer.byzantine import Lies
from peer.faults import befall
from peer.features import balanced
from peer.journal import Journal
from peer.methods.base import Accuracies
from peer.peer import CoordinatorLost, Peer
from peer.plan import Plan
from topology.faults import Byzantine, PeerRule
from transport import control
from transport.faultlog import FaultLog
from transport.faults import Faults, verdicts_of
from transport.keys import read_keys
from transport.layout import Layout
from transport.liar import Liar, lies_of
from transport.loop import Loop
from transport.messages import Identity
from transport.node import Node, Stopped
from transport.protocol import Protocol
from transport.proxy import Proxy, stream_rules


@dataclass(frozen=True)
class Run:
    """What every process of a run has to know beside the plan."""

    id: bytes
    folder: Path
    supervisor: str
    sockets: Path
    zero: float
    """The monotonic time from which the run counts."""
    replay: Path | None = None
    """The folder of a run whose faults of messages are to be repeated."""

    @property
    def keys(self) -> Path:
        """Where the peers' keys are, when they have any."""
        return self.sockets / "keys"

    def peer_folder(self, peer: int) -> Path:
        return self.folder / "peers" / str(peer)


ORDER_TIMEOUT_S = 600.0
"""How long a peer waits for the supervisor's next order, which waits for the slowest peer's round deadline and more."""


def run_peer(plan: Plan, run: Run, id: int, incarnation: int) -> int:
    """Live as peer `id`; returns the exit status: 0 for a completed or an ordered end, 1 for a failure."""
    folder = run.peer_folder(id)
    folder.mkdir(parents=True, exist_ok=True)
    _redirect_output(folder / "log.txt")
    journal = Journal(folder / "events.jsonl", run.zero)
    proxy: Proxy | None = None
    faults = _faults(plan, run, id)
    node = _node(plan, run, id, incarnation, journal, faults)
    status = "failed"
    try:
        torch.set_num_threads(plan.threads[id])
        if plan.devices[id] != "cpu":
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
            torch.use_deterministic_algorithms(True)
        endpoint = node.open(timeout_s=30.0)
        peer = Peer(id, plan, node, journal)
        if told := [rule for rule in plan.topology.fault if isinstance(rule, Byzantine) and rule.peer == id]:
            peer.lies = Lies(told, FaultLog(run.folder, run.zero))
        if struck := stream_rules(id, plan.topology.fault, plan.neighbors.pairs, plan.coordinator):
            proxy = Proxy(id, struck, lambda: peer.round, FaultLog(run.folder, run.zero))
            proxy.start()
        if faults is not None:
            peer.at_phase.append(faults.reach)
        if any(isinstance(rule, PeerRule) and rule.peer == id for rule in plan.topology.fault):
            befall(peer, FaultLog(run.folder, run.zero))
        _record_start(peer, endpoint, incarnation)
        node.report(control.Ready(endpoint))
        addresses = node.await_order(control.Addresses, ORDER_TIMEOUT_S)
        node.connect(proxy.detour(addresses.endpoints) if proxy else addresses.endpoints)
        try:
            for round in plan.rounds:
                _run_round(peer, run, round)
        except CoordinatorLost as lost:
            node.report(control.CoordinatorLost(str(lost)))
            node.await_order(control.Settle, ORDER_TIMEOUT_S)  # what comes is the order to stop
        if peer.features:
            labels = peer.test_labels
            peer.features["labels"] = labels[balanced(labels, peer.classes)]
            snapshot.save_tensors(folder / "features.safetensors", peer.features)
        node.enter(plan.number(len(plan.rounds) + 1, 1))
        node.drain()
        node.report(control.Done())
        node.await_order(control.Settle, ORDER_TIMEOUT_S + plan.topology.swarm.round_deadline_s)
        node.settle(timeout_s=plan.topology.transport.drain_s + 30.0)
        status = "complete"
        _record_end(journal, status, snapshot.digest(peer.model))
        node.report(control.Settled())
        node.await_order(control.Close, ORDER_TIMEOUT_S)
    except Stopped:
        status = "stopped"
        _record_end(journal, status, snapshot.digest(peer.model))
        # The checkpoint is of the last whole round. What was learnt since is not lost either.
        snapshot.save(folder, "interrupted", peer.model, _facts(peer, run))
    except BaseException:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        journal.write("error", {"traceback": text})
        _record_end(journal, status, None)
        node.report(control.Failed(text))
    node.close(timeout_s=10.0)
    if proxy:
        proxy.close(timeout_s=10.0)
    journal.close()
    return 1 if status == "failed" else 0


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable()


def _node(plan: Plan, run: Run, id: int, incarnation: int, journal: Journal, faults: Faults | None) -> Node:
    topology = plan.topology
    layouts = {j: partial(_layout, plan, j, id) for j in plan.neighbors.senders[id]}
    ends = (time.monotonic(), list(plan.neighbors.receivers[id]), layouts, topology.transport, plan.deadline_s(id))
    if rules := lies_of(id, topology.fault):
        log = FaultLog(run.folder, run.zero)
        protocol: Protocol = Liar(*ends, rules, lambda number: plan.place(number)[0], log)
    else:
        protocol = Protocol(*ends)
    if topology.transport.kind == "ipc":
        bind = f"ipc://{run.sockets}/peer-{id}-{incarnation}"
    else:
        override = topology.override(id)
        host, port = (override.host, override.port) if override else ("127.0.0.1", 0)
        host = "127.0.0.1" if host == "localhost" else f"[{host}]" if ":" in host else host
        bind = f"tcp://{host}:{port or '*'}"
    identity = Identity(id, incarnation, run.id)
    keys = read_keys(run.keys, id) if topology.transport.security == "curve" else None
    record = partial(_record, journal, plan, id)
    return Node(Loop(identity, protocol, topology.transport, bind, run.supervisor, record, keys, faults))


def _faults(plan: Plan, run: Run, id: int) -> Faults | None:
    if not plan.topology.fault:
        return None
    replay = None if run.replay is None else verdicts_of(run.replay)
    log = FaultLog(run.folder, run.zero)
    topology = plan.topology
    faults = Faults(
        topology.fault, topology.swarm.seed, id, topology.swarm.peers, plan.coordinator,
        lambda number: plan.place(number)[0], log, replay, run.zero,
    )  # fmt: skip
    return faults or None


def _layout(plan: Plan, sender: int, receiver: int, number: int) -> Layout:
    return plan.message(sender, receiver, *plan.place(number))


def _record(journal: Journal, plan: Plan, id: int, event: str, facts: dict[str, Any]) -> None:
    """The journal counts rounds and not the transport's exchanges; and says what stands in a connection."""
    if event == "connection":
        sender, receiver = (id, facts["neighbor"]) if facts["direction"] == "out" else (facts["neighbor"], id)
        rules = stream_rules(sender, plan.topology.fault, plan.neighbors.pairs, plan.coordinator).get(receiver, [])
        if rules:
            stands = f"the proxy of {', '.join(rule.id for rule in rules)} stands in it: compared with the proxy's side"
            facts = facts | {"note": f"{facts['note']}; {stands}".removeprefix("; ")}
    counted = facts | {"round": plan.place(facts["round"])[0]} if "round" in facts else facts
    journal.write(event, counted)


def _run_round(peer: Peer, run: Run, round: int) -> None:
    began = time.monotonic()
    peer.begin(round)
    method = peer.plan.method
    takes_part = peer.id in peer.plan.participants(round) and (method.coordinated or not peer.is_coordinator)
    notes: dict[str, object] = {}
    accuracies = Accuracies()
    if takes_part:
        notes |= method.run_round(peer)
        peer.changed()
    if takes_part or not peer.is_coordinator:
        every = peer.topology.training.test_every
        accuracies = method.evaluate(peer, globally=peer.is_last_round or round % every == 0)
    digest = snapshot.digest(peer.model)
    facts = {
        "round": round,
        "participates": takes_part,
        "loss": notes.pop("loss", None),
        "validation_accuracy": accuracies.validation,
        "local_accuracy": accuracies.local,
        "global_accuracy": notes.pop("global_accuracy", accuracies.world),
        "class_accuracy": peer.class_accuracy,
        "seconds": _seconds(peer) | {"total": round_(time.monotonic() - began)},
        "began": round_(began - run.zero),
        "spans": _spans(peer, run.zero),
        "present": sorted(set(peer.present)),
        "missing": sorted(set(peer.missing)),
        "snapshot": digest,
        "method": notes,
        "evidence": peer.evidence,
    }
    peer.journal.write("round", facts)
    peer.node.report(control.Round(facts))
    snapshot.save(run.peer_folder(peer.id), "checkpoint", peer.model, _facts(peer, run))
    peer.reach("end")


def _seconds(peer: Peer) -> dict[str, float]:
    """How long the round's parts took in all, and how long nothing could be done but wait."""
    taken = dict.fromkeys(("statistics", "send", "teachers", "train", "evaluate"), 0.0)
    for name, began, ended in peer.spans:
        taken[name] = taken.get(name, 0.0) + ended - began
    taken["wait"] = sum(ended - began for began, ended, _ in peer.node.waits)
    return {name: round_(seconds) for name, seconds in taken.items()}


def _spans(peer: Peer, zero: float) -> list[list[object]]:
    """The same one by one, `[name, from, to]`, in order; a wait also says whose message ended it."""
    waits: list[tuple[Any, ...]] = [("wait", *wait) for wait in peer.node.waits]
    spans: list[list[object]] = []
    for name, began, ended, *whose in sorted([*waits, *peer.spans], key=lambda span: float(span[1])):
        since, until = round(began - zero, 4), round(ended - zero, 4)
        if since < until:
            spans.append([name, since, until, *whose])
    return spans


def _facts(peer: Peer, run: Run) -> dict[str, object]:
    return {"peer": peer.id, "round": peer.round, "snapshot": snapshot.digest(peer.model), "run": run.id.hex()}


def round_(seconds: float) -> float:
    return float(f"{seconds:.6f}")


def _record_start(peer: Peer, endpoint: str, incarnation: int) -> None:
    memory = psutil.Process().memory_full_info()
    facts = peer.plan.facts[peer.id]
    counts = torch.bincount(torch.from_numpy(peer.data.y_train[peer.shard.train]), minlength=peer.classes)
    peer.journal.write(
        "started",
        {
            "pid": os.getpid(),
            "incarnation": incarnation,
            "role": "coordinator" if peer.is_coordinator else "client",
            "evaluates": peer.is_coordinator and peer.plan.method.coordinator_evaluates,
            "device": str(peer.device),
            "threads": torch.get_num_threads(),
            "model": facts.label,
            "parameters": facts.parameters,
            "samples": {
                "train": len(peer.shard.train),
                "validation": len(peer.shard.validation),
                "test": len(peer.shard.test),
            },
            "train_counts": counts.tolist(),
            "rss_mb": round_(memory.rss / 2**20),
            "own_mb": round_(memory.uss / 2**20),
            "endpoint": endpoint,
            "wall": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )


def _record_end(journal: Journal, status: str, digest: str | None) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    journal.write("finished", {"status": status, "peak_rss_mb": round_(peak), "snapshot": digest})
