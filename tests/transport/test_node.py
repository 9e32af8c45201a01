"""Real nodes over real sockets: exact delivery, honest books, and an end to every wait."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from zmq.utils import garbage

from transport import books, control
from transport.node import ROUNDS_IN_FLIGHT, Node, Stopped, TransportError
from transport.transfers import Delivery, Missing

ALL = {(i, j) for i in range(3) for j in range(3) if i != j}
PAIR = {(0, 1), (1, 0)}
TIMES = ["queue_ms", "wire_ms", "verify_ms", "injected_ms", "inbox_ms"]


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_snapshots_arrive_exactly_and_the_books_are_right(nodes: Any, kind: str) -> None:
    nodes.start(ALL, kind=kind, sizes={0: 100, 1: 4096 * 17, 2: 4096 * 6 + 1})
    for round in (1, 2, 3):
        arrivals = nodes.exchange(round, 0, 1, 2)
        assert arrivals == {id: [(other, round) for other in range(3) if other != id] for id in range(3)}
    for node in nodes.nodes.values():
        node.drain()
    connections = nodes.settle()
    for id, journal in nodes.journals.items():
        delivered = journal.of("delivered")
        assert sorted((facts["round"], facts["sender"]) for facts in delivered) == [
            (round, other) for round in (1, 2, 3) for other in range(3) if other != id
        ]
        for facts in delivered:
            assert facts["payload"] == nodes.layouts[facts["sender"]].bytes
            assert all(facts[name] >= 0 for name in TIMES)
            assert sum(facts[name] for name in TIMES) == pytest.approx(facts["observed_ms"], abs=1e-3)
        (books,) = journal.of("books")
        for edge in books["edges"]:
            assert edge["messages"] == 3 and edge["payload"] == 3 * nodes.layouts[id].bytes
            assert edge["retransmitted"] == 0 and edge["stream"] > edge["payload"]
        assert not journal.of("refused") and not journal.of("missing") and not journal.of("undelivered")
    ends = {(id, c["neighbor"], c["direction"]): c for id, written in connections.items() for c in written}
    assert len(ends) == sum(len(written) for written in connections.values()) == 2 * len(ALL)
    for (id, neighbor, direction), end in ends.items():
        other = ends[neighbor, id, {"in": "out", "out": "in"}[direction]]
        assert (end["stream_out"], end["stream_in"]) == (other["stream_in"], other["stream_out"])
        if kind == "tcp":
            assert (end["kernel_out"], end["kernel_in"]) == (end["stream_out"], end["stream_in"])
            assert end["verified"] is True and end["note"] == ""
        else:
            assert (end["kernel_out"], end["verified"]) == (None, None)
            assert end["note"] == "no kernel counters for this transport"


def test_a_byte_that_is_not_in_the_books_is_noticed(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = books.frame_bytes
    monkeypatch.setattr(books, "frame_bytes", lambda body: honest(body) - (body == 4096))
    nodes.start(PAIR, drain_s=0.5)
    nodes.exchange(1, 0, 1)
    connections = nodes.settle()
    assert [c["verified"] for c in connections[0] + connections[1]] == [False] * 4
    for c in connections[0]:
        assert c["kernel_out"] - c["stream_out"] == (9 if c["direction"] == "out" else 0)
        assert c["kernel_in"] - c["stream_in"] == (9 if c["direction"] == "in" else 0)


@pytest.mark.parametrize(("size", "in_place"), [(2**18 - 100, False), (2**18 + 100, True)])
def test_only_large_pieces_are_sent_in_place(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, size: int, in_place: bool
) -> None:
    """What is sent in place makes pyzmq start a thread and a context that wait for it to be sent."""
    kept: list[int] = []
    store = garbage.gc.store
    monkeypatch.setattr(garbage.gc, "store", lambda obj, event=None: kept.append(len(obj)) or store(obj, event))
    nodes.start({(0, 1)}, piece_bytes=2**20, sizes={0: size})
    for id in (0, 1):
        nodes.nodes[id].enter(1)
    nodes.share(0, 1, 1)
    assert nodes.gather(1, 0) == [(0, 1)]
    assert kept == ([nodes.layouts[0].bytes] if in_place else [])


def test_an_edge_may_go_one_way_only(nodes: Any) -> None:
    nodes.start({(0, 1)})
    for round in (1, 2):
        for id in (0, 1):
            nodes.nodes[id].enter(round)
        nodes.share(0, round, 1)
        assert nodes.gather(1, 0) == [(0, round)]
    connections = nodes.settle()
    assert [[c["direction"] for c in connections[id]] for id in (0, 1)] == [["out"], ["in"]]
    assert all(c["verified"] for c in connections[0] + connections[1])


def test_draining_waits_for_what_was_shared_just_now(nodes: Any) -> None:
    nodes.start({(0, 1)})
    for round in range(1, 30):
        for id in (0, 1):
            nodes.nodes[id].enter(round)
        with ThreadPoolExecutor(1) as reader:
            gathered = reader.submit(nodes.gather, 1, 0)
            nodes.share(0, round, 1)
            nodes.nodes[0].drain()
            assert nodes.state(0, lambda loop: loop.ledger.books[1].messages) == round
            assert gathered.result() == [(0, round)]


def test_a_reader_that_never_releases_holds_no_more_blocks_than_allowed(
    nodes: Any, wait_until: Callable[..., None]
) -> None:
    edges = {(i, 0) for i in (1, 2, 3, 4)}
    nodes.start(edges, concurrent=2)
    for id in nodes.nodes:
        nodes.nodes[id].enter(1)
    for sender in (1, 2, 3, 4):
        nodes.share(sender, 1, 0)
    arrivals = nodes.nodes[0].gather([1, 2, 3, 4])
    held = [next(arrivals), next(arrivals)]
    waiting = {(sender, 0) for sender in (1, 2, 3, 4)} - {(delivery.sender, 0) for delivery in held}
    wait_until(lambda: nodes.state(0, lambda loop: set(loop.protocol.receiver.transfers)) == waiting)
    blocks = nodes.state(0, lambda loop: loop.protocol.receiver.blocks.out)
    assert blocks == 2 and nodes.loops[0].inbox.empty()
    for delivery in held:
        nodes.nodes[0].release(delivery.block)
    rest = []
    for delivery in arrivals:
        rest.append(delivery.sender)
        nodes.nodes[0].release(delivery.block)
    assert {delivery.sender for delivery in held} | set(rest) == {1, 2, 3, 4}


def test_a_gathering_that_is_left_early_does_not_reach_into_the_next_round(nodes: Any) -> None:
    nodes.start(ALL)
    for round in range(1, 6):  # more often than there are blocks
        for id in (0, 1, 2):
            nodes.nodes[id].enter(round)
            nodes.share(id, round, *({0, 1, 2} - {id}))
        item = next(nodes.nodes[0].gather([1, 2]))
        assert isinstance(item, Delivery) and item.round == round
        nodes.nodes[0].release(item.block)
        assert len(nodes.gather(1, 0, 2)) == len(nodes.gather(2, 0, 1)) == 2
    assert nodes.exchange(6, 0, 1, 2)[0] == [(1, 6), (2, 6)]


def test_what_was_delivered_is_not_gathered_twice(nodes: Any) -> None:
    nodes.start(PAIR)
    nodes.exchange(1, 0, 1)
    with pytest.raises(ValueError, match=r"peers \[1\] for round 1 were already gathered"):
        nodes.gather(0, 1)
    assert nodes.exchange(2, 0, 1) == {0: [(1, 2)], 1: [(0, 2)]}


# Neighbors that vanish or hang.


@contextmanager
def frozen(nodes: Any, id: int) -> Iterator[None]:
    """Meanwhile a node's loop does nothing, while its sockets stay open."""
    asleep, wake = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        asleep.set()
        wake.wait()

    nodes.loops[id].commands.give(sleep)
    asleep.wait()
    try:
        yield
    finally:
        wake.set()


def test_a_neighbor_that_vanishes_is_missing_by_its_closed_connection(nodes: Any) -> None:
    nodes.start(ALL, disconnected_s=0.3)  # silence would take 40 s
    nodes.exchange(1, 0, 1, 2)
    nodes.close(2)
    for id in (0, 1):
        nodes.nodes[id].enter(2)
        nodes.share(id, 2, 1 - id, 2)
    reason = "neighbor is dead: its connection closed and was not opened again in 0.3 s"
    for id in (0, 1):
        assert nodes.gather(id, 1 - id, 2) == [(1 - id, 2), Missing(2, 2, reason)]
    for id in (0, 1):
        nodes.nodes[id].drain()
        assert [facts["reason"] for facts in nodes.journals[id].of("undelivered")] == [reason]
    nodes.nodes[0].enter(3)
    assert nodes.gather(0, 2) == [Missing(2, 3, reason)]  # at once
    connections = nodes.settle()
    for id in (0, 1):
        gone = [c for c in connections[id] if c["neighbor"] == 2]
        assert [c["note"] for c in gone] == ["closed before its counters could be read"] * 2
        assert all(c["verified"] for c in connections[id] if c["neighbor"] != 2)


def test_the_last_words_of_a_neighbor_do_not_hide_that_it_has_gone(nodes: Any, wait_until: Callable[..., None]) -> None:
    """They are read after its connection closed, when the reader was busy: as with a peer killed in a transfer."""
    nodes.start(PAIR, disconnected_s=0.3)
    nodes.exchange(1, 0, 1)
    with frozen(nodes, 0):
        nodes.nodes[1].enter(2)
        nodes.share(1, 2, 0)
        said = nodes.state(1, lambda loop: loop.ledger.books[0].stream)
        wait_until(lambda: nodes.state(1, lambda loop: loop.ledger.books[0].stream) > said + 200)
        open_before = [c.descriptor for c in nodes.loops[0]._connections.all]
        nodes.close(1)
        wait_until(lambda: not any(_is_open_socket(descriptor) for descriptor in open_before))
    nodes.nodes[0].enter(2)
    (missing,) = nodes.gather(0, 1)
    assert missing.reason == "neighbor is dead: its connection closed and was not opened again in 0.3 s"


def _is_open_socket(descriptor: int) -> bool:
    from transport.books import tcp_counters

    try:
        tcp_counters(descriptor)
    except OSError:
        return False
    return True


def test_a_neighbor_that_hangs_is_missing_by_its_silence_and_may_come_back(nodes: Any) -> None:
    nodes.start(PAIR, suspect_s=0.3, dead_s=1.0)
    nodes.exchange(1, 0, 1)
    with frozen(nodes, 1):
        nodes.nodes[0].enter(2)
        nodes.share(0, 2, 1)
        (missing,) = nodes.gather(0, 1)
        assert missing.reason.startswith("neighbor is dead: silent for ")
        nodes.nodes[0].drain()
    nodes.journals[0].wait_for("link", "heard from")
    assert nodes.exchange(3, 0, 1) == {0: [(1, 3)], 1: [(0, 3)]}


def test_a_neighbor_that_shares_nothing_is_missing_when_it_goes_on(nodes: Any) -> None:
    nodes.start(PAIR)
    for id, round in ((0, 1), (1, 2)):
        nodes.nodes[id].enter(round)
    assert nodes.gather(0, 1) == [Missing(1, 1, "neighbor is in round 2 and offers nothing older")]


def test_a_neighbor_that_is_late_is_missing_at_the_deadline(nodes: Any) -> None:
    nodes.start(PAIR, deadline_s=0.3)
    for id in (0, 1):
        nodes.nodes[id].enter(1)
    assert nodes.gather(0, 1) == [Missing(1, 1, "not here within 0.3 s")]
    nodes.share(0, 1, 1)
    nodes.nodes[0].drain()
    assert nodes.journals[0].of("undelivered")[0]["reason"] == "not taken within 0.3 s"


def test_a_neighbor_that_was_never_there_is_missing(nodes: Any) -> None:
    nodes.start(PAIR, strangers=frozenset({1}), suspect_s=0.2, dead_s=0.5)
    nodes.nodes[0].enter(1)
    nodes.share(0, 1, 1)
    (missing,) = nodes.gather(0, 1)
    assert "silent" in missing.reason
    nodes.nodes[0].drain()


# The end.


def waiting_for_neighbors(nodes: Any) -> Callable[[], object]:
    nodes.nodes[0].enter(1)
    return lambda: nodes.gather(0, 1)


def waiting_to_share(nodes: Any) -> Callable[[], object]:
    last = 2 + ROUNDS_IN_FLIGHT
    for round in range(2, last + 1):  # the first would be taken ahead of its round
        nodes.nodes[0].enter(round)
        if round < last:
            nodes.share(0, round, 1)
    return lambda: nodes.share(0, last, 1)


def waiting_to_drain(nodes: Any) -> Callable[[], object]:
    nodes.nodes[0].enter(2)
    nodes.share(0, 2, 1)
    return lambda: nodes.nodes[0].drain()


def waiting_for_orders(nodes: Any) -> Callable[[], object]:
    return lambda: nodes.nodes[0].await_order(control.Settle, timeout_s=50.0)


@pytest.mark.parametrize("prepare", [waiting_for_neighbors, waiting_to_share, waiting_to_drain, waiting_for_orders])
def test_an_order_to_stop_ends_every_wait(nodes: Any, prepare: Callable[[Any], Callable[[], object]]) -> None:
    nodes.start(PAIR, deadline_s=300.0)
    waits = prepare(nodes)
    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(lambda: (started.set(), waits()))
        started.wait()
        if prepare is waiting_for_neighbors:
            nodes.wait_for_report(lambda report: isinstance(report, control.Progress) and report.waiting_for == [1])
        nodes.order(0, control.Stop())
        assert isinstance(ended.exception(), Stopped)
    with pytest.raises(Stopped):
        nodes.nodes[0].enter(9)


def test_the_supervisor_hears_where_a_peer_is(nodes: Any) -> None:
    nodes.start(PAIR)
    nodes.nodes[0].report(control.Ready(nodes.endpoints[0]))
    assert nodes.wait_for_report(lambda report: isinstance(report, control.Ready)).endpoint == nodes.endpoints[0]
    nodes.exchange(1, 0, 1)
    payload = nodes.layouts[0].bytes
    nodes.wait_for_report(lambda report: isinstance(report, control.Progress) and report.payload == payload)
    nodes.order(0, control.Addresses({1: "somewhere"}))
    assert nodes.nodes[0].await_order(control.Addresses, 20.0).endpoints == {1: "somewhere"}
    nodes.order(0, control.Close())
    with pytest.raises(TransportError, match="expected Settle"):
        nodes.nodes[0].await_order(control.Settle, 20.0)
    with pytest.raises(TransportError, match=r"no Settle from the supervisor within 0\.01 s"):
        nodes.nodes[0].await_order(control.Settle, 0.01)


def test_when_the_thread_of_the_sockets_dies_every_wait_says_so(nodes: Any) -> None:
    nodes.start(PAIR)
    nodes.nodes[0].enter(1)
    nodes.share(0, 1, 1)

    def fail(_: float) -> None:
        raise ZeroDivisionError("on purpose")

    nodes.loops[0].commands.give(fail)
    for wait in (
        lambda: nodes.gather(0, 1),
        lambda: nodes.nodes[0].drain(),
        lambda: nodes.nodes[0].enter(2),
        lambda: nodes.nodes[0].await_order(control.Settle, 20.0),
    ):
        with pytest.raises(TransportError) as caught:
            wait()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_port_that_is_taken_is_said_clearly_and_leaves_nothing(nodes: Any) -> None:
    nodes.start(PAIR)
    loop = nodes.loops[0]
    second = type(loop)(loop.identity, loop.protocol, loop.settings, nodes.endpoints[0], loop.supervisor, loop.record)
    node = Node(second)
    with pytest.raises(TransportError, match=f"cannot bind {nodes.endpoints[0]}: Address already in use"):
        node.open(timeout_s=20.0)
    node.close(timeout_s=20.0)


def test_closing_in_the_middle_of_everything_ends(nodes: Any) -> None:
    nodes.start(ALL, sizes={0: 1 << 22})
    for id in (0, 1, 2):
        nodes.nodes[id].enter(1)
        nodes.share(id, 1, *({0, 1, 2} - {id}))
    arrivals = nodes.nodes[1].gather([0, 2])
    next(arrivals)
    for id in (0, 1, 2):
        nodes.close(id)  # and the fixture looks for what is left


def test_settling_ends_although_a_neighbor_never_says_goodbye(nodes: Any) -> None:
    nodes.start(PAIR, drain_s=0.3)
    nodes.exchange(1, 0, 1)
    with frozen(nodes, 1):
        connections = nodes.settle(0)
    assert len(connections[0]) == 2
    assert all(c["kernel_out"] is not None for c in connections[0]), "the counters were not even looked at"


def test_a_peer_may_have_a_hundred_neighbors(nodes: Any) -> None:
    edges = {(0, j) for j in range(1, 101)}
    nodes.start(edges, strangers=frozenset(range(1, 101)))
    nodes.nodes[0].connect({j: f"ipc://{nodes._folder}/nobody-{j}" for j in range(1, 101)})
    assert nodes.state(0, lambda loop: len(loop._dealers)) == 100
    nodes.nodes[0].enter(1)
