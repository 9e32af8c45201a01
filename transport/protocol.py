"""Delivery along a peer's edges, exactly once or reported missing; no socket, clock, thread or randomness inside.

Commands, messages and ticks go in, each with the time; messages to send, deliveries and events come out of `take`.
A driver moves them over ZeroMQ (`transport.node`) or through a simulated network (`transport.simulated`).

    sender                        receiver
    Offer            ---------->  takes it when the round is open and a block is free
                     <----------  Credit (0: wait), Decline
    Piece, Piece ..  ---------->  checksum, copied into place
                     <----------  Credit .., Resend
                     <----------  Ack, once the whole snapshot is verified and handed over

Every wait ends: a neighbor is given up when it is dead, has left, has no more to offer for the round, or has been
in the round for longer than the round's deadline. Offers are repeated until answered; every repeat is answered with
how far things are.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from topology.sections import TransportSection
from transport.layout import Bytes, Layout, Snapshot, digest_of
from transport.liveness import Neighbor
from transport.messages import Ack, Beat, Credit, Decline, Leave, Message, Offer, Piece, Resend
from transport.transfers import Delivery, Event, Incoming, Missing, Outgoing, Send

Output = Send | Delivery | Missing | Event

REMEMBERED = 256  # answered sequence numbers and rounds kept a neighbor; older ones cannot be on the wire any more
OFFERS_HELD = 8  # offers a neighbor may have waiting; a correct one never has more than three rounds open


class Protocol:
    """One peer's end of all its edges. `layouts` says what a snapshot of each neighbor it hears from looks like."""

    def __init__(
        self,
        now: float,
        sends_to: Collection[int],
        layouts: Mapping[int, Layout],
        settings: TransportSection,
        round_deadline_s: float,
    ) -> None:
        self.settings = settings
        self.round_deadline_s = round_deadline_s
        self.sends_to = frozenset(sends_to)
        self.layouts = dict(layouts)
        self.neighbors = {id: Neighbor(id, now) for id in sorted({*sends_to, *layouts})}
        self.round = 0
        self.round_since = now
        self.quiet = False
        self.outgoing: dict[tuple[int, int], Outgoing] = {}
        self.incoming: dict[tuple[int, int], Incoming] = {}
        self.awaited: dict[int, float] = {}
        self.given_up: set[int] = set()
        self.duplicates = 0
        self._outputs: deque[Output] = deque()
        self._next_sequence = dict.fromkeys(sorted(self.sends_to), 0)
        self._answered: dict[int, dict[int, Message]] = {id: {} for id in self.layouts}
        self._delivered: dict[int, dict[int, int]] = {id: {} for id in self.layouts}
        self._offered_through: dict[int, int] = dict.fromkeys(self.sends_to, 0)
        self._blocks_out = 0
        self._spare_blocks: list[Bytes] = []
        self._beat_at = now

    # Commands of the peer.

    def enter(self, now: float, round: int) -> None:
        """The peer begins a round; what was still awaited for an earlier one is void."""
        self.round, self.round_since = round, now
        self.awaited.clear()
        self.given_up.clear()
        for key, incoming in list(self.incoming.items()):
            if incoming.offer.round < round:
                self._discard(key)
                self._answer(incoming.sender, incoming.offer.sequence, self._stale())

    def submit(self, now: float, snapshot: Snapshot, receivers: Iterable[int]) -> None:
        """Offer this round's snapshot to neighbors."""
        for to in sorted(receivers):
            sequence = self._next_sequence[to]
            self._next_sequence[to] += 1
            outgoing = Outgoing(sequence, to, self.round, snapshot, now, now + self.settings.retry_s)
            self.outgoing[to, sequence] = outgoing
            self._send(to, outgoing.offer())
        for to in self.sends_to:
            self._offered_through[to] = self.round

    def expect(self, now: float, senders: Iterable[int]) -> None:
        """Wait for this round's snapshots of these neighbors: each ends in a `Delivery` or a `Missing`."""
        for sender in sorted(senders):
            if self.round not in self._delivered[sender]:
                self.awaited[sender] = now
        self._grant()
        self._give_up(now)

    def release(self, block: Bytes) -> None:
        """The reader is done with a delivered block, which makes room for the next snapshot."""
        self._recycle(block)
        self._grant()

    def leave(self) -> None:
        """Say goodbye to every neighbor and fall silent."""
        self.quiet = True
        for neighbor in self.neighbors:
            self._send(neighbor, Leave())

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
        if incarnation < neighbor.incarnation:
            self._event(
                "refused", source=source, reason=f"incarnation {incarnation} is over, {neighbor.incarnation} lives"
            )
            return
        if incarnation > neighbor.incarnation:
            if neighbor.incarnation >= 0:
                self._forget(source)
            neighbor.incarnation = incarnation
        neighbor.heard_at, neighbor.disconnected_at = now, None
        match message:
            case Beat():
                if message.round != neighbor.round:
                    neighbor.round, neighbor.round_since = message.round, now - min(message.seconds_in_round, now)
                neighbor.offers_from = message.offers_from
            case Offer():
                self._on_offer(source, message)
            case Piece():
                if body is None:
                    self._event("refused", source=source, reason="a piece without its bytes")
                else:
                    self._on_piece(now, source, message, body, checksum)
            case Credit() | Resend() | Ack() | Decline():
                self._on_answer(now, source, message)
            case Leave():
                neighbor.state = "left"
                self._event("link", neighbor=source, state="left", reason="said goodbye")
        self._judge(now, neighbor)

    def disconnected(self, now: float, neighbor: int) -> None:
        """A connection to or from a neighbor closed: suspicious, not yet proof."""
        known = self.neighbors[neighbor]
        if known.disconnected_at is None:
            known.disconnected_at = now
            self._judge(now, known)

    def tick(self, now: float) -> float:
        """Do what is due; returns when to tick again at the latest."""
        for neighbor in self.neighbors.values():
            self._judge(now, neighbor)
        for outgoing in list(self.outgoing.values()):
            self._push(now, outgoing)
        self._give_up(now)
        if now >= self._beat_at and not self.quiet:
            self._beat_at = now + self.settings.beat_s
            for id in self.neighbors:
                self._send(id, Beat(self.round, self._offers_from(id), max(0.0, now - self.round_since)))
        return min([self._beat_at, *(outgoing.probe_at for outgoing in self.outgoing.values())], default=now + 1.0)

    def take(self) -> list[Output]:
        """Everything that came out since the last call, in order."""
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    # The sender's half.

    def _on_answer(self, now: float, source: int, answer: Credit | Resend | Ack | Decline) -> None:
        outgoing = self.outgoing.get((source, answer.sequence))
        if outgoing is None:
            self.duplicates += 1
            return
        outgoing.attempts = 0
        outgoing.probed_at = None
        outgoing.probe_at = now + self.settings.retry_s
        match answer:
            case Credit(limit=limit):
                outgoing.parked = limit == 0
                outgoing.limit = min(max(outgoing.limit, limit), len(outgoing.snapshot.checksums))
                if outgoing.parked:
                    outgoing.probe_at = now + self.settings.retry_max_s
                while outgoing.sent < outgoing.limit:
                    self._send_piece(now, outgoing, outgoing.sent)
                    outgoing.sent += 1
            case Resend(indices=indices):
                # Among them may be pieces never sent, when the credit for them was what got lost.
                for index in [index for index in indices if index < len(outgoing.snapshot.checksums)]:
                    if index < outgoing.sent:
                        outgoing.resent_bytes += len(outgoing.snapshot.piece(index))
                    self._send_piece(now, outgoing, index)
                    outgoing.sent = max(outgoing.sent, index + 1)
                outgoing.limit = max(outgoing.limit, outgoing.sent)
            case Ack():
                self._settle(outgoing, None)
            case Decline(reason=reason):
                self._settle(outgoing, f"declined: {reason}")

    def _send_piece(self, now: float, outgoing: Outgoing, index: int) -> None:
        piece = Piece(outgoing.sequence, index, outgoing.snapshot.checksums[index], now)
        self._send(outgoing.to, piece, outgoing.snapshot.piece(index))

    def _push(self, now: float, outgoing: Outgoing) -> None:
        """Give up a transfer that is over, or ask again how it stands."""
        neighbor = self.neighbors[outgoing.to]
        entered = max(outgoing.submitted, neighbor.round_since)
        if neighbor.gone:
            self._settle(outgoing, f"neighbor is {neighbor.state}")
        elif neighbor.round > outgoing.round:
            self._settle(outgoing, f"neighbor went on to round {neighbor.round}")
        elif now - entered > self.round_deadline_s:
            self._settle(outgoing, f"not taken within {self.round_deadline_s:g} s")
        elif now >= outgoing.probe_at:
            # Only an answer that a talking neighbor owes is counted; silence is judged by liveness.
            if outgoing.probed_at is not None and neighbor.heard_at > outgoing.probed_at:
                outgoing.attempts += 1
            if outgoing.attempts >= self.settings.attempts:
                self._settle(outgoing, f"no answer to {outgoing.attempts} offers")
                return
            outgoing.probed_at = now
            wait = self.settings.retry_max_s if outgoing.parked else self.settings.retry_s * 2**outgoing.attempts
            outgoing.probe_at = now + min(wait, self.settings.retry_max_s)
            self._send(outgoing.to, outgoing.offer())

    def _settle(self, outgoing: Outgoing, reason: str | None) -> None:
        del self.outgoing[outgoing.to, outgoing.sequence]
        if reason is None:
            self._event(
                "acknowledged",
                receiver=outgoing.to,
                round=outgoing.round,
                payload=outgoing.snapshot.layout.bytes,
                retransmitted=outgoing.resent_bytes,
            )
        else:
            self._event("undelivered", receiver=outgoing.to, round=outgoing.round, reason=reason)

    def _offers_from(self, to: int) -> int:
        """The lowest round for which this neighbor may still get a snapshot from here."""
        if to not in self.sends_to:
            return self.round
        open_rounds = [outgoing.round for outgoing in self.outgoing.values() if outgoing.to == to]
        following = self.round if self._offered_through[to] < self.round else self.round + 1
        return min(open_rounds, default=following)

    # The receiver's half.

    def _on_offer(self, source: int, offer: Offer) -> None:
        if source not in self.layouts:
            self._event("refused", source=source, reason="an offer along an edge that is not there")
            return
        answered = self._answered[source].get(offer.sequence)
        if answered is not None:
            self.duplicates += 1
            self._send(source, answered, reply=True)
            return
        incoming = self.incoming.get((source, offer.sequence))
        if incoming is not None:
            absent = incoming.absent()[:64] if incoming.block is not None else []
            answer = Resend(offer.sequence, absent) if absent else Credit(offer.sequence, incoming.limit)
            self._send(source, answer, reply=True)
            return
        refusal = self._refusal(source, offer)
        if refusal is not None:
            self._answer(source, offer.sequence, Decline(offer.sequence, refusal))
            return
        self.incoming[source, offer.sequence] = Incoming(source, offer, self.layouts[source])
        self._grant()
        if self.incoming[source, offer.sequence].block is None:
            self._send(source, Credit(offer.sequence, 0), reply=True)

    def _refusal(self, source: int, offer: Offer) -> str | None:
        layout = self.layouts[source]
        expected = (layout.hash, layout.bytes, layout.pieces(self.settings.piece_bytes))
        held = [other.offer for (sender, _), other in self.incoming.items() if sender == source]
        known = {other.round: other.digest for other in held} | self._delivered[source]
        if (offer.layout, offer.bytes, offer.pieces) != expected:
            self._event("refused", source=source, reason="its snapshot has not the layout of its model")
            return "layout"
        if offer.round in known:
            if known[offer.round] != offer.digest:
                self._event("refused", source=source, reason=f"two different snapshots for round {offer.round}")
                return "equivocation"
            return "duplicate"
        if offer.round < self.round or (offer.round == self.round and source in self.given_up):
            self._event("late", sender=source, round=offer.round)
            return self._stale().reason
        return "busy" if len(held) >= OFFERS_HELD else None

    def _stale(self) -> Decline:
        return Decline(0, f"stale: this peer is in round {self.round}")

    def _grant(self) -> None:
        """Give blocks to offers of this round, in the order of arrival, as long as there are blocks."""
        for incoming in self.incoming.values():
            if self._blocks_out >= self.settings.concurrent:
                return
            wanted = incoming.offer.round == self.round and incoming.sender in self.awaited
            if wanted and incoming.block is None:
                incoming.accept(self._block(incoming.layout.bytes), self.settings.window)
                self._send(incoming.sender, Credit(incoming.offer.sequence, incoming.limit), reply=True)

    def _on_piece(self, now: float, source: int, piece: Piece, body: memoryview, checksum: int) -> None:
        incoming = self.incoming.get((source, piece.sequence))
        if incoming is None or incoming.block is None or piece.index >= incoming.limit:
            self.duplicates += 1
            return
        if incoming.checksums[piece.index] is not None:
            self.duplicates += 1
            incoming.repeats += 1
            return
        size = self.settings.piece_bytes
        start, end = piece.index * size, min((piece.index + 1) * size, incoming.layout.bytes)
        if checksum != piece.checksum or len(body) != end - start:
            self._event("damaged", sender=source, round=incoming.offer.round, piece=piece.index)
            self._send(source, Resend(piece.sequence, [piece.index]), reply=True)
            return
        incoming.block[start:end] = np.frombuffer(body, dtype=np.uint8)
        incoming.checksums[piece.index] = checksum
        incoming.received += 1
        incoming.first_sent = min(incoming.first_sent, piece.sent)
        if incoming.received == incoming.offer.pieces:
            self._complete(now, incoming)
        else:
            # Credit goes out in halves of the window, so that the sender never runs dry and acknowledgements stay few.
            limit = min(incoming.received + self.settings.window, incoming.offer.pieces)
            if limit - incoming.limit >= max(1, self.settings.window // 2):
                incoming.limit = limit
                self._send(source, Credit(piece.sequence, limit), reply=True)

    def _complete(self, now: float, incoming: Incoming) -> None:
        offer, source = incoming.offer, incoming.sender
        del self.incoming[source, offer.sequence]
        assert incoming.block is not None
        checksums = tuple(checksum for checksum in incoming.checksums if checksum is not None)
        if digest_of(checksums) != offer.digest:
            self._recycle(incoming.block)
            self._event("refused", source=source, reason=f"round {offer.round}: the pieces are not what was offered")
            self._answer(source, offer.sequence, Decline(offer.sequence, "digest"))
            self._grant()
            return
        self._outputs.append(
            Delivery(
                source,
                offer.round,
                incoming.layout,
                incoming.block,
                offer.digest,
                offer.pieces,
                incoming.repeats,
                offer.submitted,
                incoming.first_sent,
                now,
            )
        )
        self.awaited.pop(source, None)
        self._remember(self._delivered[source], offer.round, offer.digest)
        self._answer(source, offer.sequence, Ack(offer.sequence))

    def _give_up(self, now: float) -> None:
        for sender, since in list(self.awaited.items()):
            neighbor = self.neighbors[sender]
            offered = any(key[0] == sender and held.offer.round == self.round for key, held in self.incoming.items())
            if neighbor.gone:
                reason = f"neighbor is {neighbor.state}: {neighbor.judge(now, self.settings, self.round_deadline_s)[1]}"
            elif neighbor.offers_from > self.round and not offered:
                reason = f"neighbor is in round {neighbor.round} and offers nothing older"
            elif now - max(since, neighbor.round_since) > self.round_deadline_s:
                reason = f"not here within {self.round_deadline_s:g} s"
            else:
                continue
            del self.awaited[sender]
            self.given_up.add(sender)
            for key, held in list(self.incoming.items()):
                if key[0] == sender and held.offer.round <= self.round:
                    self._discard(key)
                    self._answer(sender, key[1], self._stale())
            self._outputs.append(Missing(sender, self.round, reason))
            self._grant()

    def _discard(self, key: tuple[int, int]) -> None:
        incoming = self.incoming.pop(key)
        if incoming.block is not None:
            self._recycle(incoming.block)

    def _block(self, size: int) -> Bytes:
        self._blocks_out += 1
        for index, spare in enumerate(self._spare_blocks):
            if spare.size == size:
                return self._spare_blocks.pop(index)
        return np.empty(size, dtype=np.uint8)

    def _recycle(self, block: Bytes) -> None:
        """Keep a block for reuse: fresh pages cost more than the copy into them."""
        self._blocks_out -= 1
        self._spare_blocks = [block, *self._spare_blocks][: self.settings.concurrent]

    # Both halves.

    def _forget(self, source: int) -> None:
        """A neighbor began a new life: what its old one had in flight is void, what was for it is offered anew."""
        neighbor = self.neighbors[source]
        neighbor.state, neighbor.round, neighbor.offers_from = "alive", 0, 0
        for key in [key for key in self.incoming if key[0] == source]:
            self._discard(key)
        if source in self.layouts:
            self._answered[source].clear()
        for outgoing in self.outgoing.values():
            if outgoing.to == source:
                outgoing.limit = outgoing.sent = outgoing.attempts = 0
                self._send(source, outgoing.offer())

    def _judge(self, now: float, neighbor: Neighbor) -> None:
        state, reason = neighbor.judge(now, self.settings, self.round_deadline_s)
        if state != neighbor.state:
            neighbor.state = state
            self._event("link", neighbor=neighbor.id, state=state, reason=reason)

    def _answer(self, to: int, sequence: int, answer: Ack | Decline) -> None:
        """A final answer: given now, and again whenever the same offer is repeated."""
        answer.sequence = sequence
        self._remember(self._answered[to], sequence, answer)
        self._send(to, answer, reply=True)

    def _remember(self, memory: dict[int, Any], key: int, value: Any) -> None:
        memory[key] = value
        if len(memory) > REMEMBERED:
            del memory[next(iter(memory))]

    def _send(self, to: int, message: Message, body: memoryview | None = None, reply: bool = False) -> None:
        self._outputs.append(Send(to, message, body, reply))

    def _event(self, name: str, **facts: object) -> None:
        self._outputs.append(Event(name, facts))
