"""Whoever knocks that is not a neighbor of this run is refused and written down, and the exchange goes on."""

import socket
from collections.abc import Callable
from typing import Any

import pytest
import xxhash
import zmq

from transport.liveness import STRIKES
from transport.loop import REFUSALS_RECORDED
from transport.messages import PROTOCOL_VERSION, Beat, Envelope, Leave, Message, Offer, Piece, encode
from transport.transfers import Missing

PAIR = {(0, 1), (1, 0)}
TRIANGLE = {(i, j) for i in range(3) for j in range(3) if i != j}
BEAT = Beat(1, 1, 0.0)


def said(source: int, message: Message = BEAT, run: bytes = bytes(range(16)), version: int = PROTOCOL_VERSION) -> bytes:
    return encode(Envelope(version, run, source, 0, message))


def impostor(nodes: Any, routing_id: bytes) -> "zmq.Socket[bytes]":
    """A connection to peer 0 of whoever it says."""
    opened: zmq.Socket[bytes] = nodes.socket(zmq.DEALER)
    opened.setsockopt(zmq.ROUTING_ID, routing_id)
    opened.connect(nodes.endpoints[0])
    return opened


def piece(body: bytes) -> Piece:
    return Piece(0, 0, xxhash.xxh3_64_intdigest(body), 0.0)


@pytest.mark.parametrize(
    ("routing_id", "frames", "reason"),
    [
        (b"2.0", [said(2, run=bytes(16))], "run 00000000000000000000000000000000 is not this run"),
        (b"7.0", [said(7)], "peer 7 is no neighbor"),
        (b"0.0", [said(0)], "peer 0 is no neighbor"),
        (b"2.0", [said(2, version=2)], "protocol version 2"),
        (b"2.7", [said(2)], "says it is 2.0"),
        (b"somebody\n", [said(2)], "says it is 2.0"),
        (b"2.0", [b"random garbage"], "not a message of this protocol"),
        (b"2.0", [b""], "not a message of this protocol"),
        (b"2.0", [bytes(1025)], "header of 1025 bytes, at most 1024 are allowed"),
        (b"2.0", [said(2, piece(b"x"))], "a body belongs to a piece, and to nothing else"),
        (b"2.0", [said(2), b"x"], "a body belongs to a piece, and to nothing else"),
        (b"2.0", [said(2, piece(b"x")), b"x", b"y"], "3 frames, 1 or 2 are allowed"),
    ],
)
def test_who_is_no_neighbor_of_this_run_is_refused(
    nodes: Any, routing_id: bytes, frames: list[bytes], reason: str
) -> None:
    nodes.start(TRIANGLE, strangers=frozenset({2}))  # 2 is a neighbor of the run, played by the test
    nodes.exchange(1, 0, 1)
    impostor(nodes, routing_id).send_multipart(frames)
    refused = nodes.journals[0].wait_for("refused")
    assert reason in refused["reason"]
    assert refused["source"] == routing_id.decode()
    assert nodes.exchange(2, 0, 1) == {0: [(1, 2)], 1: [(0, 2)]}
    assert nodes.state(0, lambda loop: loop.protocol.neighbors[2].incarnation) == -1


def test_a_frame_that_is_too_long_ends_the_connection(nodes: Any) -> None:
    nodes.start(PAIR)
    impostor(nodes, b"5.0").send(bytes(1 << 20))
    assert nodes.journals[0].wait_for("refused")["source"] == "unknown"
    assert nodes.exchange(1, 0, 1) == {0: [(1, 1)], 1: [(0, 1)]}


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n" + bytes(100), b""])
def test_what_does_not_even_speak_zeromq_is_refused(nodes: Any, greeting: bytes) -> None:
    nodes.start(PAIR)
    host, port = nodes.endpoints[0].removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
        refused = nodes.journals[0].wait_for("refused")
        assert refused == {"source": "unknown", "reason": "its connection ended before a message said whose it is"}
    assert nodes.exchange(1, 0, 1) == {0: [(1, 1)], 1: [(0, 1)]}


def test_a_stranger_cannot_fill_the_disk(nodes: Any, wait_until: Callable[..., None]) -> None:
    nodes.start(PAIR)
    stranger = impostor(nodes, b"5.0")
    for _ in range(REFUSALS_RECORDED + 50):
        stranger.send(b"garbage")
    wait_until(lambda: nodes.state(0, lambda loop: loop._refusals) == REFUSALS_RECORDED + 50)
    assert len(nodes.journals[0].of("refused")) == REFUSALS_RECORDED
    assert nodes.exchange(1, 0, 1) == {0: [(1, 1)], 1: [(0, 1)]}


def test_a_neighbor_cannot_fill_the_disk_either(nodes: Any, wait_until: Callable[..., None]) -> None:
    nodes.start({(0, 1), (0, 2)}, strangers=frozenset({2}))  # 2 only hears from 0, and may not offer
    offer = impostor(nodes, b"2.0")
    for sequence in range(REFUSALS_RECORDED + 50):
        offer.send(said(2, Offer(sequence, 1, 0, 0, 0, 0, 0.0, 0)))
    wait_until(lambda: nodes.state(0, lambda loop: loop.protocol.neighbors[2].state) == "banned")
    assert len(nodes.journals[0].of("refused")) == STRIKES
    assert nodes.journals[0].of("link")[-1]["reason"] == f"said {STRIKES} times what no correct peer says"


def test_bytes_of_refused_messages_are_in_the_books(nodes: Any, wait_until: Callable[..., None]) -> None:
    """Whatever a neighbor sends, before and after it says who it is: the stream is what the kernel counted."""
    nodes.start(TRIANGLE, strangers=frozenset({2}), suspect_s=0.5, dead_s=1.0)
    spoken = impostor(nodes, b"2.0")
    for frames in ([b"garbage"], [bytes(300), b"x"], [said(2)], [b"garbage"], [b""] * 5, [said(2, Leave())]):
        spoken.send_multipart(frames)
    wait_until(lambda: nodes.state(0, lambda loop: loop.protocol.neighbors[2].state) == "left")
    connections = nodes.settle(0, 1)
    (theirs,) = [c for c in connections[0] if c["neighbor"] == 2]
    assert theirs["verified"] is True and theirs["stream_in"] > 300
    assert len(nodes.journals[0].of("refused")) == 4


def test_who_answers_in_the_name_of_another_is_refused(nodes: Any) -> None:
    nodes.start(TRIANGLE, strangers=frozenset({2}))
    liar = nodes.socket(zmq.ROUTER)
    port = liar.bind_to_random_port("tcp://127.0.0.1")
    nodes.nodes[0].connect({2: f"tcp://127.0.0.1:{port}"})
    routing_id, _ = liar.recv_multipart()  # a beat
    liar.send_multipart([routing_id, said(1, Leave())])
    refused = nodes.journals[0].wait_for("refused")
    assert refused == {"source": "2", "reason": "peer 2 speaks as peer 1"}
    assert nodes.exchange(1, 0, 1) == {0: [(1, 1)], 1: [(0, 1)]}


def test_a_neighbor_that_takes_the_offer_and_says_nothing_holds_nobody_up(nodes: Any) -> None:
    nodes.start(TRIANGLE, strangers=frozenset({2}), suspect_s=0.3, dead_s=0.8)
    silent = impostor(nodes, b"2.0")
    silent.send(said(2))
    nodes.nodes[0].enter(1)
    nodes.nodes[1].enter(1)
    nodes.share(0, 1, 1)
    nodes.share(1, 1, 0)
    arrivals = nodes.gather(0, 1, 2)
    assert arrivals[0] == (1, 1) and isinstance(arrivals[1], Missing) and "silent for" in arrivals[1].reason
    assert nodes.gather(1, 0) == [(0, 1)]
