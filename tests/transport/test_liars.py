"""What a neighbor that lies on the wire gets, and that the others do not pay for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from topology.faults import Byzantine
from transport.faultlog import FaultLog
from transport.layout import always
from transport.liar import Liar
from transport.liveness import STRIKES
from transport.messages import Decline, Piece

Make = Callable[..., Any]  # of a `Wire` of conftest.py


@pytest.fixture
def lying(make_wire: Make, tmp_path: Path) -> Any:
    """Three neighbors of which peer 0 lies in one way, in every round."""
    logs = []

    def make(mode: str) -> Any:
        wire = make_wire(peers=3)
        rule = Byzantine.model_validate({"kind": "byzantine", "id": "lie", "peer": 0, "mode": mode})
        logs.append(FaultLog(tmp_path, 0.0))
        layouts = {1: always(wire.layout), 2: always(wire.layout)}
        liar = Liar(wire.now, [1, 2], layouts, wire.settings, 30.0, [rule], lambda number: number, logs[0])
        liar.meet(wire.now)
        wire.peers[0] = liar
        return wire

    yield make
    for log in logs:
        log.close()


def exchange(wire: Any, round: int) -> None:
    wire.enter(round)
    for peer in wire.peers:
        wire.submit(peer, *(other for other in wire.peers if other != peer))
    for receiver in wire.peers:
        wire.expect(receiver, *(other for other in wire.peers if other != receiver))
    wire.deliver()
    for receiver in wire.peers:
        for delivery in wire.deliveries[receiver]:
            if delivery.round == round:
                wire.release(receiver, delivery)
    wire.deliver()


def from_liar(wire: Any, receiver: int) -> list[Any]:
    return [delivery for delivery in wire.deliveries[receiver] if delivery.sender == 0]


def from_honest(wire: Any) -> list[int]:
    return [delivery.round for delivery in wire.deliveries[1] if delivery.sender == 2]


def states(wire: Any, peer: int) -> list[str]:
    return [event["state"] for event in wire.noted(peer, "link")]


def test_a_wrong_shape_is_declined_before_any_byte_and_its_sender_banned(lying: Make, tmp_path: Path) -> None:
    wire = lying("wrong_shape")
    for round in range(1, STRIKES + 2):
        exchange(wire, round)
        assert ("banned" in states(wire, 1)) == (round >= STRIKES)
    assert not [send for peer, send in wire.said if peer == 0 and isinstance(send.message, Piece)]
    declined = [s.message for peer, s in wire.said if peer == 1 and s.to == 0 and isinstance(s.message, Decline)]
    assert [answer.reason for answer in declined] == ["layout"] * STRIKES
    assert from_honest(wire) == list(range(1, STRIKES + 2)) and wire.peers[1].neighbors[2].strikes == 0
    assert wire.missing[1][-1].reason.startswith("neighbor is banned")
    lines = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert [(line["rule"], line["peer"], line["round"]) for line in lines][:2] == [("lie", 0, 1), ("lie", 0, 2)]


def test_equivocation_is_seen_when_the_receivers_digests_are_compared(lying: Make) -> None:
    wire = lying("equivocate")
    exchange(wire, 1)
    (one,), (other,) = from_liar(wire, 1), from_liar(wire, 2)
    assert one.digest != other.digest
    assert not wire.noted(1, "refused") and not wire.noted(2, "refused")


def test_old_words_are_never_delivered_again(lying: Make) -> None:
    wire = lying("replay")
    for round in (1, 2, 3):
        exchange(wire, round)
    assert len([s for peer, s in wire.said if peer == 0 and isinstance(s.message, Piece)]) > 3 * 2 * 5
    for receiver in (1, 2):
        assert [delivery.round for delivery in from_liar(wire, receiver)] == [1, 2, 3]


def test_a_flood_is_dropped_and_counted_and_another_neighbors_exchange_completes(lying: Make) -> None:
    wire = lying("flood")
    for round in (1, 2, 3):
        exchange(wire, round)
    assert wire.peers[1].neighbors[0].dropped > 0
    assert "says too much" in str(wire.noted(1, "refused"))
    assert from_honest(wire) == [1, 2, 3]
    assert wire.peers[1].neighbors[2].dropped == 0
