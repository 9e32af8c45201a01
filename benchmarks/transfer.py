"""Delivery of snapshots between two processes over TCP, against a raw Python socket in the same run.

The transport does all it does in a swarm: offers, credit, checksums on both sides, acknowledgements, books. The raw
socket does `sendall` and `recv_into` a buffer that is there already. Between them, as a ceiling, a bare pair of ZeroMQ
sockets: the same pieces, hashed on both sides and copied into place, one byte of acknowledgement, and nothing else.
All move the same block from one process to another, turn by turn. Two notions of throughput:

    back to back    the next snapshot is on its way before the last was acknowledged (the bar)
    one at a time   the next is sent when the last was acknowledged, by one byte on the raw socket and the bare pair
"""

import argparse
import json
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import xxhash
import zmq
from machine import Bars, describe

from topology.sections import TransportSection
from transport import control
from transport.layout import Bytes, Field, Layout, always, seal
from transport.loop import SEND_BUFFER, Loop
from transport.memory import keep_freed_memory
from transport.messages import Identity
from transport.node import Node
from transport.protocol import Protocol
from transport.transfers import Delivery

BAR = 0.7
SENDER, RECEIVER = 0, 1
WHO = ("raw", "bare", "swarm")
DEADLINE_S = 60.0
BARE_OUTSTANDING = 2
BOOKKEEPING = {"link", "connection", "books", "delivered"}
"""What may be recorded in an undisturbed run; anything else is a failure."""


@dataclass(frozen=True)
class Task:
    """What both processes know."""

    run: bytes
    supervisor: str
    megabytes: float
    turns: int
    deliveries: int
    settings: TransportSection

    @property
    def layout(self) -> Layout:
        return Layout((Field("block", "uint8", (int(self.megabytes * 1e6),)),))

    def block(self) -> Bytes:
        return np.random.default_rng(1).integers(0, 256, self.layout.bytes, dtype=np.uint8)

    def node(self, peer: int) -> Node:
        sends_to = [RECEIVER] if peer == SENDER else []
        layouts = {SENDER: always(self.layout)} if peer == RECEIVER else {}
        protocol = Protocol(time.monotonic(), sends_to, layouts, self.settings, DEADLINE_S)
        identity = Identity(peer, 0, self.run)
        node = Node(Loop(identity, protocol, self.settings, "tcp://127.0.0.1:*", self.supervisor, record))
        node.report(control.Ready(node.open(DEADLINE_S)))
        node.connect(node.await_order(control.Addresses, DEADLINE_S).endpoints)
        return node


def record(event: str, facts: dict[str, Any]) -> None:
    if event not in BOOKKEEPING or facts.get("verified") is False:
        print(f"{event}: {facts}", file=sys.stderr, flush=True)


def leave(node: Node) -> None:
    """Say goodbye, so that the other side keeps nothing open, and compare the books with the kernel's."""
    node.settle(DEADLINE_S)
    node.close(DEADLINE_S)


class BareSender:
    """The sending end of the bare pair."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int) -> None:
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.SNDBUF, SEND_BUFFER)
        self._dealer.connect(f"tcp://127.0.0.1:{port}")
        self._outstanding = 0

    def send(self, block: memoryview, piece_bytes: int) -> None:
        self.wait(BARE_OUTSTANDING - 1)
        for start in range(0, len(block), piece_bytes):
            piece = block[start : start + piece_bytes]
            self._dealer.send(xxhash.xxh3_64_digest(piece), zmq.SNDMORE)
            self._dealer.send(piece, copy=False)
        self._outstanding += 1

    def wait(self, outstanding: int = 0) -> None:
        while self._outstanding > outstanding:
            self._dealer.recv()
            self._outstanding -= 1

    def close(self) -> None:
        self._dealer.close()


def receive_bare(router: zmq.Socket[bytes], block: Bytes) -> None:
    """The receiving end of the bare pair: one snapshot."""
    got = 0
    while got < len(block):
        sender, checksum, piece = router.recv_multipart(copy=False)
        if xxhash.xxh3_64_digest(piece.buffer) != checksum.bytes:
            sys.exit("a piece of the bare pair arrived damaged")
        block[got : got + len(piece)] = np.frombuffer(piece.buffer, dtype=np.uint8)
        got += len(piece)
    router.send_multipart([sender.bytes, b"!"])


def send(task: Task, raw_port: int, bare_port: int) -> dict[str, list[float]]:
    """The sender's process: seconds a delivery of each kind, a number a turn."""
    keep_freed_memory()
    block, layout, node = task.block(), task.layout, task.node(SENDER)
    raw = socket.create_connection(("127.0.0.1", raw_port))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    context = zmq.Context()
    bare, rounds = BareSender(context, bare_port), iter(range(1, 10**9))

    def send_raw(acknowledged: bool) -> None:
        raw.sendall(block.data)
        if acknowledged:
            raw.recv(1)

    def send_bare(acknowledged: bool) -> None:
        bare.send(block.data, task.settings.piece_bytes)
        if acknowledged:
            bare.wait()

    def send_snapshot(acknowledged: bool) -> None:
        node.enter(next(rounds))
        node.share({RECEIVER: seal(layout, block, task.settings.piece_bytes)})
        if acknowledged:
            node.drain()

    def one_at_a_time(deliver: Callable[[bool], None]) -> float:
        times = []
        for _ in range(task.deliveries):
            began = time.monotonic()
            deliver(True)
            times.append(time.monotonic() - began)
        return median(times)

    def back_to_back(deliver: Callable[[bool], None], finish: Callable[[], object]) -> float:
        began = time.monotonic()
        for _ in range(task.deliveries):
            deliver(False)
        finish()
        return (time.monotonic() - began) / task.deliveries

    times: dict[str, list[float]] = {f"{who} {kind}": [] for who in WHO for kind in ("one", "many")}
    packing = []
    for turn in range(task.turns + 1):
        measured = {}
        kinds: tuple[tuple[str, Callable[[], float]], ...] = (
            ("raw one", lambda: one_at_a_time(send_raw)),
            ("bare one", lambda: one_at_a_time(send_bare)),
            ("swarm one", lambda: one_at_a_time(send_snapshot)),
            ("raw many", lambda: back_to_back(send_raw, lambda: raw.recv(1))),
            ("bare many", lambda: back_to_back(send_bare, bare.wait)),
            ("swarm many", lambda: back_to_back(send_snapshot, node.drain)),
        )
        for kind, measure in kinds:
            raw.recv(1)  # the receiver is there
            measured[kind] = measure()
        began = time.monotonic()
        layout.pack({"block": block})
        packing.append(time.monotonic() - began)
        if turn > 0:  # the first only warms the memory
            for kind, seconds in measured.items():
                times[kind].append(seconds)
    bare.close()
    context.term()
    leave(node)
    return times | {"pack": packing[1:]}


def receive(task: Task) -> None:
    """The receiver's process."""
    keep_freed_memory()
    listener = socket.create_server(("127.0.0.1", 0))
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    print(listener.getsockname()[1], router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    node, block = task.node(RECEIVER), np.empty(task.layout.bytes, dtype=np.uint8)
    raw, _ = listener.accept()
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    view, rounds = block.data, iter(range(1, 10**9))
    expected = task.block()

    def receive_raw() -> None:
        got = 0
        while got < len(view):
            got += raw.recv_into(view[got:])

    def receive_snapshot(check: bool) -> None:
        node.enter(next(rounds))
        for item in node.gather([SENDER]):
            if not isinstance(item, Delivery):
                sys.exit(f"not delivered: {item}")
            if check and not np.array_equal(item.block, expected):
                sys.exit("the delivered bytes are not those that were sent")
            node.release(item.block)

    for turn in range(task.turns + 1):
        for acknowledged in (True, False):
            raw.sendall(b"!")
            for _ in range(task.deliveries):
                receive_raw()
                if acknowledged:
                    raw.sendall(b"!")
            if not acknowledged:
                raw.sendall(b"!")
            raw.sendall(b"!")
            for _ in range(task.deliveries):
                receive_bare(router, block)
            raw.sendall(b"!")
            for _ in range(task.deliveries):
                receive_snapshot(check=turn == 0)
    router.close()
    context.term()
    leave(node)


def measure(megabytes: float, turns: int, deliveries: int, window: int | None) -> dict[str, list[float]]:
    """Run both processes, being their supervisor."""
    with tempfile.TemporaryDirectory(prefix="transfer-") as folder:
        supervisor, run = f"ipc://{folder}/supervisor", secrets.token_hex(16)
        shared = [run, supervisor, str(megabytes), str(turns), str(deliveries), str(window or 0)]
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(supervisor)
        receiver = _start("receive", *shared)
        assert receiver.stdout is not None
        sender = _start("send", *shared, *receiver.stdout.readline().split())
        try:
            _introduce(router, (sender, receiver))
            output, _ = sender.communicate(timeout=600)
            if sender.returncode or receiver.wait(DEADLINE_S):
                sys.exit(f"a process failed: sender {sender.returncode}, receiver {receiver.returncode}")
        finally:
            sender.kill()
            receiver.kill()
            router.close()
            context.term()
    times: dict[str, list[float]] = json.loads(output)
    return times


def _start(role: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, "--as", role, *arguments], stdout=subprocess.PIPE, text=True)


def _introduce(router: zmq.Socket[bytes], processes: tuple[subprocess.Popen[str], ...]) -> None:
    """Tell each where the other is, once both are bound; what they report later waits unread."""
    endpoints: dict[int, str] = {}
    while len(endpoints) < 2:
        if not router.poll(1000):
            if any(process.poll() is not None for process in processes):
                sys.exit("a process ended before it was ready")
            continue
        routing_id, frame = router.recv_multipart()
        report = control.decode_report(frame)
        if isinstance(report, control.Ready):
            endpoints[int(routing_id.split(b".")[0])] = report.endpoint
    for peer in (RECEIVER, SENDER):
        other = {RECEIVER: endpoints[RECEIVER]} if peer == SENDER else {}
        router.send_multipart([f"{peer}.0".encode(), control.encode(control.Addresses(other))])


def _task(run: str, supervisor: str, megabytes: str, turns: str, deliveries: str, window: str) -> Task:
    settings = TransportSection(window=int(window)) if int(window) else TransportSection()
    return Task(bytes.fromhex(run), supervisor, float(megabytes), int(turns), int(deliveries), settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[3, 45], help="sizes of a snapshot")
    parser.add_argument("--turns", type=int, default=15, help="how often each kind has its turn")
    parser.add_argument("--total", type=float, default=300, help="megabytes moved in each turn")
    parser.add_argument("--window", type=int, help="transport.window, if not the default")
    parser.add_argument("--as", dest="role", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        role, *rest = arguments.role
        if role == "send":
            print(json.dumps(send(_task(*rest[:-2]), int(rest[-2]), int(rest[-1]))))
        else:
            receive(_task(*rest))
        return

    print(describe())
    bars = Bars()
    for megabytes in arguments.megabytes:
        deliveries = max(4, round(arguments.total / megabytes))
        times = measure(megabytes, arguments.turns, deliveries, arguments.window)
        print(f"\n{megabytes:g} MB, {arguments.turns} turns of {deliveries} deliveries; medians (quartiles)")
        for kind, name in (("one", "one at a time"), ("many", "back to back")):
            for who in WHO:
                q1, q2, q3 = np.percentile(times[f"{who} {kind}"], (25, 50, 75)) * 1e3
                print(
                    f"  {name:13}  {who:5}  {q2:7.2f} ms ({q1:.2f} to {q3:.2f})  "
                    f"{megabytes / q2:5.2f} GB/s  ratio {median(times[f'raw {kind}']) * 1e3 / q2:.2f}"
                )
        print(f"  beside it: to pack a fresh block, as each round does, takes {median(times['pack']) * 1e3:.2f} ms")
        ratio = median(times["raw many"]) / median(times["swarm many"])
        bars.at_least(f"{megabytes:g} MB back to back, share of the raw socket's throughput", ratio, BAR)
    bars.exit()


if __name__ == "__main__":
    main()
