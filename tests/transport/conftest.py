"""What every test of the transport keeps to, protocols joined without a network, and nodes without processes."""

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import pytest
import xxhash
import zmq

from topology.sections import TransportSection
from transport import control
from transport.keys import Keys
from transport.layout import Bytes, Field, Layout, Snapshot, always, seal
from transport.loop import Loop
from transport.messages import Identity, Message, Offer, Piece
from transport.node import Node
from transport.protocol import Protocol
from transport.transfers import Delivery, Event, Missing, Send

T = TypeVar("T")

LIMIT_S = 60


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """A test that hangs is ended, with what every thread was doing; one that hangs in C takes the whole run with it."""

    def end(signum: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__)
        raise TimeoutError(f"the test has not ended within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, 10)  # again and again, for what hangs in cleaning up
    faulthandler.dump_traceback_later(2 * LIMIT_S, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _held() -> dict[str, object]:
    links = {link.name: _read(link.readlink) for link in Path("/proc/self/fd").iterdir()}
    return {
        "descriptors": {name: target for name, target in links.items() if target},
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "threads of contexts": _context_threads(),
    }


def _context_threads() -> int:
    names = [_read((task / "comm").read_text) for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("ZMQ") for name in names)


def _read(entry: Callable[[], object]) -> str:
    """An entry of /proc; nothing when it is gone by now: the listing's own descriptor, or a thread that has just ended,
    whose file may still be opened and then not be read."""
    try:
        return str(entry())
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture(scope="session")
def collector() -> None:
    """The one thread and context that pyzmq keeps for the whole process, once something was sent without a copy."""
    zmq.Frame(bytes(1 << 17), copy=False)
    while _context_threads() < 2:  # a thread names itself when it first runs
        os.sched_yield()


@pytest.fixture(autouse=True)
def nothing_left(collector: None, alarm: None) -> Iterator[None]:
    before = _held()
    yield
    after = _held()
    left = {kind: (before[kind], after[kind]) for kind in before if before[kind] != after[kind]}
    assert not left, f"the test left something behind: {left}"


PIECE = 4096
Choice = Callable[[Send], bool]


class Wire:
    """Protocols without a network: what one says to another waits, in order, until it is delivered or lost."""

    def __init__(
        self, peers: int = 2, size: int = 5 * PIECE - 100, deadline_s: float = 30.0,
        edges: set[tuple[int, int]] | None = None, **settings: object,
    ) -> None:  # fmt: skip
        self.now = 100.0
        self.layout = Layout((Field("x", "uint8", (size,)),))
        self.settings = TransportSection.model_validate({"piece_bytes": PIECE} | settings)
        self.edges = edges or {(i, j) for i in range(peers) for j in range(peers) if i != j}
        self.peers = {peer: self._born(peer, deadline_s) for peer in range(peers)}
        self.waiting: list[tuple[int, Send]] = []
        self.said: list[tuple[int, Send]] = []
        self.deliveries: dict[int, list[Delivery]] = {peer: [] for peer in self.peers}
        self.missing: dict[int, list[Missing]] = {peer: [] for peer in self.peers}
        self.events: dict[int, list[Event]] = {peer: [] for peer in self.peers}
        self.incarnations = dict.fromkeys(self.peers, 0)
        self.frozen: set[int] = set()

    def _born(self, peer: int, deadline_s: float = 30.0) -> Protocol:
        sends_to = [j for i, j in sorted(self.edges) if i == peer]
        layouts = {i: always(self.layout) for i, j in self.edges if j == peer}
        protocol = Protocol(self.now, sends_to, layouts, self.settings, deadline_s)
        protocol.meet(self.now)
        return protocol

    def restart(self, peer: int) -> None:
        self.peers[peer] = self._born(peer)
        self.incarnations[peer] += 1

    def do(self, peer: int, command: Callable[[Protocol], object]) -> None:
        """Have a peer do something and collect what comes of it."""
        command(self.peers[peer])
        for output in self.peers[peer].take():
            match output:
                case Send():
                    self.said.append((peer, output))
                    self.waiting.append((peer, output))
                case Delivery():
                    self.deliveries[peer].append(output)
                case Missing():
                    self.missing[peer].append(output)
                case Event():
                    self.events[peer].append(output)

    def enter(self, round: int, *peers: int) -> None:
        for peer in peers or self.peers:
            self.do(peer, lambda p: p.enter(self.now, round))

    def submit(self, peer: int, *receivers: int, names: tuple[int, ...] = ()) -> None:
        snapshot = self.snapshot(*(names or (peer, self.peers[peer].round)))
        self.do(peer, lambda p: p.submit(self.now, dict.fromkeys(receivers, snapshot)))

    def expect(self, peer: int, *senders: int) -> None:
        self.do(peer, lambda p: p.expect(self.now, senders))

    def release(self, peer: int, delivery: Delivery) -> None:
        self.do(peer, lambda p: p.release(delivery.block))

    def hear(
        self, peer: int, source: int, message: Message, body: bytes | bytearray | None = None, life: int = 0
    ) -> None:
        view = None if body is None else memoryview(body)
        checksum = 0 if body is None else xxhash.xxh3_64_intdigest(body)
        self.do(peer, lambda p: p.receive(self.now, source, life, message, view, checksum))

    def deliver_one(self, damage: bool = False) -> None:
        source, send = self.waiting.pop(0)
        body = None if send.body is None else bytes(send.body)
        if damage and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.hear(send.to, source, send.message, body, self.incarnations[source])

    def deliver(self, *, lose: Choice = lambda _: False, twice: bool = False) -> None:
        """Deliver until nothing waits but what is for the frozen, and lose what is chosen."""
        while reachable := [entry for entry in self.waiting if entry[1].to not in self.frozen]:
            self.waiting.remove(reachable[0])
            if not lose(reachable[0][1]):
                for _ in range(2 if twice else 1):
                    self.waiting.insert(0, reachable[0])
                    self.deliver_one()

    def pass_time(self, seconds: float, lose: Choice = lambda _: False) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.1
            for peer in self.peers.keys() - self.frozen:
                self.do(peer, lambda p: p.tick(self.now))
            self.deliver(lose=lose)

    def content(self, *names: int) -> Bytes:
        """What is called so: bytes that depend on the names."""
        return np.random.default_rng(names).integers(0, 256, self.layout.bytes, dtype=np.uint8)

    def snapshot(self, *names: int) -> Snapshot:
        return seal(self.layout, self.content(*names), PIECE)

    def offer(self, round: int, sequence: int = 0, *names: int) -> Offer:
        snapshot, layout = self.snapshot(*names), self.layout
        return Offer(sequence, round, layout.hash, layout.bytes, len(snapshot.checksums), snapshot.digest, 0.0, 0)

    def answers(self, peer: int) -> list[Message]:
        return [send.message for source, send in self.said if source == peer and send.reply]

    def noted(self, peer: int, name: str) -> list[dict[str, object]]:
        return [event.facts for event in self.events[peer] if event.name == name]

    def pieces_sent(self, peer: int = 0) -> list[int]:
        return [s.message.index for source, s in self.said if source == peer and isinstance(s.message, Piece)]

    def assert_delivered_once(self, receiver: int = 1, sender: int = 0) -> None:
        assert len(self.deliveries[receiver]) == 1
        delivery = self.deliveries[receiver][0]
        assert (delivery.block == self.content(sender, delivery.round)).all()
        assert not self.missing[receiver] and not self.peers[receiver].awaited


@pytest.fixture(scope="session")
def make_wire() -> Callable[..., Wire]:
    return Wire


@pytest.fixture
def under_way() -> Callable[..., Wire]:
    """Peer 0 has offered its snapshot of round 1 and peer 1 waits for it; nothing is delivered yet."""

    def start(**options: object) -> Wire:
        wire = Wire(**options)  # type: ignore[arg-type]
        wire.enter(1)
        wire.submit(0, 1)
        wire.expect(1, 0)
        return wire

    return start


class Journal:
    """What a node wrote down; a test can wait for a line."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: list[tuple[str, dict[str, Any]]] = []

    def write(self, event: str, facts: dict[str, Any]) -> None:
        with self._changed:
            self._lines.append((event, facts))
            self._changed.notify_all()

    def of(self, event: str) -> list[dict[str, Any]]:
        with self._changed:
            return [facts for name, facts in self._lines if name == event]

    def wait_for(self, event: str, text: str = "") -> dict[str, Any]:
        """The first line of this kind that has the text in it."""
        with self._changed:
            while True:
                for name, facts in self._lines:
                    if name == event and text in str(facts):
                        return facts
                self._changed.wait()


class Nodes:
    """Nodes of one process, and the supervisor's socket: what a test of real sockets needs. Peers are 0, 1, .."""

    RUN = bytes(range(16))

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []
        self.supervisor = self.socket(zmq.ROUTER)
        self.supervisor.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.supervisor.bind(f"ipc://{folder}/supervisor")
        self.loops: dict[int, Loop] = {}
        self.nodes: dict[int, Node] = {}
        self.journals: dict[int, Journal] = {}
        self.endpoints: dict[int, str] = {}
        self.layouts: dict[int, Layout] = {}
        self.settings: TransportSection

    def start(
        self, edges: set[tuple[int, int]], *, sizes: dict[int, int] | None = None, deadline_s: float = 50.0,
        strangers: frozenset[int] = frozenset(), detours: dict[tuple[int, int], Callable[[str], str]] | None = None,
        keys: dict[int, Keys] | None = None, **settings: object,
    ) -> None:  # fmt: skip
        """Start a node for each peer of the edges that is no stranger, and open their connections."""
        patient = {"piece_bytes": PIECE, "beat_s": 0.05, "suspect_s": 20.0, "dead_s": 40.0, "disconnected_s": 40.0,
                   "retry_s": 0.1, "drain_s": 20.0}  # fmt: skip
        self.settings = TransportSection.model_validate(patient | settings)
        ids = sorted({id for edge in edges for id in edge})
        for id in ids:
            size = (sizes or {}).get(id, 9 * PIECE + 100 * id)
            self.layouts[id] = Layout((Field("n", "int32", (1,)), Field("x", "uint8", (size,))))
        for id in ids:
            if id not in strangers:
                self._open(id, edges, deadline_s, (keys or {}).get(id))
        direct: dict[tuple[int, int], str] = {edge: self.endpoints[edge[1]] for edge in edges if edge[1] in self.nodes}
        reached = direct | {edge: detour(direct[edge]) for edge, detour in (detours or {}).items()}
        for id, node in self.nodes.items():
            node.connect({j: endpoint for (i, j), endpoint in reached.items() if i == id})

    def _open(self, id: int, edges: set[tuple[int, int]], deadline_s: float, keys: Keys | None) -> None:
        sends_to, layouts = [j for i, j in edges if i == id], {i: always(self.layouts[i]) for i, j in edges if j == id}
        protocol = Protocol(time.monotonic(), sends_to, layouts, self.settings, deadline_s)
        bind = f"ipc://{self._folder}/{id}" if self.settings.kind == "ipc" else "tcp://127.0.0.1:*"
        journal = self.journals[id] = Journal()
        identity = Identity(id, 0, self.RUN)
        loop = self.loops[id] = Loop(
            identity, protocol, self.settings, bind, f"ipc://{self._folder}/supervisor", journal.write, keys
        )
        self.nodes[id] = Node(loop)
        self.endpoints[id] = self.nodes[id].open(timeout_s=20.0)

    def content(self, id: int, round: int) -> Bytes:
        return np.random.default_rng((id, round)).integers(0, 256, self.layouts[id].bytes, dtype=np.uint8)

    def share(self, id: int, round: int, *receivers: int) -> None:
        block = self.content(id, round)
        self.nodes[id].share(dict.fromkeys(receivers, seal(self.layouts[id], block, self.settings.piece_bytes)))

    def gather(self, id: int, *senders: int) -> list[tuple[int, int] | Missing]:
        """Read and check what these neighbors share in this round: (sender, round) of each that came."""
        arrivals: list[tuple[int, int] | Missing] = []
        for item in self.nodes[id].gather(senders):
            if isinstance(item, Delivery):
                assert (item.block == self.content(item.sender, item.round)).all()
                self.nodes[id].release(item.block)
                arrivals.append((item.sender, item.round))
            else:
                arrivals.append(item)
        return sorted(arrivals, key=str)

    def exchange(self, round: int, *ids: int) -> dict[int, list[tuple[int, int] | Missing]]:
        """A round among these peers, each with every other."""
        for id in ids:
            self.nodes[id].enter(round)
            self.share(id, round, *(set(ids) - {id}))
        return {id: self.gather(id, *(set(ids) - {id})) for id in ids}

    def settle(self, *ids: int) -> dict[int, list[dict[str, Any]]]:
        """Close the books of these peers; what each wrote about its connections."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda id: self.nodes[id].settle(timeout_s=50.0), ids or self.nodes))
        return {id: self.journals[id].of("connection") for id in ids or self.nodes}

    def order(self, id: int, order: control.Order) -> None:
        while True:
            try:
                return self.supervisor.send_multipart([f"{id}.0".encode(), control.encode(order)])
            except zmq.ZMQError as error:
                assert error.errno == zmq.EHOSTUNREACH
                self.supervisor.recv_multipart()  # it has yet to connect, which its first report shows

    def wait_for_report(self, accept: Callable[[control.Report], bool]) -> control.Report:
        while True:
            report = control.decode_report(self.supervisor.recv_multipart()[1])
            if accept(report):
                return report

    def state(self, id: int, read: Callable[[Loop], T]) -> T:
        """Something of a node's loop, read in the loop's thread."""
        answer: SimpleQueue[T] = SimpleQueue()
        self.loops[id].commands.give(lambda _: answer.put(read(self.loops[id])))
        return answer.get(timeout=30.0)

    def socket(self, kind: int) -> "zmq.Socket[bytes]":
        """A socket that says what it likes."""
        opened = self.context.socket(kind)
        self.sockets.append(opened)
        opened.setsockopt(zmq.LINGER, 0)
        return opened

    def close(self, id: int) -> None:
        self.nodes.pop(id).close(timeout_s=30.0)

    def close_all(self) -> None:
        for id in list(self.nodes):
            self.close(id)
        for opened in self.sockets:
            opened.close()
        self.context.term()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    # Not in tmp_path: the path of a socket may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        made = Nodes(folder)
        yield made
        made.close_all()


def wait_until(condition: Callable[[], bool]) -> None:
    """For what nobody announces; the alarm ends it."""
    while not condition():
        threading.Event().wait(0.005)


@pytest.fixture(name="wait_until")
def _wait_until() -> Callable[[Callable[[], bool]], None]:
    return wait_until
