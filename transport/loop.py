"""The one thread of a peer that owns its sockets: it moves the protocol's messages over ZeroMQ and keeps the books.

Every node binds one ROUTER and opens one DEALER to each neighbor it sends to. What a node says on its own account
goes out on its DEALER; answers go back on the connection that asked. So no two connections land on the same pair of
sockets.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import xxhash
import zmq
from zmq.utils.monitor import recv_monitor_message

from topology.sections import TransportSection
from transport import control
from transport.backlog import Backlog
from transport.books import message_bytes
from transport.commands import Commands
from transport.connections import Connections
from transport.customs import Impersonation, check_key, check_sender, open_message
from transport.cutting import cut
from transport.faults import Arrived, Faults
from transport.keys import Keys
from transport.layout import Snapshot
from transport.ledger import Ledger
from transport.messages import PROTOCOL_VERSION, BadMessage, Envelope, Identity, encode
from transport.protocol import Protocol
from transport.sockets import AT_ONCE, HANDSHAKE_FAILED, MORE, READABLE, WATCHED, open_socket
from transport.transfers import Delivery, Event, Missing, Send
from transport.zap import Gate

Record = Callable[[str, dict[str, Any]], None]

ROUNDS_AHEAD = 1000  # what says that it is of a later round than that does not get a line of its own in the ledger
BATCH = 64  # messages read from one socket before the others get their turn
REFUSALS_RECORDED = 100  # so that a stranger cannot fill the disk


class Loop(threading.Thread):
    """Runs until told to close. The peer's main thread gives `commands`, and reads what has a name without `_`."""

    def __init__(
        self,
        identity: Identity,
        protocol: Protocol,
        settings: TransportSection,
        bind: str,
        supervisor: str,
        record: Record,
        keys: Keys | None = None,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(name=f"transport of peer {identity.peer}", daemon=True)
        self.identity, self.protocol, self.settings = identity, protocol, settings
        self.bind, self.supervisor, self.record, self._keys = bind, supervisor, record, keys
        self._faults = faults
        self.endpoint: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
        self.inbox: queue.SimpleQueue[Delivery | Missing | None] = queue.SimpleQueue()
        self.orders: queue.SimpleQueue[control.Order | None] = queue.SimpleQueue()
        self.commands = Commands()
        self.stop_ordered = threading.Event()
        self.open_rounds: frozenset[int] = frozenset()
        self.submitted = 0
        self.blocks_wanted = False
        self.open_rounds_changed = threading.Condition()
        self.failure: BaseException | None = None
        self.ledger = Ledger()
        self.payload_received = 0
        self._sockets: list[zmq.Socket[bytes]] = []
        self._connections = Connections(identity.routing_id(), keys is not None)
        self._gate: Gate | None = None
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[zmq.Socket[bytes], int | None] = {}
        self._backlog = Backlog(protocol.neighbors, self._transmit)
        self._refusals = 0
        self._settle_by: float | None = None
        self._settled: Callable[[], None] = lambda: None
        self._closing = False
        self._next_tick = 0.0

    def run(self) -> None:
        context = zmq.Context(io_threads=1)
        context.max_sockets = 3 * len(self.protocol.neighbors) + 64  # a DEALER and the two ends of its monitor
        try:
            self._open(context)
            while not self._closing:
                self._turn()
        except BaseException as error:
            self.failure = error
            self.endpoint.put(error)
            self.inbox.put(None)
            self.orders.put(None)
        finally:
            self._close(context)
            self.commands.close()
            with self.open_rounds_changed:
                self.open_rounds_changed.notify_all()

    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._control = self._socket(context, zmq.DEALER)
        self._control.setsockopt(zmq.ROUTING_ID, self.identity.routing_id())
        # The first words may come before the connection, and the last ones just before the end.
        self._control.setsockopt(zmq.IMMEDIATE, 0)
        self._control.setsockopt(zmq.LINGER, 2000)
        self._control.setsockopt(zmq.MAXMSGSIZE, -1)
        self._control.connect(self.supervisor)
        self._router = self._socket(context, zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.IPV6, int("[" in self.bind))
        self._poller = zmq.Poller()
        for readable in (self._router, self._control, self.commands.fileno()):
            self._poller.register(readable, zmq.POLLIN)
        if self._keys is not None:
            self._gate = Gate(self._keys, self._socket(context, zmq.REP))
            self._gate.guard(self._router)
            self._poller.register(self._gate.handler, zmq.POLLIN)
        self._watch(self._router, None)
        self._router.bind(self.bind)
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._gate is not None:
            self._gate.try_out(self._socket(context, zmq.DEALER), endpoint, next(iter(self._monitors)))
        self.endpoint.put(endpoint)

    def _close(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        for opened in self._sockets:
            opened.disable_monitor()  # before the monitor is closed: the other order can hang
        for monitor in self._monitors:
            monitor.close(linger=0)
        for opened in self._sockets:
            opened.close()
        context.term()

    def _socket(self, context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
        opened = open_socket(context, kind, self.settings.piece_bytes)
        self._sockets.append(opened)
        return opened

    def _watch(self, watched: zmq.Socket[bytes], neighbor: int | None) -> None:
        monitor = watched.get_monitor_socket(WATCHED)
        self._monitors[monitor] = neighbor
        self._poller.register(monitor, zmq.POLLIN)

    def connect(self, now: float, endpoints: dict[int, str]) -> None:
        """Open a DEALER to each neighbor this peer sends to; one that is not there will be judged dead."""
        self.protocol.meet(now)
        for neighbor in sorted(self.protocol.sends_to & endpoints.keys()):
            dealer = self._socket(self._context, zmq.DEALER)
            dealer.setsockopt(zmq.ROUTING_ID, self.identity.routing_id())
            self._dealers[neighbor] = dealer
            self._watch(dealer, neighbor)
            self._poller.register(dealer, zmq.POLLIN)
            dealer.setsockopt(zmq.IPV6, int("[" in endpoints[neighbor]))
            if self._gate is not None:
                self._gate.unlock(dealer, neighbor)
            dealer.connect(endpoints[neighbor])

    def enter(self, now: float, number: int) -> None:
        """The peer begins an exchange."""
        self.protocol.enter(now, number)
        self._pace(self._dealers)

    def _pace(self, neighbors: Iterable[int]) -> None:
        if self._faults is not None:
            for neighbor in neighbors:
                self._connections.pace(neighbor, self._faults.rate(neighbor, self.protocol.round))

    def submit(self, now: float, snapshots: Mapping[int, Snapshot]) -> None:
        """Offer snapshots to neighbors."""
        self.protocol.submit(now, snapshots)
        with self.open_rounds_changed:
            again = self.protocol.round in self.open_rounds
            self.submitted, self.open_rounds = self.submitted + 1, self.protocol.open_rounds
            if again:  # now there is one less underway than the peer had to assume
                self.open_rounds_changed.notify_all()

    def settle(self, now: float, settled: Callable[[], None]) -> None:
        """Say goodbye, wait for the neighbors' goodbyes, and compare every connection with the kernel."""
        self.protocol.leave()
        self._settle_by = now + self.settings.drain_s
        self._settled = settled

    def close(self, _: float) -> None:
        self._closing = True

    def report(self, report: control.Report) -> None:
        """Tell the supervisor. It reads all the time; were it stuck, the loop must not be."""
        if isinstance(report, control.Round):
            self.report(self._progress())
        try:
            self._control.send(control.encode(report), zmq.DONTWAIT)
        except zmq.Again:
            self.record("refused", {"source": "supervisor", "reason": "does not read its control socket"})

    def _turn(self) -> None:
        now = time.monotonic()
        wake_at = self._next_tick if self._faults is None else min(self._next_tick, self._faults.due())
        pause = max(0.0, wake_at - now)
        if self._settle_by is not None or self._backlog:
            pause = min(pause, 0.01)
        self.blocks_wanted = self.protocol.receiver.blocks_wanted
        if not self.commands.may_sleep():
            pause = 0.0
        ready = {source for source, _ in self._poller.poll(math.ceil(pause * 1e3))}
        if self._gate is not None and self._gate.handler in ready:
            for address in self._gate.answer():
                self._refuse(address, "its key is no member's")
        if spoken := [monitor for monitor in self._monitors if monitor in ready]:
            self._read_monitors(spoken)
        if self.commands.carry_out(self.commands.fileno() in ready):
            self.dispatch()
        if self._router in ready:
            self._read(self._router, None)
        for neighbor, dealer in self._dealers.items():
            if dealer in ready:
                self._read(dealer, neighbor)
        if self._control in ready:
            self._read_control()
        self._backlog.flush()
        now = time.monotonic()
        for arrived in self._faults.release(now) if self._faults is not None else ():
            self._hand_over(now, arrived)
        if now >= self._next_tick:
            self._next_tick = self.protocol.tick(now)
            self.dispatch()
            self.report(self._progress())
        if self._settle_by is not None:
            self._try_to_settle(now)

    def _progress(self) -> control.Progress:
        awaited = sorted(self.protocol.awaited)
        return control.Progress(self.protocol.round, awaited, self.payload_received, self.ledger.stream)

    def _read_control(self) -> None:
        for _ in range(BATCH):
            try:
                order = control.decode_order(self._control.recv(zmq.DONTWAIT))
            except zmq.Again:
                return
            if isinstance(order, control.Stop):
                self.stop_ordered.set()
                self.inbox.put(None)
                with self.open_rounds_changed:
                    self.open_rounds_changed.notify_all()
            self.orders.put(order)

    def _read_monitors(self, monitors: Iterable[zmq.Socket[bytes]]) -> None:
        for monitor in monitors:
            neighbor = self._monitors[monitor]
            while monitor.poll(0):
                event = recv_monitor_message(monitor)
                descriptor = int(event["value"])
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._connections.accepted(descriptor)
                elif event["event"] == zmq.EVENT_CONNECTED and neighbor is not None:
                    self._connections.connected(neighbor, descriptor)
                    self._pace([neighbor])
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    self._disconnected(descriptor)
                elif neighbor is not None and event["event"] & HANDSHAKE_FAILED:
                    self._refuse(
                        neighbor, "the handshake failed: it has not the key it should have, or does not know ours"
                    )
        self.dispatch()

    def _disconnected(self, descriptor: int) -> None:
        if connection := self._connections.closed(descriptor):
            self.protocol.disconnected(time.monotonic(), connection.neighbor)
        else:
            self._refuse("unknown", "its connection ended before a message said whose it is")

    def _read(self, readable: zmq.Socket[bytes], dealer_of: int | None) -> None:
        for _ in range(BATCH):
            if not int(readable.getsockopt(zmq.EVENTS)) & READABLE:
                return
            self._read_message(readable, dealer_of)  # and let go of it before the next: its memory is used again

    def _read_message(self, readable: zmq.Socket[bytes], dealer_of: int | None) -> None:
        frames = [readable.recv(AT_ONCE, copy=False)]
        while frames[-1].more:
            frames.append(readable.recv(AT_ONCE, copy=False))
        now = time.monotonic()
        routing_id = b"" if dealer_of is not None else frames.pop(0).bytes
        descriptor = int(frames[0].get("__fd"))
        if not self._connections.knows(descriptor):
            self._read_monitors(self._monitors)  # that it was opened, or closed, is not read yet
        size = message_bytes(frames, self._gate is not None)
        self._connections.received(descriptor, size)
        try:
            envelope, body = open_message(frames, self.identity.run, self.protocol.neighbors)
            if self._gate is not None and dealer_of is None:
                check_key(envelope, frames[0])
            check_sender(envelope, routing_id, dealer_of)
        except BadMessage as error:
            self._refuse(routing_id.decode(errors="backslashreplace") or str(dealer_of), str(error))
            if self._gate is not None and isinstance(error, Impersonation):
                self._gate.ban(frames[0])
                cut([descriptor, *self._connections.of(error.claimed)])
            return
        self._connections.identify(descriptor, envelope.source, routing_id)
        self.ledger.heard(envelope.source, envelope.message, size, self.protocol.round + ROUNDS_AHEAD)
        arrived = Arrived(envelope.source, envelope.incarnation, envelope.message, body)
        if self._faults is None:
            self._hand_over(now, arrived)
        else:
            number = self.protocol.number_of(envelope.source, envelope.message)
            for heard in self._faults.arrive(now, number, arrived):
                self._hand_over(now, heard)
        if not self._connections.knows(descriptor):  # the last words of a connection that has ended
            self.protocol.disconnected(now, envelope.source)
            self.dispatch()

    def _hand_over(self, now: float, arrived: Arrived) -> None:
        body = arrived.body
        checksum = xxhash.xxh3_64_intdigest(body) if body is not None else 0
        self.protocol.receive(now, arrived.source, arrived.incarnation, arrived.message, body, checksum)
        self.dispatch(arrived.held_s)

    def _refuse(self, source: int | str, reason: str) -> None:
        self._refusals += 1
        if self._refusals <= REFUSALS_RECORDED:
            self.record("refused", {"source": source, "reason": reason})

    def dispatch(self, held_s: float = 0.0) -> None:
        """Act on what the protocol says, on account of a message that was held back for so long."""
        outputs = self.protocol.take()
        if not outputs:
            return
        ended = False
        for output in outputs:
            match output:
                case Send():
                    self._backlog.send(output)
                case Delivery():
                    output.verified = time.monotonic()
                    output.injected = held_s
                    self.payload_received += output.layout.bytes
                    self.inbox.put(output)
                case Missing():
                    self.record("missing", {"round": output.round, "sender": output.sender, "reason": output.reason})
                    self.inbox.put(output)
                case Event(name="acknowledged", facts=facts):
                    self.ledger.acknowledged(facts["receiver"], facts["payload"])
                    ended = True
                case Event(name="refused", facts=facts):
                    self._refuse(facts["source"], facts["reason"])
                case Event(name=name, facts=facts):
                    self.record(name, facts)
                    ended = ended or name == "undelivered"
        if ended:
            with self.open_rounds_changed:
                self.open_rounds = self.protocol.open_rounds
                self.open_rounds_changed.notify_all()

    def _transmit(self, send: Send) -> bool:
        """Hand a message to its socket; False when the socket cannot take it now."""
        dealer = None if send.reply else self._dealers.get(send.to)
        connection = (self._connections.inward if dealer is None else self._connections.outward).get(send.to)
        if connection is None or connection.closed:
            # A DEALER is opened again. An answer goes back on the connection that asked, or nowhere: it will ask again.
            return dealer is None
        me = self.identity
        header = encode(Envelope(PROTOCOL_VERSION, me.run, me.peer, me.incarnation, send.message))
        frames: list[bytes | memoryview] = [header] if send.body is None else [header, send.body]
        writable = self._router if dealer is None else dealer
        try:
            if dealer is None:
                writable.send(connection.routing_id, MORE)
            if send.body is None:
                writable.send(header, AT_ONCE)
            else:
                writable.send(header, MORE)
                writable.send(send.body, AT_ONCE, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return True  # the connection is gone; the protocol asks again or gives up
        size = message_bytes(frames, self._gate is not None)
        connection.stream_out += size
        self.ledger.sent(send, size)
        return True

    def _try_to_settle(self, now: float) -> None:
        assert self._settle_by is not None
        goodbyes = all(neighbor.gone for neighbor in self.protocol.neighbors.values())
        agreed = [connection.read_kernel() for connection in self._connections.all]
        if (goodbyes and not self._backlog and all(agreed)) or now > self._settle_by:
            for connection in self._connections.all:
                self.record("connection", connection.facts())
            for event, facts in self.ledger.lines():
                self.record(event, facts)
            self._settle_by = None
            self._settled()
