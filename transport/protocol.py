"""Delivery along a peer's edges, exactly once or reported missing; no socket, clock, thread or randomness inside.

Commands, messages and ticks go in, each with the time; messages to send, deliveries and events come out of `take`. A
driver moves them over ZeroMQ (`transport.node`) or through a simulated network (`transport.simulated`).

    sender (transport.sending)    receiver (transport.receiving)
    Offer            ---------->  takes it when the round is open and a block is free
                     <----------  Credit (0: wait), Decline
    Piece, Piece ..  ---------->  checksum, copied into place
                     <----------  Credit .., Resend
                     <----------  Ack, once the whole snapshot is verified and handed over

Every wait ends: a neighbor is given up when it is dead, has left, has no more to offer for the round, or has been in
the round for longer than the round's deadline. Offers are repeated until answered; every repeat is answered with how
far things are.
"""

from collections.abc import Collection, Iterable, Mapping

from topology.sections import TransportSection
from transport.layout import Bytes, LayoutOf, Snapshot
from transport.liveness import DROPPED_A_STRIKE, STRIKES, Neighbor, State
from transport.messages import Ack, Beat, Credit, Decline, Leave, Message, Offer, Piece, Resend
from transport.receiving import Receiver
from transport.sending import Sender
from transport.transfers import Outbox, Output, Send


class Protocol:
    """One peer's end of all its edges. `layouts` says what each neighbor it hears from sends in a round."""

    def __init__(
        self,
        now: float,
        sends_to: Collection[int],
        layouts: Mapping[int, LayoutOf],
        settings: TransportSection,
        round_deadline_s: float,
    ) -> None:
        self._settings = settings
        self._round_deadline_s = round_deadline_s
        self._outbox = Outbox()
        self.sends_to = frozenset(sends_to)
        self.neighbors = {id: Neighbor(id) for id in sorted({*sends_to, *layouts})}
        self.sender = Sender(sends_to, self.neighbors, settings, round_deadline_s, self._outbox)
        self.receiver = Receiver(layouts, self.neighbors, settings, round_deadline_s, self._outbox)
        self._round_since = now
        self._beat_at = now
        self._due = now
        self._quiet = False

    @property
    def round(self) -> int:
        return self.receiver.round

    @property
    def awaited(self) -> Collection[int]:
        """The neighbors whose snapshot of this round is waited for."""
        return self.receiver.awaited.keys()

    @property
    def open_rounds(self) -> frozenset[int]:
        """The rounds of which a snapshot is still underway to a neighbor."""
        return frozenset(outgoing.round for outgoing in self.sender.transfers.values())

    # Commands of the peer.

    def meet(self, now: float) -> None:
        """All neighbors can speak from now on, so silence counts."""
        for neighbor in self.neighbors.values():
            neighbor.heard_at = min(neighbor.heard_at, now)

    def enter(self, now: float, round: int) -> None:
        """The peer begins a round; what was still awaited for an earlier one is void."""
        self._round_since = now
        self.receiver.enter(round)

    def submit(self, now: float, snapshots: Mapping[int, Snapshot]) -> None:
        """Offer this round's snapshots, each to its neighbor, once a round: who gets none now will not get one."""
        self.sender.offer(now, self.round, snapshots)

    def expect(self, now: float, senders: Iterable[int]) -> None:
        """Wait for this round's snapshots of these neighbors: each ends in a `Delivery` or a `Missing`."""
        self.receiver.expect(now, senders)

    def release(self, block: Bytes) -> None:
        """The reader is done with a delivered block, which makes room for the next snapshot."""
        self.receiver.release(block)

    def leave(self) -> None:
        """Say goodbye to every neighbor and fall silent."""
        self._quiet = True
        for neighbor in self.neighbors:
            self._outbox.put(Send(neighbor, Leave()))

    # What the network brings.

    def receive(
        self,
        now: float,
        source: int,
        incarnation: int,
        message: Message,
        body: memoryview | None = None,
        checksum: int = 0,
    ) -> None:
        """A message of a neighbor; for a piece, its bytes and the checksum computed from them as they arrived."""
        neighbor = self.neighbors[source]
        if neighbor.state == "banned":
            return
        if not neighbor.spend(now):
            self._count_dropped(neighbor)
            return
        if incarnation < neighbor.incarnation:
            reason = f"incarnation {incarnation} is over, {neighbor.incarnation} lives"
            self._outbox.note("refused", source=source, reason=reason)
            return
        if incarnation > neighbor.incarnation:
            if neighbor.incarnation >= 0:
                neighbor = self.neighbors[source] = neighbor.reborn()
                self._change(neighbor, "alive", f"began life {incarnation}")
                self.receiver.forget(source)
                self.sender.restart(source)
            neighbor.incarnation = incarnation
        neighbor.heard_at, neighbor.disconnected_at = now, None
        match message:
            case Beat():
                neighbor.follow(now, message)
                self.sender.follow(neighbor)
                self.receiver.follow(neighbor)
            case Offer():
                self.receiver.on_offer(source, message)
            case Piece():
                if body is None:
                    self._outbox.note("refused", source=source, reason="a piece without its bytes")
                else:
                    self.receiver.on_piece(now, source, message, body, checksum)
            case Credit() | Resend() | Ack() | Decline():
                self.sender.on_answer(now, source, message)
            case Leave():
                self._change(neighbor, "left", "said goodbye")
        if neighbor.strikes >= STRIKES:
            self._ban(neighbor)
        self._judge(now, neighbor)

    def number_of(self, source: int, message: Message) -> int:
        """The round that a neighbor's message is about: of its snapshot or of mine, else the one that I am in."""
        match message:
            case Beat(round=round) | Offer(round=round):
                return round
            case Piece(sequence=sequence):
                incoming = self.receiver.transfers.get((source, sequence))
                return self.round if incoming is None else incoming.offer.round
            case (
                Credit(sequence=sequence)
                | Resend(sequence=sequence)
                | Ack(sequence=sequence)
                | Decline(sequence=sequence)
            ):
                outgoing = self.sender.transfers.get((source, sequence))
                return self.round if outgoing is None else outgoing.round
            case Leave():
                return self.round

    def disconnected(self, now: float, neighbor: int) -> None:
        """A connection to or from a neighbor closed: suspicious, not yet proof."""
        known = self.neighbors[neighbor]
        if known.disconnected_at is None:
            known.disconnected_at = now
            self._judge(now, known)

    def tick(self, now: float) -> float:
        """Do what is due; returns when to tick again at the latest."""
        asleep = max(0.0, now - self._due)
        for neighbor in self.neighbors.values():
            # What a peer could not hear because it was itself frozen is not its neighbors' silence.
            if neighbor.heard_at < now:
                neighbor.heard_at = min(neighbor.heard_at + asleep, now)
            self._judge(now, neighbor)
        self.sender.push(now)
        self.receiver.give_up(now)
        if now >= self._beat_at:
            self._beat_at = now + self._settings.beat_s
            if not self._quiet:
                in_round = max(0.0, now - self._round_since)
                for id in self.neighbors:
                    self._outbox.put(Send(id, Beat(self.round, self.sender.offers_from(id, self.round), in_round)))
        self._due = min(self._beat_at, self.sender.due())
        return self._due

    def take(self) -> list[Output]:
        """Everything that came out since the last call, in order."""
        return self._outbox.take()

    def _count_dropped(self, neighbor: Neighbor) -> None:
        if neighbor.dropped % DROPPED_A_STRIKE == 1:  # so that a flood does not fill the disk
            self.receiver.strike(neighbor.id, f"says too much: {neighbor.dropped} messages dropped so far")
            if neighbor.strikes >= STRIKES:
                self._ban(neighbor)

    def _ban(self, neighbor: Neighbor) -> None:
        self._change(neighbor, "banned", f"said {neighbor.strikes} times what no correct peer says")

    def _judge(self, now: float, neighbor: Neighbor) -> None:
        state, reason = neighbor.judge(now, self._settings, self._round_deadline_s)
        if state != neighbor.state:
            self._change(neighbor, state, reason)

    def _change(self, neighbor: Neighbor, state: State, reason: str) -> None:
        neighbor.state, neighbor.reason = state, reason
        self._outbox.note("link", neighbor=neighbor.id, state=state, reason=reason)
