"""What the protocol makes of neighbors that die, leave, freeze, hurry, lie and come back."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from topology.sections import TransportSection
from transport.layout import Field, Layout, always
from transport.messages import Ack, Beat, Credit, Decline, Leave, Message, Offer, Piece, Resend
from transport.protocol import Protocol
from transport.receiving import OFFERS_HELD
from transport.transfers import Event, Missing, Send

Make = Callable[..., Any]  # of a `Wire` of conftest.py
PIECE = 4096


def is_a(*kinds: type[Message]) -> Callable[[Send], bool]:
    return lambda send: isinstance(send.message, kinds)


def test_a_silent_neighbor_is_suspected_then_dead_and_what_it_owes_is_missing(make_wire: Make) -> None:
    wire = make_wire()
    wire.enter(1)
    wire.expect(1, 0)
    wire.frozen.add(0)
    wire.pass_time(20.0)
    (missing,) = wire.missing[1]
    assert missing.reason.startswith("neighbor is dead: silent for 15.")
    assert [event["state"] for event in wire.noted(1, "link")] == ["suspect", "dead"]
    wire.enter(2, 1)
    wire.expect(1, 0)  # at once, without a tick
    assert [m.round for m in wire.missing[1]] == [1, 2]


def test_what_is_underway_to_a_dead_neighbor_is_given_up(under_way: Make) -> None:
    wire = under_way()
    wire.frozen.add(1)
    wire.pass_time(20.0)
    (facts,) = wire.noted(0, "undelivered")
    assert str(facts["reason"]).startswith("neighbor is dead: silent for")
    offers = [send for _, send in wire.said if isinstance(send.message, Offer)]
    assert len(offers) <= 8  # with growing pauses, not a storm
    assert wire.peers[0].open_rounds == frozenset()


@pytest.mark.parametrize("opened_again", [True, False])
def test_a_closed_connection_means_death_unless_it_is_opened_again(under_way: Make, opened_again: bool) -> None:
    wire = under_way()
    wire.waiting.clear()
    wire.do(1, lambda p: p.disconnected(wire.now, 0))
    wire.frozen.add(0)
    wire.pass_time(1.5)
    assert [event["state"] for event in wire.noted(1, "link")] == ["suspect"]
    if opened_again:
        wire.frozen.clear()
    wire.pass_time(1.5)
    if opened_again:
        wire.assert_delivered_once()
        wire.pass_time(3.0)
        assert [event["state"] for event in wire.noted(1, "link")] == ["suspect", "alive"]
    else:
        reason = "neighbor is dead: its connection closed and was not opened again in 2 s"
        assert wire.missing[1] == [Missing(0, 1, reason)]


def test_a_neighbor_that_left_is_missing_at_once_and_for_good(under_way: Make) -> None:
    wire = under_way(peers=3)
    wire.waiting.clear()
    wire.do(0, lambda p: p.leave())
    wire.deliver()
    wire.pass_time(0.1)
    assert wire.missing[1] == [Missing(0, 1, "neighbor is left: said goodbye")]
    wire.enter(2, 1)
    wire.expect(1, 0)
    assert len(wire.missing[1]) == 2
    wire.submit(1, 0)
    wire.pass_time(30.0)
    assert wire.noted(1, "undelivered")[0]["reason"] == "neighbor is left: said goodbye"
    assert [event["state"] for event in wire.noted(1, "link") if event["neighbor"] == 0] == ["left"]


def test_who_has_left_beats_no_more_and_sleeps_between_ticks(make_wire: Make) -> None:
    wire = make_wire()
    wire.pass_time(0.2)
    wire.do(0, lambda p: p.leave())
    wire.said.clear()
    for _ in range(30):
        again = wire.peers[0].tick(wire.now)
        assert again > wire.now
        wire.now = again
    wire.do(0, lambda _: None)
    assert not [send for source, send in wire.said if source == 0 and isinstance(send.message, Beat)]


def test_a_neighbor_that_went_on_without_a_snapshot_is_missing(make_wire: Make) -> None:
    wire = make_wire()
    wire.enter(1)
    wire.expect(1, 0)
    wire.pass_time(2.0)
    assert not wire.missing[1]
    wire.enter(3, 0)
    wire.pass_time(2.0)
    assert wire.missing[1] == [Missing(0, 1, "neighbor is in round 3 and offers nothing older")]


def test_a_neighbor_still_on_its_way_to_the_round_gets_its_time_in_it(make_wire: Make) -> None:
    wire = make_wire(deadline_s=10.0)
    wire.enter(3)
    wire.enter(1, 0)
    wire.expect(1, 0)
    for round in (2, 3):
        wire.pass_time(8.0)
        wire.enter(round, 0)
    wire.pass_time(8.0)  # 24 s since it was expected, 8 s since it entered the round
    wire.submit(0, 1)
    wire.pass_time(0.5)
    wire.assert_delivered_once()


def test_a_receiver_still_on_its_way_to_the_round_gets_its_time_in_it(make_wire: Make) -> None:
    wire = make_wire(deadline_s=10.0, concurrent=1)
    wire.enter(3, 0)
    wire.submit(0, 1)
    for round in (1, 2, 3):
        wire.enter(round, 1)
        wire.pass_time(8.0)
    wire.expect(1, 0)  # 24 s after it was offered, 8 s after entering the round
    wire.pass_time(0.5)
    wire.assert_delivered_once()


def test_a_neighbor_stuck_in_a_round_is_stalled_not_dead_and_not_waited_for(make_wire: Make) -> None:
    wire = make_wire(deadline_s=10.0)
    wire.enter(3)
    wire.enter(1, 0)
    wire.pass_time(1.0)
    wire.expect(1, 0)
    wire.pass_time(11.0)
    assert wire.missing[1] == [Missing(0, 3, "not here within 10 s")]
    assert [event["state"] for event in wire.noted(1, "link")] == ["stalled"]


def test_beats_that_go_back_and_forth_do_not_extend_the_deadline(make_wire: Make) -> None:
    wire = make_wire(deadline_s=10.0)
    wire.enter(5)
    wire.expect(1, 0)
    wire.frozen.add(0)
    for turn in range(30):
        wire.hear(1, 0, Beat(1 + turn % 2, 1, 0.0))
        wire.pass_time(0.5)
    assert wire.missing[1] == [Missing(0, 5, "not here within 10 s")]


def test_a_beat_that_was_overtaken_takes_nothing_back(make_wire: Make) -> None:
    wire = make_wire()
    wire.enter(1)
    wire.expect(1, 0)
    wire.hear(1, 0, Beat(2, 2, 0.0))
    wire.hear(1, 0, Beat(1, 1, 0.0))
    wire.do(1, lambda p: p.tick(wire.now))
    assert wire.missing[1] == [Missing(0, 1, "neighbor is in round 2 and offers nothing older")]


def test_a_frozen_peer_that_wakes_catches_up_without_a_hang(make_wire: Make) -> None:
    wire = make_wire(peers=3)

    def exchange(round: int, *peers: int) -> None:
        wire.enter(round, *peers)
        for peer in peers:
            wire.submit(peer, *({0, 1, 2} - {peer}))
            wire.expect(peer, *({0, 1, 2} - {peer}))

    def read() -> dict[int, list[tuple[int, int]]]:
        taken = {peer: [(d.round, d.sender) for d in deliveries] for peer, deliveries in wire.deliveries.items()}
        for peer, deliveries in wire.deliveries.items():
            while deliveries:
                wire.release(peer, deliveries.pop())
        return taken

    exchange(1, 0, 1, 2)
    wire.frozen.add(2)
    wire.pass_time(60.0)
    assert read() == {0: [(1, 1)], 1: [(1, 0)], 2: []}
    exchange(2, 0, 1)
    wire.pass_time(5.0)
    assert read() == {0: [(2, 1)], 1: [(2, 0)], 2: []}
    assert [(missing.round, missing.sender) for missing in wire.missing[0]] == [(1, 2), (2, 2)]
    wire.frozen.clear()
    wire.deliver()
    wire.pass_time(2.0)
    assert not wire.peers[2].awaited and not read()[2]
    assert {missing.reason for missing in wire.missing[2]} == {"neighbor is in round 2 and offers nothing older"}
    assert not wire.noted(2, "link"), "it took its own sleep for its neighbors' silence"
    exchange(3, 0, 1, 2)
    wire.pass_time(1.0)
    assert read() == {0: [(3, 1), (3, 2)], 1: [(3, 0), (3, 2)], 2: [(3, 0), (3, 1)]}


def test_ones_own_freeze_is_not_the_neighbors_silence(make_wire: Make) -> None:
    wire = make_wire(peers=3, deadline_s=1000.0)
    wire.enter(1)
    wire.expect(2, 0, 1)
    wire.pass_time(1.0)
    wire.frozen.add(2)
    wire.pass_time(100.0)
    wire.hear(2, 0, Beat(1, 1, 0.0))  # of all that waits it reads one message before its clock is looked at
    wire.do(2, lambda p: p.tick(wire.now))
    assert not wire.missing[2] and not wire.noted(2, "link")


def test_nobody_is_silent_before_all_can_speak() -> None:
    protocol = Protocol(0.0, [1], {1: always(Layout((Field("x", "uint8", (1,)),)))}, TransportSection(), 30.0)
    for now in range(100):
        protocol.tick(float(now))
    protocol.meet(100.0)
    protocol.enter(100.0, 1)
    protocol.expect(100.0, [1])
    protocol.tick(100.5)
    assert not [output for output in protocol.take() if isinstance(output, Missing | Event)]
    for now in range(101, 120):
        protocol.tick(float(now))
    assert [output for output in protocol.take() if isinstance(output, Missing)]


def test_a_neighbor_that_talks_but_never_answers_is_asked_a_bounded_number_of_times(under_way: Make) -> None:
    wire = under_way(deadline_s=1000.0)
    wire.pass_time(100.0, lose=is_a(Credit))
    reason = "no answer to 5 offers"
    assert wire.noted(0, "undelivered") == [{"receiver": 1, "round": 1, "reason": reason}]
    assert len([send for _, send in wire.said if isinstance(send.message, Offer)]) <= 7
    assert wire.missing[1] == [Missing(0, 1, "neighbor is in round 1 and offers nothing older")]
    assert wire.peers[1].receiver.blocks.out == 0


def test_offers_to_a_neighbor_that_is_silent_are_not_counted(under_way: Make) -> None:
    wire = under_way(retry_max_s=1.0)
    wire.frozen.add(1)
    wire.pass_time(12.0)
    assert len([send for _, send in wire.said if isinstance(send.message, Offer)]) > 10
    wire.frozen.clear()
    wire.pass_time(1.0)
    wire.assert_delivered_once()


def test_a_withdrawn_offer_gives_its_block_to_others(make_wire: Make) -> None:
    wire = make_wire(peers=3, concurrent=1)
    wire.enter(1)
    wire.expect(2, 0, 1)
    wire.hear(2, 0, wire.offer(1))
    wire.submit(1, 2)
    wire.deliver()
    assert not wire.deliveries[2]
    wire.hear(2, 0, Beat(1, 2, 0.0))
    wire.deliver()
    assert [delivery.sender for delivery in wire.deliveries[2]] == [1]


def test_a_new_life_retires_the_old_one(under_way: Make) -> None:
    wire = under_way()
    wire.deliver(lose=lambda send: isinstance(send.message, Piece) and send.message.index == 3)
    wire.restart(0)
    wire.enter(1, 0)
    wire.submit(0, 1)
    wire.deliver()
    wire.assert_delivered_once()
    assert {"neighbor": 0, "state": "alive", "reason": "began life 1"} in wire.noted(1, "link")
    wire.hear(1, 0, wire.offer(2), life=0)
    assert wire.noted(1, "refused") == [{"source": 0, "reason": "incarnation 0 is over, 1 lives"}]
    wire.submit(0, 1)  # the same round again: not delivered again
    wire.deliver()
    wire.assert_delivered_once()


def test_what_a_new_life_offers_is_not_answered_as_the_old_one_was(under_way: Make) -> None:
    wire = under_way()
    wire.deliver()
    wire.restart(0)
    wire.enter(2)
    wire.submit(0, 1)
    assert [send.message.sequence for _, send in wire.waiting] == [0]  # it counts anew
    wire.expect(1, 0)
    wire.deliver()
    assert [(d.sender, d.round) for d in wire.deliveries[1]] == [(0, 1), (0, 2)]


def test_what_was_underway_to_an_old_life_is_offered_to_the_new_one(under_way: Make) -> None:
    wire = under_way()
    wire.deliver(lose=lambda send: isinstance(send.message, Piece) and send.message.index == 3)
    wire.restart(1)
    wire.enter(1, 1)
    wire.expect(1, 0)
    wire.said.clear()
    wire.pass_time(0.1)  # its first beat is enough
    wire.assert_delivered_once()
    assert wire.pieces_sent() == [0, 1, 2, 3, 4]


def test_who_left_may_come_back_in_a_new_life(make_wire: Make) -> None:
    wire = make_wire()
    wire.do(0, lambda p: p.leave())
    wire.deliver()
    wire.restart(0)
    wire.pass_time(0.2)
    assert wire.peers[1].neighbors[0].state == "alive"


def test_beats_say_from_which_round_on_a_snapshot_may_still_come(make_wire: Make) -> None:
    wire = make_wire(peers=3)
    seen: list[tuple[int, int]] = []

    def beats(now_round: int) -> None:
        wire.said.clear()
        wire.pass_time(1.1, lose=is_a(Offer))
        found = {s.to: s.message for source, s in wire.said if source == 0 and isinstance(s.message, Beat)}
        assert {beat.round for beat in found.values()} == {now_round}
        seen.append((found[1].offers_from, found[2].offers_from))

    wire.enter(1, 0)
    beats(1)  # may come
    wire.submit(0, 1)
    beats(1)  # underway to 1; to 2 there will be none
    wire.enter(2, 0)
    beats(2)  # still underway to 1
    wire.submit(0, 2)
    beats(2)  # two underway
    wire.hear(0, 1, Ack(0))
    beats(2)
    assert seen == [(1, 1), (1, 2), (1, 2), (1, 2), (3, 2)]


counts = st.integers(0, 12)
few = st.sampled_from([0, 1, 2**64 - 1])
anything: st.SearchStrategy[Message] = st.one_of(
    st.builds(Beat, counts, counts, st.floats(0, 100)),
    st.builds(Offer, counts, counts, few, few, few, few, st.floats(0, 100), counts),
    st.builds(Credit, counts, st.sampled_from([0, 1, 3, 5, 2**48 - 1])),
    st.builds(Piece, counts, counts, few, st.floats(0, 100)),
    st.builds(Resend, counts, st.lists(counts, max_size=64)),
    st.builds(Ack, counts),
    st.builds(Decline, counts, st.just("because")),
    st.builds(Leave),
)
honest_offer = st.tuples(counts, counts, st.integers(0, 1))  # round, sequence, which of two snapshots
bodies = st.sampled_from([None, b"", bytes(PIECE)])


@trials(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.lists(st.one_of(st.tuples(anything, bodies), honest_offer), max_size=40))
def test_whatever_a_neighbor_says_nobody_else_suffers(make_wire: Make, said: list[Any]) -> None:
    wire = make_wire(peers=3, concurrent=2)
    wire.enter(1)
    wire.expect(0, 1, 2)
    wire.submit(0, 1, 2)
    for entry in said:
        message, body = entry if len(entry) == 2 else (wire.offer(*entry), None)
        wire.hear(0, 1, message, body)
        held = [key for key in wire.peers[0].receiver.transfers if key[0] == 1]
        assert wire.peers[0].receiver.blocks.out <= 2 and len(held) <= OFFERS_HELD
    wire.waiting = [entry for entry in wire.waiting if entry[1].to != 1]
    wire.frozen.add(1)
    wire.expect(2, 0)
    wire.submit(2, 0)
    wire.pass_time(40.0)
    assert [d.sender for d in wire.deliveries[0]] == [2] and [d.sender for d in wire.deliveries[2]] == [0]
    assert [missing.sender for missing in wire.missing[0]] == [1]
    assert not wire.peers[0].open_rounds
