"""The arithmetic of ZMTP is what the kernel counts on a real connection."""

from collections.abc import Callable, Iterator

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from transport.books import Connection, TcpCounters, frame_bytes, handshake_bytes, tcp_counters
from transport.connections import Connections


class Pair:
    """A ROUTER and a DEALER, and the descriptors of the two ends of their connection."""

    def __init__(self, routing_id: bytes, endpoint: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router, self.dealer = self.context.socket(zmq.ROUTER), self.context.socket(zmq.DEALER)
        self.accepting = self.router.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self.connecting = self.dealer.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self.dealer.setsockopt(zmq.ROUTING_ID, routing_id)
        self.router.bind(endpoint)
        self.dealer.connect(self.router.getsockopt_string(zmq.LAST_ENDPOINT))
        self.accepted = int(recv_monitor_message(self.accepting)["value"])
        self.connected = int(recv_monitor_message(self.connecting)["value"])

    def close(self) -> None:
        for opened in (self.router, self.dealer):
            if not opened.closed:
                opened.disable_monitor()
        for opened in (self.accepting, self.connecting, self.router, self.dealer):
            opened.close(linger=0)
        self.context.term()


@pytest.fixture
def connect() -> Iterator[Callable[[bytes, str], Pair]]:
    pairs: list[Pair] = []

    def make(routing_id: bytes, endpoint: str) -> Pair:
        pairs.append(Pair(routing_id, endpoint))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


Connect = Callable[[bytes, str], Pair]


@pytest.mark.parametrize("routing_id", [b"1.0", b"99.12345678901234567890"])
def test_frames_and_handshakes_are_what_the_kernel_counts(
    connect: Connect, wait_until: Callable[..., None], routing_id: bytes
) -> None:
    pair = connect(routing_id, "tcp://127.0.0.1:*")
    out, into = handshake_bytes("DEALER", routing_id), handshake_bytes("ROUTER", b"")
    messages = [[b""], [bytes(1)], [bytes(255)], [bytes(256)], [bytes(60), bytes(1 << 20)], [bytes(254), b"", b"x"]]
    for message in messages:
        pair.dealer.send_multipart(message)
        _, *received = pair.router.recv_multipart()
        assert received == message
        out += sum(frame_bytes(len(frame)) for frame in message)
        pair.router.send_multipart([routing_id, *message[:1]])
        pair.dealer.recv_multipart()
        into += frame_bytes(len(message[0]))
        here = Connection(0, True, pair.connected, out, into)
        there = Connection(0, False, pair.accepted, into, out)
        wait_until(lambda ends=(here, there): all(end.read_kernel() for end in ends))
        for end in (here, there):
            facts = end.facts()
            assert facts["verified"] is True
            assert (facts["kernel_out"], facts["kernel_in"]) == (facts["stream_out"], facts["stream_in"])


def test_a_difference_of_one_byte_is_a_difference() -> None:
    for out, into in ((100, 50), (101, 50), (99, 50), (100, 51), (100, 49)):
        for opened_here in (True, False):
            connection = Connection(1, opened_here, 0, 100, 50)
            connection.kernel = TcpCounters(out + opened_here, into, 0)
            assert connection.agrees is ((out, into) == (100, 50))
            assert connection.facts()["verified"] is ((out, into) == (100, 50))


def test_where_there_are_no_counters_the_books_say_so(connect: Connect) -> None:
    unix = Connection(1, True, connect(b"1.0", "ipc://*").connected, 100, 50)
    assert tcp_counters(unix.descriptor) is None and unix.read_kernel()
    assert (unix.facts()["verified"], unix.facts()["note"]) == (None, "no kernel counters for this transport")
    gone = Connection(1, True, 1 << 30, 100, 50)
    assert gone.read_kernel()
    assert (gone.facts()["verified"], gone.facts()["note"]) == (None, "closed before its counters could be read")


def test_reading_the_counters_does_not_hide_a_closing(connect: Connect) -> None:
    """A copy of the descriptor that stays open would."""
    pair = connect(b"1.0", "tcp://127.0.0.1:*")
    assert tcp_counters(pair.connected) and tcp_counters(pair.accepted)
    pair.router.disable_monitor()
    pair.router.close(linger=0)
    assert recv_monitor_message(pair.connecting)["event"] == zmq.EVENT_DISCONNECTED


def test_a_descriptor_that_is_used_again_is_another_connection() -> None:
    connections = Connections(b"0.0")
    connections.accepted(5)
    connections.received(5, 100)
    assert connections.closed(5) is None  # a stranger came and went
    connections.connected(1, 5)
    connections.received(5, 30)
    connections.identify(5, 1, b"1.0")
    (outward,) = connections.all
    assert outward is connections.outward[1] and not connections.inward
    assert outward.stream_in == handshake_bytes("ROUTER", b"") + 30
    assert connections.closed(5) is outward and outward.closed
    connections.accepted(5)
    connections.received(5, 7)
    connections.identify(5, 2, b"2.0")
    connections.identify(5, 2, b"2.0")  # each of its messages says so
    assert connections.all == [outward, connections.inward[2]]
    assert connections.inward[2].stream_in == handshake_bytes("DEALER", b"2.0") + 7
    assert outward.stream_in == handshake_bytes("ROUTER", b"") + 30
