"""The protocol of several peers in a simulated network: virtual clock, seeded delay, loss, repeats and damage.

No socket and no thread: a whole swarm's exchange takes milliseconds, so a test can try thousands of seeds. What the
network may do to a message is drawn from one generator; the order of events is a function of the seed.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random

import xxhash

from topology.sections import TransportSection
from transport.layout import Layout, always
from transport.messages import Message, Piece
from transport.protocol import Protocol
from transport.transfers import Delivery, Event, Missing, Send


@dataclass(frozen=True)
class Weather:
    """What the network does to messages; probabilities are per message."""

    delay_s: tuple[float, float] = (0.001, 0.02)
    lose: float = 0.0
    repeat: float = 0.0
    damage: float = 0.0


@dataclass
class SimulatedPeer:
    """A peer of the simulation: its protocol and what came out of it."""

    protocol: Protocol
    deliveries: list[Delivery] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    incarnation: int = 0
    alive: bool = True


class Network:
    """Peers 0..N-1 and their edges: layouts[receiver][sender] is what travels from sender to receiver."""

    def __init__(
        self,
        layouts: Mapping[int, Mapping[int, Layout]],
        settings: TransportSection,
        round_deadline_s: float,
        weather: Weather,
        seed: int,
    ) -> None:
        self.now = 0.0
        self.weather = weather
        self._random = Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.peers = {}
        for peer in layouts:
            sends_to = [other for other in layouts if peer in layouts[other]]
            hears = {other: always(layout) for other, layout in layouts[peer].items()}
            self.peers[peer] = SimulatedPeer(Protocol(0.0, sends_to, hears, settings, round_deadline_s))
            self.peers[peer].protocol.meet(0.0)
            self._schedule(0.0, lambda peer=peer: self._tick(peer))  # type: ignore[misc]

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Do something at a time."""
        self._schedule(time, act)

    def call(self, peer: int, command: Callable[[Protocol, float], None]) -> None:
        """Give a peer a command now."""
        if self.peers[peer].alive:
            command(self.peers[peer].protocol, self.now)
            self._collect(peer)

    def kill(self, peer: int) -> None:
        """The peer falls silent for ever; its neighbors see its connections close."""
        self.peers[peer].alive = False
        for other, it in self.peers.items():
            if it.alive and peer in it.protocol.neighbors:
                # What it said before is read first, as from a TCP stream.
                last = self.now + self.weather.delay_s[1]
                self._schedule(last, lambda other=other: self._see_closed(other, peer))  # type: ignore[misc]

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until a condition holds; False when it does not within the limit."""
        while not until():
            if not self._queue or self._queue[0][0] > limit_s:
                return False
            self.now, _, act = heapq.heappop(self._queue)
            act()
        return True

    def _schedule(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._order), act))

    def _tick(self, peer: int) -> None:
        if self.peers[peer].alive:
            again = self.peers[peer].protocol.tick(self.now)
            self._collect(peer)
            self._schedule(max(again, self.now + 1e-3), lambda: self._tick(peer))

    def _see_closed(self, peer: int, neighbor: int) -> None:
        self.peers[peer].protocol.disconnected(self.now, neighbor)
        self._collect(peer)

    def _collect(self, peer: int) -> None:
        it = self.peers[peer]
        for output in it.protocol.take():
            match output:
                case Send():
                    self._carry(peer, output)
                case Delivery():
                    output.verified = self.now
                    it.deliveries.append(output)
                case Missing():
                    it.missing.append(output)
                case Event():
                    it.events.append(output)

    def _carry(self, source: int, send: Send) -> None:
        if self._random.random() < self.weather.lose:
            return
        life = self.peers[source].incarnation
        copies = 2 if self._random.random() < self.weather.repeat else 1
        for _ in range(copies):
            body = None if send.body is None else bytearray(send.body)
            if body and self._random.random() < self.weather.damage:
                body[self._random.randrange(len(body))] ^= 1 << self._random.randrange(8)
            arrival = self.now + self._random.uniform(*self.weather.delay_s)
            self._schedule(arrival, lambda body=body: self._arrive(source, send.to, life, send.message, body))  # type: ignore[misc]

    def _arrive(self, source: int, to: int, life: int, message: Message, body: bytearray | None) -> None:
        it = self.peers[to]
        if not it.alive:
            return
        view = None if body is None else memoryview(body)
        checksum = xxhash.xxh3_64_intdigest(body) if isinstance(message, Piece) and body is not None else 0
        it.protocol.receive(self.now, source, life, message, view, checksum)
        self._collect(to)
