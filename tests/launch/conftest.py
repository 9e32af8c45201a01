"""Run folders written by hand: every number in them is the test's own, so it can say what must come out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.results import Exit, Outcome, summarize, write_summary


class RunFolder:
    """Writes a run folder event by event, as a supervisor and its peers would."""

    def __init__(self, path: Path, *, peers: int = 3, rounds: int = 2, seed: int = 1, extra: str = "") -> None:
        self.path, self.peers, self.rounds = path, peers, rounds
        self.clock = 0.0
        path.mkdir(parents=True)
        swarm = f'[swarm]\nname = "digits-ring"\npeers = {peers}\nrounds = {rounds}\nseed = {seed}\n'
        (path / "topology.toml").write_text(f"{swarm}\n{extra}", encoding="utf-8")

    def append(self, peer: int, text: str) -> None:
        """Text as it is, to write torn lines with."""
        journal = self.path / "peers" / str(peer) / "events.jsonl"
        journal.parent.mkdir(parents=True, exist_ok=True)
        with journal.open("a", encoding="utf-8") as file:
            file.write(text)

    def write(self, peer: int, event: str, **facts: Any) -> None:
        self.clock += 0.01
        self.append(peer, json.dumps({"event": event, "t": round(self.clock, 3), **facts}) + "\n")

    def start(
        self, peer: int, *, model: str = "mlp", rss_mb: float = 100.0, role: str = "client", evaluates: bool = False
    ) -> None:
        self.write(
            peer,
            "started",
            pid=1000 + peer,
            incarnation=1,
            device="cpu",
            threads=1,
            model=model,
            parameters=1234,
            role=role,
            evaluates=evaluates,
            samples={"train": 80 + peer, "validation": 10, "test": 11},
            train_counts=[40, 40 + peer],
            rss_mb=rss_mb,
            own_mb=25.0,
            endpoint=f"tcp://127.0.0.1:{5000 + peer}",
            wall="2026-01-02T03:04:05+00:00",
        )

    def round(
        self,
        peer: int,
        number: int,
        *,
        validation: float | None = None,
        local: float | None = None,
        overall: float | None = None,
        seconds: dict[str, float] | None = None,
        participates: bool = True,
        method: dict[str, Any] | None = None,
        evidence: dict[str, Any] | None = None,
        snapshot: str = "00ff",
    ) -> None:
        spent = seconds or {
            "statistics": 0.1,
            "send": 0.1,
            "teachers": 0.2,
            "train": 1.0,
            "evaluate": 0.1,
            "wait": 0.5,
            "total": 2.0,
        }
        self.write(
            peer,
            "round",
            round=number,
            participates=participates,
            loss=0.5 if participates else None,
            validation_accuracy=validation,
            local_accuracy=local,
            global_accuracy=overall,
            seconds=spent,
            present=[],
            missing=[],
            snapshot=snapshot,
            method=method or {},
            evidence=evidence or {},
        )

    def deliver(
        self,
        receiver: int,
        number: int,
        sender: int,
        *,
        payload: int = 5000,
        parts_ms: tuple[float, float, float, float, float] = (1.0, 2.0, 0.5, 0.0, 0.5),
    ) -> None:
        queue, wire, verify, injected, inbox = parts_ms
        self.write(
            receiver,
            "delivered",
            round=number,
            sender=sender,
            payload=payload,
            pieces=1,
            repeats=0,
            queue_ms=queue,
            wire_ms=wire,
            verify_ms=verify,
            injected_ms=injected,
            inbox_ms=inbox,
            observed_ms=sum(parts_ms),
            digest="abcd",
        )

    def book(self, sender: int, *edges: tuple[int, int, int, int, int]) -> None:
        """Each edge as (receiver, messages, payload, stream, retransmitted)."""
        keys = ("receiver", "messages", "payload", "stream", "retransmitted")
        self.write(sender, "books", edges=[dict(zip(keys, edge, strict=True)) for edge in edges])

    def connect(
        self,
        peer: int,
        neighbor: int,
        *,
        verified: bool | None = True,
        stream: tuple[int, int] = (6000, 300),
        kernel: tuple[int | None, int | None] = (6000, 300),
        direction: str = "out",
        note: str = "",
    ) -> None:
        self.write(
            peer,
            "connection",
            neighbor=neighbor,
            direction=direction,
            stream_out=stream[0],
            stream_in=stream[1],
            kernel_out=kernel[0],
            kernel_in=kernel[1],
            kernel_retransmitted=0,
            verified=verified,
            note=note,
        )

    def finish(self, peer: int, *, status: str = "complete", peak_rss_mb: float = 150.0) -> None:
        self.write(peer, "finished", status=status, peak_rss_mb=peak_rss_mb, snapshot="00ff")

    def close(self, **facts: Any) -> dict[str, Any]:
        """Summarize as the supervisor does at the end, write summary.json, and return it."""
        settled = {
            "status": "complete",
            "started_at": "2026-01-02T03:04:05+00:00",
            "wall_s": 12.5,
            "startup_s": 1.5,
        }
        summary = summarize(self.path, Outcome(**(settled | facts)))
        write_summary(self.path, summary)
        return summary


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunFolder]:
    """make_run(name, peers=…, rounds=…, seed=…, extra=TOML) -> an empty RunFolder below tmp_path."""

    def make(name: str = "run", **settings: Any) -> RunFolder:
        return RunFolder(tmp_path / name, **settings)

    return make


@pytest.fixture
def play_ring() -> Callable[..., dict[str, Any]]:
    """play_ring(folder, killed=PEER, hops=…) fills the folder with a whole made-up run and closes it."""
    return _play_ring


def _play_ring(folder: RunFolder, *, killed: int | None = None, hops: int = 1) -> dict[str, Any]:
    """A whole made-up run on a ring where each peer sends to `hops` peers on either side."""
    draw = np.random.default_rng(7)
    peers, rounds = folder.peers, folder.rounds
    models = {"resnet18_half": 11_200_000, "cnn6": 3_200_000, "package.module:my_little_network": 203_304}
    names = [list(models)[peer % 3] for peer in range(peers)]
    steps = [step for step in range(-hops, hops + 1) if step]
    death = rounds // 2
    skill = draw.normal(0.0, 0.04, peers)
    sent: dict[tuple[int, int], list[int]] = {}
    for peer in range(peers):
        folder.start(peer, model=names[peer])
    for number in range(1, rounds + 1):
        alive = [peer for peer in range(peers) if peer != killed or number <= death]
        for peer in alive:
            for step in steps:
                sender = (peer + step) % peers
                if sender not in alive:
                    folder.write(peer, "missing", round=number, sender=sender, reason="dead")
                    continue
                parts = tuple(float(part) for part in draw.lognormal((0.3, 2.2, 0.6, 0.0, 1.0), 0.6))
                size = models[names[sender]]
                folder.deliver(peer, number, sender, payload=size, parts_ms=(*parts[:3], 0.0, parts[4]))
                sent.setdefault((sender, peer), []).append(size)
            reached = 0.15 + 0.5 * (1 - np.exp(-number / max(rounds / 4, 1))) + skill[peer]
            wobble = draw.normal(0.0, 0.02, 3)
            spent = {"statistics": 0.05, "send": 0.1, "teachers": 0.5, "train": 1.0 + 0.3 * (peer % 3)}
            spent |= {"evaluate": 0.15, "wait": 0.9 - 0.3 * (peer % 3)}
            folder.round(
                peer,
                number,
                overall=float(reached + wobble[0]),
                local=float(reached + 0.2 + wobble[1]),
                validation=float(reached + 0.18 + wobble[2]),
                seconds=spent | {"total": sum(spent.values()) + 0.1},
            )
    for peer in range(peers):
        if peer == killed:
            folder.append(peer, '{"event": "round", "t": 9.9, "rou')
            for neighbor in sorted({(peer + step) % peers for step in steps}):
                folder.write(neighbor, "link", neighbor=peer, state="dead", reason="no beat for 15 s")
            continue
        edges = [(receiver, sizes) for (sender, receiver), sizes in sorted(sent.items()) if sender == peer]
        folder.book(peer, *((to, len(sizes), sum(sizes), sum(sizes) + 400 * len(sizes), 0) for to, sizes in edges))
        for step in steps:
            neighbor = (peer + step) % peers
            if neighbor != killed:
                folder.connect(peer, neighbor, direction="out")
                folder.connect(peer, neighbor, direction="in")
        folder.finish(peer, peak_rss_mb=300.0 + peer)
    total = sum(sum(sizes) for sizes in sent.values())
    if killed is None:
        per_round = total // rounds
        return folder.close(foretold_payload_by_round=[per_round] * rounds)
    return folder.close(status="degraded", exits={killed: Exit(-9)}, wall_s=312.0)
