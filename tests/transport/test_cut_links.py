"""Connections that are cut or garbled in the middle of a snapshot: it arrives once and unchanged, or is missing."""

import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from transport.transfers import Missing

PAIR = {(0, 1), (1, 0)}


class Proxy(threading.Thread):
    """Passes on what goes through it, and once, at one byte from the side that connected, strikes."""

    def __init__(self, at: int, strike: Callable[[bytearray, int], bool]) -> None:
        super().__init__(name="proxy")
        self._at, self._strike = at, strike
        self.struck = False
        self._passed = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._bell, self._rung = socket.socketpair()
        self._select = selectors.DefaultSelector()
        self._to: dict[socket.socket, socket.socket] = {}
        self._clients: set[socket.socket] = set()

    def detour(self, endpoint: str) -> str:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._server = (host, int(port))
        self.start()
        return f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"

    def run(self) -> None:
        for source in (self._listening, self._rung):
            self._select.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self._select.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._rung:
                    return
                if source is self._listening:
                    self._accept()
                elif source in self._to:
                    self._pass_on(source)

    def _accept(self) -> None:
        client, server = self._listening.accept()[0], socket.create_connection(self._server)
        self._clients.add(client)
        for source, target in ((client, server), (server, client)):
            self._to[source] = target
            self._select.register(source, selectors.EVENT_READ)

    def _pass_on(self, source: socket.socket) -> None:
        try:
            data = bytearray(source.recv(1 << 16))
            keep = bool(data) and self._look_at(data, source in self._clients)
            self._to[source].sendall(data)
        except OSError:
            keep = False
        if not keep:
            self._cut(source)

    def _look_at(self, data: bytearray, from_client: bool) -> bool:
        if self.struck or not from_client:
            return True
        start, self._passed = self._passed, self._passed + len(data)
        if self._passed <= self._at:
            return True
        self.struck = True
        return self._strike(data, self._at - start)

    def _cut(self, source: socket.socket) -> None:
        for end in (source, self._to[source]):
            self._select.unregister(end)
            del self._to[end]
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # so that closing resets
            end.close()

    def close(self) -> None:
        self._bell.close()
        self.join()
        for source in list(self._to):
            if source in self._to:
                self._cut(source)
        for opened in (self._listening, self._rung, self._select):
            opened.close()


def cut(data: bytearray, at: int) -> bool:
    del data[at:]
    return False


def flip(data: bytearray, at: int) -> bool:
    data[at] ^= 0x10
    return True


@pytest.fixture
def proxy() -> Iterator[Callable[..., Proxy]]:
    made: list[Proxy] = []

    def make(at: int, strike: Callable[[bytearray, int], bool]) -> Proxy:
        made.append(Proxy(at, strike))
        return made[-1]

    yield make
    for each in made:
        each.close()


# A DEALER's handshake is 110 bytes; a beat takes some 35, an offer 75, each of the 10 pieces 4,140.
@pytest.mark.parametrize("at", [0, 64, 110, 160, 200, 300, 4000, 20_000, 40_000])
def test_a_connection_cut_anywhere_costs_time_and_nothing_else(
    nodes: Any, proxy: Callable[..., Proxy], at: int
) -> None:
    tampering = proxy(at, cut)
    nodes.start(PAIR, sizes={0: 40_000, 1: 40_000}, detours={(0, 1): tampering.detour})
    assert nodes.exchange(1, 0, 1) == {0: [(1, 1)], 1: [(0, 1)]}
    assert nodes.exchange(2, 0, 1) == {0: [(1, 2)], 1: [(0, 2)]}
    for id in (0, 1):
        nodes.nodes[id].drain()
    assert tampering.struck
    for id, connections in nodes.settle().items():
        ended = [c for c in connections if c["verified"] is None]
        assert all(c["note"] == "closed before its counters could be read" for c in ended)
        assert [(c["verified"], c["neighbor"]) for c in connections if c not in ended] == [(True, 1 - id)] * 2
        (books,) = nodes.journals[id].of("books")
        assert [(edge["messages"], edge["payload"]) for edge in books["edges"]] == [(2, 2 * nodes.layouts[id].bytes)]
    assert not nodes.journals[0].of("undelivered") and not nodes.journals[1].of("missing")


@pytest.mark.parametrize("at", [5, 70, 110, 111, 115, 150, 200, 300, 400, 4400, 30_000])
def test_a_garbled_stream_is_never_taken_for_a_snapshot(nodes: Any, proxy: Callable[..., Proxy], at: int) -> None:
    """What it leads to depends on the byte; content that arrives is checked by `exchange`."""
    tampering = proxy(at, flip)
    quick = {"suspect_s": 0.3, "dead_s": 1.5, "disconnected_s": 1.0}
    nodes.start(PAIR, sizes={0: 40_000, 1: 40_000}, detours={(0, 1): tampering.detour}, **quick)
    for round in (1, 2):
        arrivals = nodes.exchange(round, 0, 1)
        assert arrivals[0] == [(1, round)] or isinstance(arrivals[0][0], Missing)
        assert arrivals[1] == [(0, round)] or isinstance(arrivals[1][0], Missing)
    assert tampering.struck
    assert all(nodes.state(id, lambda loop: loop.failure) is None for id in (0, 1))
