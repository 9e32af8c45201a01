"""The checks notice it when a part of the protocol is switched off: each holds with it, and fails without."""

from collections.abc import Callable
from typing import Any

import pytest

from transport import receiving
from transport.messages import Ack, Offer, Piece
from transport.receiving import Receiver

Make = Callable[..., Any]
Patch = pytest.MonkeyPatch


def no_acknowledgement(patch: Patch) -> None:
    answer = Receiver._answer
    patch.setattr(Receiver, "_answer", lambda self, to, what: None if isinstance(what, Ack) else answer(self, to, what))


def no_deduplication(patch: Patch) -> None:
    patch.setattr(receiving, "_remember", lambda memory, key, value: None)


def no_checksum(patch: Patch) -> None:
    take = Receiver.on_piece
    patch.setattr(
        Receiver,
        "on_piece",
        lambda self, now, source, piece, body, _: take(self, now, source, piece, body, piece.checksum),
    )


def no_deadline(patch: Patch) -> None:
    patch.setattr(Receiver, "_why_not", lambda self, now, sender: None)


def what_arrives_is_acknowledged(under_way: Make) -> None:
    wire = under_way()
    wire.deliver()
    wire.pass_time(10.0)
    assert len(wire.noted(0, "acknowledged")) == 1 and not wire.noted(0, "undelivered")


def what_arrives_is_delivered_once(under_way: Make) -> None:
    wire = under_way()
    wire.deliver(lose=lambda send: isinstance(send.message, Ack))
    wire.expect(1, 0)
    wire.pass_time(10.0)
    wire.assert_delivered_once()


def what_arrives_is_what_was_sent(under_way: Make) -> None:
    wire = under_way()
    while wire.waiting:
        send = wire.waiting[0][1]
        wire.deliver_one(damage=isinstance(send.message, Piece) and send.message.index == 2 and not send.again)
    wire.assert_delivered_once()


def what_never_comes_is_missing_at_the_deadline(under_way: Make) -> None:
    wire = under_way(deadline_s=5.0)
    wire.pass_time(6.0, lose=lambda send: isinstance(send.message, Offer))
    assert len(wire.missing[1]) == 1


@pytest.mark.parametrize(
    ("check", "switch_off"),
    [
        (what_arrives_is_acknowledged, no_acknowledgement),
        (what_arrives_is_delivered_once, no_deduplication),
        (what_arrives_is_what_was_sent, no_checksum),
        (what_never_comes_is_missing_at_the_deadline, no_deadline),
    ],
)
def test_a_check_fails_when_its_part_is_off(
    under_way: Make, monkeypatch: Patch, check: Callable[[Make], None], switch_off: Callable[[Patch], None]
) -> None:
    check(under_way)
    switch_off(monkeypatch)
    with pytest.raises(AssertionError):
        check(under_way)
