"""Connections cut, garbled or dark in the middle of a snapshot: it arrives once and unchanged, or is missing."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from topology.faults import Blackhole, Flip, Reset, Truncate
from transport.faultlog import FaultLog
from transport.keys import make_keys, read_keys
from transport.proxy import Proxy
from transport.transfers import Missing

PAIR = {(0, 1), (1, 0)}
RUN = bytes(range(16))


class Tampered:
    """A proxy in the edge 0->1, and what it wrote down."""

    def __init__(self, folder: Path, kind: str, **keys: object) -> None:
        rule = {"reset": Reset, "truncate": Truncate, "flip": Flip, "blackhole": Blackhole}[kind].model_validate(
            {"id": "it", "kind": kind} | keys
        )
        self._log = FaultLog(folder, 0.0)
        self._lines = folder / "faults.jsonl"
        self.proxy = Proxy(0, {1: [rule]}, lambda: 1, self._log)
        self.proxy.start()

    def detour(self, endpoint: str) -> str:
        return self.proxy.detour({1: endpoint})[1]

    def strikes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines.read_text().splitlines()]

    def close(self) -> None:
        self.proxy.close(timeout_s=20.0)
        self._log.close()
        assert self.proxy.failure is None


@pytest.fixture
def tamper(tmp_path: Path) -> Iterator[Callable[..., Tampered]]:
    made: list[Tampered] = []

    def make(kind: str, **keys: object) -> Tampered:
        made.append(Tampered(tmp_path, kind, **keys))
        return made[-1]

    yield make
    for each in made:
        each.close()


# A DEALER's handshake is 110 bytes; a beat takes some 35, an offer 75, each of the 10 pieces 4,140.
@pytest.mark.parametrize("kind", ["reset", "truncate"])
@pytest.mark.parametrize("at", [0, 64, 110, 160, 200, 300, 4000, 20_000, 40_000])
def test_a_connection_cut_anywhere_costs_time_and_nothing_else(
    nodes: Any, tamper: Callable[..., Tampered], at: int, kind: str
) -> None:
    tampered = tamper(kind, after_bytes=at)
    nodes.start(PAIR, sizes={0: 40_000, 1: 40_000}, detours={(0, 1): tampered.detour})
    assert nodes.exchange(1, 0, 1) == {0: [(1, 1)], 1: [(0, 1)]}
    assert nodes.exchange(2, 0, 1) == {0: [(1, 2)], 1: [(0, 2)]}
    for id in (0, 1):
        nodes.nodes[id].drain()
    (line,) = tampered.strikes()
    facts = {"rule": "it", "kind": kind, "exact": True, "round": 1, "peer": 1, "sender": 0, "receiver": 1, "byte": at}
    assert line | facts == line
    for id, connections in nodes.settle().items():
        ended = [c for c in connections if c["verified"] is None]
        assert all(c["note"] == "closed before its counters could be read" for c in ended)
        assert [(c["verified"], c["neighbor"]) for c in connections if c not in ended] == [(True, 1 - id)] * 2
        (books,) = nodes.journals[id].of("books")
        assert [(edge["messages"], edge["payload"]) for edge in books["edges"]] == [(2, 2 * nodes.layouts[id].bytes)]
    assert not nodes.journals[0].of("undelivered") and not nodes.journals[1].of("missing")


def test_a_rule_may_strike_again_and_again(nodes: Any, tamper: Callable[..., Tampered]) -> None:
    """Counted anew in each connection."""
    tampered = tamper("reset", after_bytes=4500, times=3)
    nodes.start(PAIR, sizes={0: 40_000, 1: 40_000}, detours={(0, 1): tampered.detour})
    assert nodes.exchange(1, 0, 1) == {0: [(1, 1)], 1: [(0, 1)]}
    assert len(tampered.strikes()) == 3


@pytest.mark.parametrize("curve", [False, True])
@pytest.mark.parametrize("at", [5, 70, 111, 200, 400, 30_000])
def test_a_garbled_stream_is_never_taken_for_a_snapshot(
    nodes: Any, tamper: Callable[..., Tampered], at: int, curve: bool, tmp_path: Path
) -> None:
    """What it leads to depends on the byte; content that arrives is checked by `exchange`."""
    if curve:
        make_keys(tmp_path / "keys", range(2))
    keys = {id: read_keys(tmp_path / "keys", id) for id in range(2)} if curve else None
    tampered = tamper("flip", at_byte=at)
    quick = {"suspect_s": 0.3, "dead_s": 1.5, "disconnected_s": 1.0}
    nodes.start(PAIR, sizes={0: 40_000, 1: 40_000}, detours={(0, 1): tampered.detour}, keys=keys, **quick)
    for round in (1, 2):
        arrivals = nodes.exchange(round, 0, 1)
        assert arrivals[0] == [(1, round)] or isinstance(arrivals[0][0], Missing)
        assert arrivals[1] == [(0, round)] or isinstance(arrivals[1][0], Missing)
    assert len(tampered.strikes()) == 1
    assert all(nodes.state(id, lambda loop: loop.failure) is None for id in (0, 1))


def test_only_silence_shows_a_dark_connection_and_it_recovers(nodes: Any, tamper: Callable[..., Tampered]) -> None:
    tampered = tamper("blackhole", after_bytes=4500, for_s=3.0)
    quick = {"suspect_s": 0.3, "dead_s": 1.0, "disconnected_s": 0.5}
    nodes.start(PAIR, sizes={0: 40_000, 1: 40_000}, detours={(0, 1): tampered.detour}, **quick)
    arrivals = nodes.exchange(1, 0, 1)
    assert arrivals[0] == [(1, 1)]
    (missing,) = arrivals[1]
    assert isinstance(missing, Missing) and "dead: silent for" in missing.reason
    nodes.journals[1].wait_for("link", "heard from")
    assert nodes.exchange(2, 0, 1) == {0: [(1, 2)], 1: [(0, 2)]}
    assert all("connection" not in line["reason"] for line in nodes.journals[1].of("link"))
    assert len(nodes.state(1, lambda loop: loop._connections.all)) == 2, "nothing was closed"
