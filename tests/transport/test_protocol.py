"""What the protocol does in each situation that a network or a reader can bring about."""

from collections.abc import Callable
from typing import Any

import pytest
import xxhash

from transport.messages import Ack, Beat, Credit, Decline, Message, Offer, Piece, Resend
from transport.receiving import OFFERS_HELD
from transport.transfers import Missing, Send

Make = Callable[..., Any]  # of a `Wire` of conftest.py
PIECE = 4096


def is_a(*kinds: type[Message]) -> Callable[[Send], bool]:
    return lambda send: isinstance(send.message, kinds)


# Credit.


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8])
def test_every_number_of_pieces_arrives_without_a_pause(under_way: Make, window: int) -> None:
    for pieces in range(1, 14):
        wire = under_way(size=pieces * PIECE - 100, window=window)
        wire.deliver()  # and no time passes, so nothing had to be asked for again
        wire.assert_delivered_once()
        assert wire.pieces_sent() == list(range(pieces))
        (sent,) = wire.noted(0, "acknowledged")
        assert sent == {"receiver": 1, "round": 1, "payload": wire.layout.bytes, "retransmitted": 0}
        assert wire.deliveries[1][0].repeats == 0


def test_never_more_pieces_are_underway_than_the_window(under_way: Make) -> None:
    wire = under_way(size=13 * PIECE, window=4)
    while wire.waiting:
        wire.deliver_one()
        assert sum(isinstance(send.message, Piece) for _, send in wire.waiting) <= 4
    wire.assert_delivered_once()


def test_what_was_not_asked_for_is_neither_sent_nor_taken(under_way: Make) -> None:
    wire = under_way(window=2)
    wire.deliver_one()
    wire.hear(0, 1, Resend(0, [3]))
    assert wire.pieces_sent() == []
    snapshot = wire.snapshot(0, 1)
    wire.hear(1, 0, Piece(0, 3, snapshot.checksums[3], 0.0), bytes(snapshot.piece(3)))
    assert wire.peers[1].receiver.transfers[0, 0].received == 0
    wire.deliver()
    wire.assert_delivered_once()
    assert wire.pieces_sent() == [0, 1, 2, 3, 4]


def test_an_empty_snapshot_travels_too(under_way: Make) -> None:
    wire = under_way(size=0)
    wire.deliver()
    wire.assert_delivered_once()


def test_without_a_free_block_an_offer_waits_and_then_gets_credit(make_wire: Make) -> None:
    wire = make_wire(peers=4, concurrent=1)
    wire.enter(1)
    wire.expect(3, 0, 1, 2)
    for sender in (0, 1, 2):
        wire.submit(sender, 3)
    wire.deliver()
    assert wire.answers(3) == [Credit(0, 4), Credit(0, 5), Ack(0)]  # who has to wait is told when it asks again
    wire.pass_time(4.0)
    assert wire.answers(3)[3:] == [Credit(0, 0), Credit(0, 0)]  # and then it asks less often
    for taken in (1, 2, 3):
        wire.deliver()
        assert len(wire.deliveries[3]) == taken
        wire.release(3, wire.deliveries[3][-1])
    assert [delivery.sender for delivery in wire.deliveries[3]] == [0, 1, 2]


def test_a_reader_that_never_releases_holds_no_more_blocks_than_allowed(make_wire: Make) -> None:
    wire = make_wire(peers=6, concurrent=2, deadline_s=20.0)
    wire.enter(1)
    wire.expect(0, 1, 2, 3, 4, 5)
    for sender in (1, 2, 3, 4, 5):
        wire.submit(sender, 0)
    for _ in range(100):
        wire.pass_time(0.3)
        assert wire.peers[0].receiver.blocks.out <= 2
    assert len(wire.deliveries[0]) == 2
    assert {missing.reason for missing in wire.missing[0]} == {"not here within 20 s"}
    assert {delivery.sender for delivery in wire.deliveries[0]} | {m.sender for m in wire.missing[0]} == {1, 2, 3, 4, 5}


def test_the_next_rounds_snapshot_travels_while_this_round_is_learnt(make_wire: Make) -> None:
    wire = make_wire()
    wire.enter(1)
    wire.enter(2, 0)
    wire.submit(0, 1)
    wire.deliver()
    assert [(delivery.sender, delivery.round) for delivery in wire.deliveries[1]] == [(0, 2)]
    wire.enter(2, 1)
    wire.expect(1, 0)
    assert not wire.peers[1].awaited
    wire.deliver()
    wire.assert_delivered_once()


@pytest.mark.parametrize("concurrent", [1, 2, 3])
def test_what_comes_early_leaves_a_block_for_the_round_itself(make_wire: Make, concurrent: int) -> None:
    """As in a directed graph: the neighbors are a round ahead while this peer still learns, before it gathers."""
    wire = make_wire(peers=4, edges={(0, 3), (1, 3), (2, 3)}, concurrent=concurrent)
    wire.enter(1)
    for round in (1, 2):
        wire.enter(round, 0, 1, 2)
        for sender in (0, 1, 2):
            wire.submit(sender, 3)
    wire.deliver()
    assert [delivery.round for delivery in wire.deliveries[3]] == [2] * (concurrent - 1)
    for round in (1, 2):
        if round == 2:
            wire.enter(2, 3)
        wire.expect(3, 0, 1, 2)
        read: set[int] = set()
        while len(read) < 3:
            wire.deliver()
            here = [d for d in wire.deliveries[3] if d.round == round and d.sender not in read]
            assert here, f"round {round} starves"
            for delivery in here:
                read.add(delivery.sender)
                wire.release(3, delivery)
    assert len(wire.deliveries[3]) == 6 and not wire.missing[3]


def test_a_snapshot_offered_two_rounds_ahead_waits(make_wire: Make) -> None:
    wire = make_wire()
    wire.enter(1)
    wire.enter(3, 0)
    wire.submit(0, 1)
    wire.deliver()
    assert not wire.deliveries[1] and wire.peers[1].receiver.blocks.out == 0
    wire.enter(3, 1)
    wire.expect(1, 0)
    wire.deliver()
    wire.assert_delivered_once()


# Loss, repeats, damage.


@pytest.mark.parametrize("kind", [Offer, Credit, Piece, Ack])
def test_what_is_lost_once_is_recovered(under_way: Make, kind: type[Message]) -> None:
    for which in range(1 if kind in (Offer, Ack) else 3):
        wire = under_way(size=7 * PIECE, window=2)
        seen: list[Send] = []

        def lose(send: Send, which: int = which, seen: list[Send] = seen) -> bool:
            if isinstance(send.message, kind):
                seen.append(send)
            return len(seen) == which + 1 and seen[-1] is send

        wire.deliver(lose=lose)
        assert len(seen) > which
        wire.pass_time(3.0, lose=lose)
        wire.assert_delivered_once()
        (sent,) = wire.noted(0, "acknowledged")
        assert sent["retransmitted"] == (PIECE if kind is Piece else 0)


def test_a_lost_acknowledgement_is_given_again_without_a_byte_of_payload(under_way: Make) -> None:
    wire = under_way()
    wire.deliver(lose=is_a(Ack))
    wire.assert_delivered_once()
    assert not wire.noted(0, "acknowledged")
    wire.pass_time(1.0)
    assert len(wire.noted(0, "acknowledged")) == 1
    wire.assert_delivered_once()
    assert wire.pieces_sent() == [0, 1, 2, 3, 4]


def test_an_acknowledgement_that_a_beat_of_the_next_round_overtakes_still_counts(under_way: Make) -> None:
    wire = under_way()
    wire.deliver(lose=is_a(Ack))
    wire.enter(2, 1)
    wire.pass_time(0.2)
    wire.pass_time(1.0)
    assert len(wire.noted(0, "acknowledged")) == 1 and not wire.noted(0, "undelivered")


def test_asking_again_while_pieces_are_on_a_slow_wire_repeats_none_of_them(under_way: Make) -> None:
    wire = under_way(size=9 * PIECE, window=4)
    for _ in range(3000):
        if not wire.waiting:
            break
        wire.now += 0.4  # a message every 0.4 s: the sender asks again and again
        for peer in wire.peers:
            wire.do(peer, lambda p: p.tick(wire.now))
        wire.waiting.sort(key=lambda entry: isinstance(entry[1].message, Beat))  # beats would fill this wire
        wire.deliver_one()
    wire.assert_delivered_once()
    assert len([s for _, s in wire.said if isinstance(s.message, Offer)]) > 3
    assert wire.pieces_sent() == list(range(9)) and wire.noted(0, "acknowledged")[0]["retransmitted"] == 0


def test_everything_twice_is_delivered_once(under_way: Make) -> None:
    wire = under_way()
    wire.deliver(twice=True)
    wire.assert_delivered_once()
    assert len(wire.noted(0, "acknowledged")) == 1
    assert wire.deliveries[1][0].repeats == 4  # the last one came after the snapshot was complete


def test_only_the_damaged_piece_is_sent_again(under_way: Make) -> None:
    for damaged in range(5):
        wire = under_way()
        while wire.waiting:
            message = wire.waiting[0][1].message
            first = isinstance(message, Piece) and message.index == damaged and not wire.noted(1, "damaged")
            wire.deliver_one(damage=first)
        wire.assert_delivered_once()
        assert wire.noted(1, "damaged") == [{"sender": 0, "round": 1, "piece": damaged}]
        size = PIECE - 100 if damaged == 4 else PIECE
        assert wire.noted(0, "acknowledged")[0]["retransmitted"] == size


def test_a_piece_of_another_size_is_asked_for_again(under_way: Make) -> None:
    wire = under_way(size=PIECE)
    wire.hear(1, 0, Piece(0, 0, 0, 0.0), b"")  # before the offer: of nothing that is known
    wire.deliver_one()
    short = bytes(10)
    wire.hear(1, 0, Piece(0, 0, xxhash.xxh3_64_intdigest(short), 0.0), short)
    assert Resend(0, [0]) in wire.answers(1)
    wire.deliver()
    wire.assert_delivered_once()


def test_pieces_that_are_not_what_was_offered_are_never_delivered(under_way: Make) -> None:
    wire = under_way()
    _, offer = wire.waiting.pop(0)
    assert isinstance(offer.message, Offer)
    offer.message.digest ^= 1
    wire.hear(1, 0, offer.message)
    wire.deliver()
    assert not wire.deliveries[1] and wire.peers[1].receiver.blocks.out == 0
    assert "not what was offered" in str(wire.noted(1, "refused"))
    assert wire.noted(0, "undelivered") == [{"receiver": 1, "round": 1, "reason": "declined: digest"}]
    wire.pass_time(2.0)
    assert wire.missing[1] == [Missing(0, 1, "neighbor is in round 1 and offers nothing older")]


# Refusals.


def test_a_stale_offer_is_declined_before_its_bytes_move(make_wire: Make) -> None:
    wire = make_wire()
    wire.enter(1)
    wire.submit(0, 1)
    wire.enter(2, 1)
    wire.deliver()
    reason = "declined: stale: this peer is in round 2"
    assert wire.noted(0, "undelivered") == [{"receiver": 1, "round": 1, "reason": reason}]
    assert wire.noted(1, "late") == [{"sender": 0, "round": 1}] and not wire.pieces_sent()


def test_what_comes_after_it_was_given_up_is_declined(make_wire: Make) -> None:
    wire = make_wire(deadline_s=5.0)
    wire.enter(1)
    wire.expect(1, 0)
    wire.pass_time(6.0)
    assert wire.missing[1] == [Missing(0, 1, "not here within 5 s")]
    wire.submit(0, 1)
    wire.deliver()
    assert not wire.deliveries[1] and not wire.pieces_sent()
    assert len(wire.noted(0, "undelivered")) == 1


def test_entering_the_next_round_takes_the_block_from_what_is_half_here(under_way: Make) -> None:
    wire = under_way()
    wire.deliver(lose=lambda send: isinstance(send.message, Piece) and send.message.index == 3)
    assert wire.peers[1].receiver.blocks.out == 1
    wire.enter(2, 1)
    wire.deliver()
    assert wire.peers[1].receiver.blocks.out == 0
    assert "stale" in str(wire.noted(0, "undelivered"))


def test_two_snapshots_for_one_round_are_equivocation_and_the_same_one_again_is_not(make_wire: Make) -> None:
    wire = make_wire()
    wire.enter(1)
    wire.expect(1, 0)
    for delivered in (False, True):
        start = 10 * delivered
        wire.hear(1, 0, wire.offer(1, start, 7))
        wire.hear(1, 0, wire.offer(1, start + 1, 7))
        wire.hear(1, 0, wire.offer(1, start + 2, 8))
        assert wire.answers(1)[-2:] == [Decline(start + 1, "duplicate"), Decline(start + 2, "equivocation")]
        if not delivered:
            snapshot = wire.snapshot(7)
            for index, checksum in enumerate(snapshot.checksums):
                wire.hear(1, 0, Piece(0, index, checksum, 0.0), bytes(snapshot.piece(index)))
    assert len(wire.deliveries[1]) == 1
    refused = {"source": 0, "reason": "two different snapshots for round 1"}
    assert wire.noted(1, "refused") == [refused, refused]


@pytest.mark.parametrize("changes", [{"layout": 1}, {"bytes": 1 << 40}, {"pieces": 1 << 40}])
def test_a_snapshot_of_another_layout_gets_no_memory(make_wire: Make, changes: dict[str, int]) -> None:
    wire = make_wire()
    wire.enter(1)
    wire.expect(1, 0)
    offer = wire.offer(1)
    for name, value in changes.items():
        setattr(offer, name, value)
    wire.hear(1, 0, offer)
    assert wire.answers(1) == [Decline(0, "layout")] and wire.peers[1].receiver.blocks.out == 0
    assert wire.noted(1, "refused") == [{"source": 0, "reason": "its snapshot has not the layout of its model"}]


def test_an_offer_along_an_edge_that_is_not_there_is_refused(make_wire: Make) -> None:
    wire = make_wire(edges={(0, 1)})
    wire.enter(1)
    wire.hear(0, 1, wire.offer(1))
    assert wire.noted(0, "refused") == [{"source": 1, "reason": "an offer along an edge that is not there"}]
    assert not wire.answers(0)


def test_a_neighbor_may_hold_only_so_many_offers_open(make_wire: Make) -> None:
    wire = make_wire()
    wire.enter(1)
    for round in range(1, OFFERS_HELD + 3):
        wire.hear(1, 0, wire.offer(round, round, round))
    declined = [answer for answer in wire.answers(1) if isinstance(answer, Decline)]
    assert declined == [Decline(OFFERS_HELD + 1, "busy"), Decline(OFFERS_HELD + 2, "busy")]


def test_what_is_here_is_not_waited_for(under_way: Make) -> None:
    wire = under_way()
    wire.deliver()
    wire.expect(1, 0)
    assert not wire.peers[1].awaited
