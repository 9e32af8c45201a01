"""A witness that shares no code with the books: a proxy counts what passes between two nodes, agreeing to the byte."""

import itertools
import selectors
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PAIR = {(0, 1), (1, 0)}
SIZES = {0: 40_000, 1: 23_000}


class Witness(threading.Thread):
    """Passes on what goes through it, unread, and counts; on request it spoils one byte in the middle of pieces."""

    def __init__(self, spoil: tuple[int, ...]) -> None:
        super().__init__(name="witness")
        self._spoil = list(spoil)
        self.from_client = self.from_server = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._bell, self._rung = socket.socketpair()

    def detour(self, endpoint: str) -> str:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._server = (host, int(port))
        self.start()
        return f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"

    def run(self) -> None:
        client = self._listening.accept()[0]
        server = socket.create_connection(self._server)
        with client, server, selectors.DefaultSelector() as select:
            for source in (client, server, self._rung):
                select.register(source, selectors.EVENT_READ)
            while True:
                for key, _ in select.select():
                    if key.fileobj is self._rung:
                        return
                    self._pass_on(key.fileobj is client, client, server)

    def _pass_on(self, from_client: bool, client: socket.socket, server: socket.socket) -> None:
        source, target = (client, server) if from_client else (server, client)
        data = bytearray(source.recv(1 << 16))
        if from_client:
            for place in [place for place in self._spoil if place < self.from_client + len(data)]:
                data[place - self.from_client] ^= 0x10
                self._spoil.remove(place)
            self.from_client += len(data)
        else:
            self.from_server += len(data)
        target.sendall(data)

    def close(self) -> None:
        self._bell.close()
        self.join()
        self._listening.close()
        self._rung.close()


@pytest.fixture
def witnesses() -> Iterator[Callable[..., Witness]]:
    made: list[Witness] = []

    def make(*spoil: int) -> Witness:
        made.append(Witness(spoil))
        return made[-1]

    yield make
    for witness in made:
        witness.close()


def handshake(peer: int) -> tuple[int, int]:
    """Greeting and READY, counted from the specification (RFC 37) by hand: of the DEALER, and of the ROUTER."""
    identity = f"{peer}.0"
    dealer = 64 + 2 + 1 + 5 + (1 + 11 + 4 + 6) + (1 + 8 + 4 + len(identity))
    router = 64 + 2 + 1 + 5 + (1 + 11 + 4 + 6) + (1 + 8 + 4)
    return dealer, router


@pytest.mark.parametrize(
    ("spoil", "again"), [((), 0), ((3000,), 4096), ((3000, 12_000, 30_000), 3 * 4096)], ids=["calm", "one", "three"]
)
def test_the_ledger_agrees_with_a_witness_to_the_byte(
    nodes: Any, witnesses: Callable[..., Witness], spoil: tuple[int, ...], again: int
) -> None:
    between = {(0, 1): witnesses(*spoil), (1, 0): witnesses()}
    nodes.start(PAIR, sizes=SIZES, detours={edge: witness.detour for edge, witness in between.items()})
    for round in (1, 2, 3):
        assert nodes.exchange(round, 0, 1) == {0: [(1, round)], 1: [(0, round)]}
    for id in (0, 1):
        nodes.nodes[id].drain()
    connections = nodes.settle()
    traffic = {id: nodes.journals[id].of("traffic") for id in (0, 1)}

    # What each connection carried, both ways, by the witness and by the two ends.
    for (opener, other), witness in between.items():
        (out,) = [c for c in connections[opener] if c["direction"] == "out"]
        (into,) = [c for c in connections[other] if c["direction"] == "in"]
        assert out["stream_out"] == into["stream_in"] == witness.from_client
        assert out["stream_in"] == into["stream_out"] == witness.from_server

    # What was written by kind and round, with the handshakes, is all there was.
    for id in (0, 1):
        witnessed = between[id, 1 - id].from_client + between[1 - id, id].from_server
        written = sum(size for line in traffic[id] for _, size in line["out"].values())
        assert handshake(id)[0] + handshake(1 - id)[1] + written == witnessed
        (books,) = nodes.journals[id].of("books")
        assert books["edges"][0]["stream"] == written

    # Both ends say the same of every kind in every round.
    for id in (0, 1):
        said = {line["round"]: line["out"] for line in traffic[id] if line["out"]}
        heard = {line["round"]: line["in"] for line in traffic[1 - id] if line["in"]}
        assert said == heard
        assert {1, 2, 3} <= said.keys() <= {0, 1, 2, 3}
        pieces = nodes.layouts[id].bytes
        assert all(said[round]["piece"][1] > pieces for round in (1, 2, 3))

    # And what was sent again is booked as that, where it was.
    sent_again = {id: nodes.journals[id].of("books")[0]["edges"][0]["retransmitted"] for id in (0, 1)}
    assert sent_again == {0: again, 1: 0}
    kinds: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for id, line in itertools.chain.from_iterable([(id, line) for line in lines] for id, lines in traffic.items()):
        kinds[id].update({kind: number for kind, (number, _) in line["out"].items()})
    assert kinds[0]["piece"] == 3 * 10 + again // 4096 and kinds[0]["offer"] >= 3 and kinds[0]["ack"] == 3
    assert kinds[1]["resend"] == again // 4096 and kinds[1]["leave"] == 1
