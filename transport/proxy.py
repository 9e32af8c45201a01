"""Stands in the TCP connections that a peer opens along edges with a stream fault, and strikes at a byte of the peer.

The peer's DEALER connects to a port of its own process, from where all bytes are passed on to the neighbor and back
again. It reads up to the byte where a rule strikes and no further, so what the neighbor gets is exact. Bytes are
counted from the beginning of each connection (of the rule's first round, if the connection is older), and anew after
each strike; what comes before round 1 belongs to it.
"""

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from topology.faults import Blackhole, Flip, Reset, Truncate
from topology.reach import EdgePair, bounds, edges_of, in_rounds
from transport.faultlog import FaultLog

CHUNK = 1 << 16
CONNECT_S = 5.0
LOOPBACK = "127.0.0.1", 0
_RESETS = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets

StreamFault = Reset | Truncate | Flip | Blackhole


@dataclass
class Strike:
    """One rule on one edge, and how often it is still to happen there."""

    rule: StreamFault
    left: int

    @property
    def at(self) -> int:
        """How many bytes pass before it."""
        return self.rule.at_byte if isinstance(self.rule, Flip) else self.rule.after_bytes


@dataclass
class Edge:
    """One edge with its rules: where the neighbor is, and where the peer connects to instead."""

    receiver: int
    strikes: list[Strike]
    listening: socket.socket
    server: tuple[str, int] = ("", 0)
    dark_until: float = 0.0


@dataclass
class Flow:
    """One direction of a connection: what was read and is not passed on yet. Nothing more is read before it is."""

    edge: Edge
    source: socket.socket
    target: socket.socket
    from_peer: bool
    waiting: bytearray = field(default_factory=bytearray)
    passed: dict[str, int] = field(default_factory=dict)
    discards: bool = False


class Proxy(threading.Thread):
    """Runs until closed. `round` says in which round the peer is."""

    def __init__(
        self, peer: int, edges: Mapping[int, list[StreamFault]], round: Callable[[], int], log: FaultLog
    ) -> None:
        super().__init__(name=f"proxy of peer {peer}", daemon=True)
        self._peer, self._round, self._log = peer, round, log
        self._edges = {
            receiver: Edge(receiver, [Strike(rule, rule.times) for rule in rules], socket.create_server(LOOPBACK))
            for receiver, rules in edges.items()
        }
        self._flows: dict[socket.socket, Flow] = {}
        self._bell, self._rung = socket.socketpair()
        self._select = selectors.DefaultSelector()
        self.failure: BaseException | None = None

    def detour(self, endpoints: Mapping[int, str]) -> dict[int, str]:
        """Where to connect instead of to these endpoints of neighbors."""
        through = {}
        for receiver in sorted(self._edges.keys() & endpoints.keys()):
            host, _, port = endpoints[receiver].removeprefix("tcp://").rpartition(":")
            edge = self._edges[receiver]
            edge.server = host.strip("[]"), int(port)
            through[receiver] = f"tcp://127.0.0.1:{edge.listening.getsockname()[1]}"
        return dict(endpoints) | through

    def run(self) -> None:
        try:
            self._select.register(self._rung, selectors.EVENT_READ)
            for edge in self._edges.values():
                self._select.register(edge.listening, selectors.EVENT_READ, edge)
            while self._turn():
                pass
        except BaseException as error:
            self.failure = error
            raise
        finally:
            while self._flows:
                self._reset(next(iter(self._flows)))
            for opened in (*(edge.listening for edge in self._edges.values()), self._rung):
                opened.close()
            self._select.close()

    def close(self, timeout_s: float) -> None:
        """End the thread and every connection through it."""
        self._bell.close()
        self.join(timeout_s)
        if self.is_alive():
            raise RuntimeError(f"the {self.name} did not end within {timeout_s:g} s")

    def _turn(self) -> bool:
        now = time.monotonic()
        dark = [edge for edge in self._edges.values() if edge.dark_until]
        for edge in dark:
            if now >= edge.dark_until:
                self._lighten(edge)
        pause = min((edge.dark_until - now for edge in dark if edge.dark_until), default=None)
        for key, events in self._select.select(pause):
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            if ready is self._rung:
                return False
            if isinstance(key.data, Edge):
                if not key.data.dark_until:
                    self._accept(key.data)
            elif ready in self._flows and not self._flows[ready].edge.dark_until:
                self._pass_on(ready, events)
        return True

    def _accept(self, edge: Edge) -> None:
        client, _ = edge.listening.accept()
        try:
            server = socket.create_connection(edge.server, CONNECT_S)
        except OSError:  # the neighbor is not there: to the peer that looks as it would without the proxy
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
            client.close()
            return
        for source, target in ((client, server), (server, client)):
            source.setblocking(False)
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._flows[source] = Flow(edge, source, target, source is client)
            self._select.register(source, selectors.EVENT_READ)

    def _pass_on(self, ready: socket.socket, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._write(self._flows[self._flows[ready].target])
            if events & selectors.EVENT_READ:
                self._read(self._flows[ready])
        except BlockingIOError:
            pass
        except OSError:
            self._reset(ready)

    def _read(self, flow: Flow) -> None:
        flips: list[tuple[Strike, int]] = []
        room = CHUNK
        if flow.from_peer and not flow.discards:
            round = max(1, self._round())
            for strike in flow.edge.strikes:
                if not strike.left or not in_rounds(round, strike.rule.rounds):
                    continue
                distance = strike.at - flow.passed.setdefault(strike.rule.id, 0)
                if distance == 0 and isinstance(strike.rule, Flip):
                    flips.append((strike, round))
                elif distance == 0:
                    self._strike(strike, flow, round)
                    return
                room = min(room, max(1, distance))
        data = bytearray(flow.source.recv(room))
        if not data:
            self._end(flow)
            return
        if flow.discards:
            return
        for rule in flow.passed:
            flow.passed[rule] += len(data)
        for strike, round in flips:
            self._note(strike, flow, round)
            data[0] ^= 0xFF
        flow.waiting += data
        self._write(flow)

    def _write(self, flow: Flow) -> None:
        with contextlib.suppress(BlockingIOError):
            del flow.waiting[: flow.target.send(flow.waiting)]
        self._watch(flow.source)
        self._watch(flow.target)

    def _watch(self, source: socket.socket) -> None:
        """Read from it when all is passed on, write to it when something waits."""
        outward = self._flows[source]
        inward = self._flows[outward.target]
        events = (0 if outward.waiting else selectors.EVENT_READ) | (selectors.EVENT_WRITE if inward.waiting else 0)
        if source in self._select.get_map():
            self._select.unregister(source)
        if events and not outward.edge.dark_until:
            self._select.register(source, events)

    def _strike(self, strike: Strike, flow: Flow, round: int) -> None:
        self._note(strike, flow, round)
        match strike.rule:
            case Reset():
                self._reset(flow.source)
            case Truncate():
                for source in (flow.source, flow.target):  # what is still said is read, or closing would reset
                    self._flows[source].discards = True
                    source.shutdown(socket.SHUT_WR)
            case Blackhole(for_s=for_s):
                flow.edge.dark_until = time.monotonic() + for_s
                for opened in self._of(flow.edge):
                    if opened in self._select.get_map():
                        self._select.unregister(opened)

    def _note(self, strike: Strike, flow: Flow, round: int) -> None:
        strike.left -= 1
        flow.passed[strike.rule.id] = 0
        receiver = flow.edge.receiver
        facts = {"sender": self._peer, "receiver": receiver, "byte": strike.at}
        exact = bounds(strike.rule.rounds)[0] == 1  # a later round begins in the middle of a stream of timed beats
        self._log.write(strike.rule, peer=receiver, round=round, exact=exact, **facts)

    def _lighten(self, edge: Edge) -> None:
        edge.dark_until = 0.0
        for opened in self._of(edge):
            if opened is edge.listening:
                self._select.register(opened, selectors.EVENT_READ, edge)
            else:
                self._watch(opened)

    def _of(self, edge: Edge) -> Iterable[socket.socket]:
        return [edge.listening, *(source for source, flow in self._flows.items() if flow.edge is edge)]

    def _end(self, flow: Flow) -> None:
        """One side closed in order, so the other one is; when the proxy did that itself, it waits for both."""
        if not flow.discards:
            self._flows[flow.target].discards = flow.discards = True
            flow.target.shutdown(socket.SHUT_WR)
        self._select.unregister(flow.source)
        if flow.target not in self._select.get_map():
            for source in (flow.source, flow.target):
                del self._flows[source]
                source.close()

    def _reset(self, source: socket.socket) -> None:
        for end in (source, self._flows[source].target):
            if end in self._select.get_map():
                self._select.unregister(end)
            del self._flows[end]
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
            end.close()


def stream_rules(
    peer: int, faults: Iterable[object], edges: Iterable[EdgePair], coordinator: int | None
) -> dict[int, list[StreamFault]]:
    """The neighbors whom a peer reaches through a proxy, with what strikes there."""
    rules: dict[int, list[StreamFault]] = {}
    for rule in faults:
        if isinstance(rule, StreamFault):
            for sender, receiver in sorted(edges_of(rule.edges, edges, coordinator)):
                if sender == peer:
                    rules.setdefault(receiver, []).append(rule)
    return rules
