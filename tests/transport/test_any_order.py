"""What holds for the protocol in whatever order a network delivers, loses, repeats and damages, and whoever dies.

Hypothesis plays the network, the peers' main threads and death; then the network heals, and everything that was waited
for must have ended.
"""

from dataclasses import dataclass, replace

import numpy as np
import xxhash
from hypothesis import settings as trials
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from topology.sections import TransportSection
from transport.layout import Bytes, Field, Layout, always, seal
from transport.messages import Piece
from transport.protocol import Protocol
from transport.transfers import Delivery, Missing, Send

PEERS = range(3)
PIECE = 4096
DEADLINE_S = 30.0
LAYOUT = Layout((Field("x", "uint8", (4 * PIECE + 1,)),))
peers = st.sampled_from(list(PEERS))
position = st.integers(0, 10_000)


def content(peer: int, round: int) -> Bytes:
    return np.random.default_rng((peer, round)).integers(0, 256, LAYOUT.bytes, dtype=np.uint8)


@dataclass(frozen=True)
class Letter:
    source: int
    send: Send
    body: bytes | None

    @property
    def transfer(self) -> tuple[int, int, int]:
        assert isinstance(self.send.message, Piece)
        return self.source, self.send.to, self.send.message.sequence


class AnyOrder(RuleBasedStateMachine):
    @initialize(window=st.integers(1, 4), concurrent=st.integers(1, 2))
    def start(self, window: int, concurrent: int) -> None:
        self.now = 0.0
        self.settings = TransportSection(
            piece_bytes=PIECE, window=window, concurrent=concurrent, dead_s=20.0, suspect_s=8.0
        )
        self.protocols: dict[int, Protocol] = {}
        for peer in PEERS:
            others = [other for other in PEERS if other != peer]
            self.protocols[peer] = Protocol(
                0.0, others, dict.fromkeys(others, always(LAYOUT)), self.settings, DEADLINE_S
            )
            self.protocols[peer].meet(0.0)
        self.bag: list[Letter] = []
        self.dead: set[int] = set()
        self.expected: set[tuple[int, int, int]] = set()  # receiver, sender, round
        self.ended: dict[tuple[int, int, int], str] = {}
        self.unread: list[tuple[int, Delivery]] = []

        for peer in PEERS:
            self.begin_a_round(peer, 1, shares=True)

    # The peers.

    @rule(peer=peers)
    def begin_the_next_round(self, peer: int) -> None:
        if not self.protocols[peer].awaited:
            self.begin_a_round(peer, 1, shares=True)

    @precondition(lambda self: self.now > 3)
    @rule(peer=peers, skip=st.integers(1, 2), shares=st.booleans())
    def begin_a_round(self, peer: int, skip: int, shares: bool) -> None:
        """Without waiting for what it waits for."""
        if peer in self.dead:
            return
        protocol, others = self.protocols[peer], [other for other in PEERS if other != peer]
        for other in protocol.awaited:
            self.ended[peer, other, protocol.round] = "void"
        protocol.enter(self.now, protocol.round + skip)
        self.expected |= {(peer, other, protocol.round) for other in others}
        if shares:
            protocol.submit(self.now, dict.fromkeys(others, seal(LAYOUT, content(peer, protocol.round), PIECE)))
        protocol.expect(self.now, others)
        self.collect(peer)

    @precondition(lambda self: self.unread)
    @rule()
    def read(self) -> None:
        peer, delivery = self.unread.pop(0)
        if peer not in self.dead:
            self.protocols[peer].release(delivery.block)
            self.collect(peer)

    @precondition(lambda self: self.now > 3)
    @rule(peer=peers)
    def die(self, peer: int) -> None:
        if not self.dead:
            self.dead.add(peer)

    # Time and the network.

    @rule(seconds=st.sampled_from([0.1, 0.6, 0.6, 3.0]), frozen=st.sampled_from([None, None, *PEERS]))
    def pass_time(self, seconds: float, frozen: int | None) -> None:
        self.now += seconds
        for peer in PEERS:
            if peer not in self.dead and peer != frozen:
                self.protocols[peer].tick(self.now)
                self.collect(peer)

    @precondition(lambda self: self.bag)
    @rule(number=st.integers(1, 40))
    def deliver(self, number: int) -> None:
        for _ in range(min(number, len(self.bag))):
            self.arrive(self.bag.pop(0))

    @precondition(lambda self: self.bag)
    @rule(at=position)
    def deliver_out_of_order(self, at: int) -> None:
        self.arrive(self.bag.pop(at % len(self.bag)))

    @precondition(lambda self: self.bag)
    @rule(at=position)
    def lose(self, at: int) -> None:
        self.bag.pop(at % len(self.bag))

    @precondition(lambda self: self.bag)
    @rule(at=position)
    def repeat(self, at: int) -> None:
        self.bag.append(self.bag[at % len(self.bag)])

    @precondition(lambda self: any(letter.body for letter in self.bag))
    @rule(at=position, bit=position)
    def damage(self, at: int, bit: int) -> None:
        pieces = [index for index, letter in enumerate(self.bag) if letter.body]
        index = pieces[at % len(pieces)]
        body = bytearray(self.bag[index].body or b"")
        body[bit % len(body)] ^= 1 << bit % 8
        self.bag[index] = replace(self.bag[index], body=bytes(body))

    def arrive(self, letter: Letter) -> None:
        to = letter.send.to
        if to not in self.dead:
            body = None if letter.body is None else memoryview(letter.body)
            checksum = 0 if body is None else xxhash.xxh3_64_intdigest(body)
            self.protocols[to].receive(self.now, letter.source, 0, letter.send.message, body, checksum)
            self.collect(to)

    def collect(self, peer: int) -> None:
        for output in self.protocols[peer].take():
            match output:
                case Send():
                    body = None if output.body is None else bytes(output.body)
                    self.bag.append(Letter(peer, output, body))
                case Delivery():
                    ahead = output.round == self.protocols[peer].round + 1
                    if ahead:  # it may come while the peer still learns
                        self.expected.add((peer, output.sender, output.round))
                    self.end(peer, output.sender, output.round, "delivered", ahead)
                    assert (output.block == content(output.sender, output.round)).all()
                    self.unread.append((peer, output))
                case Missing():
                    self.end(peer, output.sender, output.round, "missing")

    def end(self, receiver: int, sender: int, round: int, how: str, ahead: bool = False) -> None:
        key = (receiver, sender, round)
        assert key in self.expected and key not in self.ended, f"{key} {how}, before {self.ended.get(key)}"
        assert round == self.protocols[receiver].round + ahead
        self.ended[key] = how

    @invariant()
    def memory_is_bounded(self) -> None:
        for protocol in getattr(self, "protocols", {}).values():
            assert 0 <= protocol.receiver.blocks.out <= self.settings.concurrent

    @invariant()
    def pieces_underway_fit_the_window(self) -> None:
        underway: dict[tuple[int, int, int], set[int]] = {}
        for letter in getattr(self, "bag", []):
            if letter.body is not None:
                source, to, sequence = letter.transfer
                incoming = self.protocols[to].receiver.transfers.get((source, sequence))
                if incoming is not None and incoming.block is not None:
                    index = letter.send.message.index
                    if incoming.checksums[index] is None:
                        underway.setdefault(letter.transfer, set()).add(index)
        assert all(len(indices) <= self.settings.window for indices in underway.values())

    def teardown(self) -> None:
        """The network heals: what the living wait for ends, and nothing stays underway or in memory."""
        if not hasattr(self, "protocols"):
            return
        alive = [peer for peer in PEERS if peer not in self.dead]
        end = self.now + 2 * DEADLINE_S + 20.0
        while self.now < end:
            self.now += 0.2
            for peer in alive:
                self.protocols[peer].tick(self.now)
                self.collect(peer)
            while self.bag:
                self.deliver(1)
            while self.unread:
                self.read()
        for peer in alive:
            assert not self.protocols[peer].awaited
            assert self.protocols[peer].receiver.blocks.out == 0
            assert not self.protocols[peer].open_rounds
        assert {key for key in self.expected if key[0] in alive} <= self.ended.keys()


AnyOrder.TestCase.settings = trials(
    max_examples=100, stateful_step_count=80, deadline=None, derandomize=True, database=None
)
TestAnyOrder = AnyOrder.TestCase
