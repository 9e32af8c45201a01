"""The receiver's half: each neighbor's snapshot of a round is delivered exactly once or reported missing.

Memory is bounded by the reader, not by the neighbors: at most `concurrent` blocks are out at a time, and only an offer
that has a block gets credit.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np

from topology.sections import TransportSection
from transport.layout import Bytes, LayoutOf, digest_of
from transport.liveness import Neighbor
from transport.messages import Ack, Credit, Decline, Offer, Piece, Resend
from transport.transfers import Delivery, Incoming, Missing, Outbox

T = TypeVar("T")

REMEMBERED = 256  # answered sequence numbers and rounds kept a neighbor; older ones cannot be on the wire any more
OFFERS_HELD = 8  # offers a neighbor may have waiting; a correct one never has more than three rounds open
PIECES_ASKED_FOR = 64  # what fits into one Resend


class Blocks:
    """A number of blocks of memory, used again and again: fresh pages cost more than the copy into them."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._spare: list[Bytes] = []
        self.out = 0

    def left(self) -> bool:
        return self.free() > 0

    def free(self) -> int:
        return self._number - self.out

    def take(self, size: int) -> Bytes:
        self.out += 1
        for index, spare in enumerate(self._spare):
            if spare.size == size:
                return self._spare.pop(index)
        return np.empty(size, dtype=np.uint8)

    def give_back(self, block: Bytes) -> None:
        self.out -= 1
        self._spare = [block, *self._spare][: self._number]


class Receiver:
    """What a peer has underway from its neighbors. `layouts` says what each of them sends in a round."""

    def __init__(
        self,
        layouts: Mapping[int, LayoutOf],
        neighbors: Mapping[int, Neighbor],
        settings: TransportSection,
        round_deadline_s: float,
        outbox: Outbox,
    ) -> None:
        self._layouts = dict(layouts)
        self._neighbors = neighbors
        self._settings = settings
        self._round_deadline_s = round_deadline_s
        self._outbox = outbox
        self.round = 0
        self.transfers: dict[tuple[int, int], Incoming] = {}
        self.awaited: dict[int, float] = {}  # since when
        self._expected = False  # whether it is known who is awaited in this round
        self.blocks = Blocks(settings.concurrent)
        self._given_up: set[int] = set()
        self._answered: dict[int, dict[int, Ack | Decline]] = {id: {} for id in layouts}
        self._delivered: dict[int, dict[int, int]] = {id: {} for id in layouts}

    def enter(self, round: int) -> None:
        self.round = round
        self.awaited.clear()
        self._expected = False
        self._given_up.clear()
        self._drop([key for key, held in self.transfers.items() if held.offer.round < round])

    def expect(self, now: float, senders: Iterable[int]) -> None:
        self._expected = True
        for sender in sorted(senders):
            if self.round not in self._delivered[sender]:  # a snapshot may have come before its round
                self.awaited[sender] = now
        self.give_up(now)
        self._grant()

    def release(self, block: Bytes) -> None:
        self.blocks.give_back(block)
        self._grant()

    @property
    def blocks_wanted(self) -> bool:
        """Whether an offer waits."""
        return any(incoming.block is None for incoming in self.transfers.values())

    def on_offer(self, source: int, offer: Offer) -> None:
        if source not in self._layouts:
            self.strike(source, "an offer along an edge that is not there")
            return
        answered = self._answered[source].get(offer.sequence)
        if answered is not None:
            self._outbox.reply(source, answered)
            return
        incoming = self.transfers.get((source, offer.sequence))
        if incoming is None:
            refusal = self._refusal(source, offer)
            if refusal is not None:
                self._answer(source, Decline(offer.sequence, refusal))
                return
            layout = self._layouts[source](offer.round)
            incoming = self.transfers[source, offer.sequence] = Incoming(source, offer, layout)
            self._grant()  # or no answer: the offer comes again, and then it is told to wait
        else:
            self._tell_how_far(incoming, offer.sent)

    def on_piece(self, now: float, source: int, piece: Piece, body: memoryview, checksum: int) -> None:
        incoming = self.transfers.get((source, piece.sequence))
        if incoming is None or incoming.block is None or piece.index >= incoming.limit:
            return
        if incoming.checksums[piece.index] is not None:
            incoming.repeats += 1
            return
        size = self._settings.piece_bytes
        start, end = piece.index * size, min((piece.index + 1) * size, incoming.layout.bytes)
        if checksum != piece.checksum or len(body) != end - start:
            self._outbox.note("damaged", sender=source, round=incoming.offer.round, piece=piece.index)
            self._outbox.reply(source, Resend(piece.sequence, [piece.index]))
            return
        incoming.block[start:end] = np.frombuffer(body, dtype=np.uint8)
        self._neighbors[source].earn()
        incoming.checksums[piece.index] = checksum
        incoming.received += 1
        incoming.first_sent = min(incoming.first_sent, piece.sent)
        if incoming.received == incoming.offer.pieces:
            self._complete(now, incoming, incoming.block)
            return
        # Credit goes out in halves of the window, so that the sender never runs dry and acknowledgements stay few.
        limit, half = incoming.reach(self._settings.window), max(1, self._settings.window // 2)
        if limit - incoming.limit >= half or incoming.limit < limit == incoming.offer.pieces:
            incoming.limit = limit
            self._outbox.reply(source, Credit(piece.sequence, limit))

    def follow(self, neighbor: Neighbor) -> None:
        """A neighbor said where it is: what it withdrew is void; one on its way to the round gets its time in it."""
        withdrawn = [
            key
            for key, held in self.transfers.items()
            if held.sender == neighbor.id and held.offer.round < neighbor.offers_from
        ]
        for key in withdrawn:
            self._discard(key)
        if withdrawn:
            self._grant()
        if neighbor.id in self.awaited and neighbor.round <= self.round:
            self.awaited[neighbor.id] = max(self.awaited[neighbor.id], neighbor.round_since)

    def forget(self, source: int) -> None:
        """A neighbor began a new life: what its old one had in flight is void."""
        for key in [key for key in self.transfers if key[0] == source]:
            self._discard(key)
        if source in self._answered:
            self._answered[source].clear()
        self._grant()

    def give_up(self, now: float) -> None:
        """Report what will not come."""
        missing = {sender: reason for sender in self.awaited if (reason := self._why_not(now, sender)) is not None}
        for sender, reason in missing.items():
            del self.awaited[sender]
            self._given_up.add(sender)
            self._drop([k for k, held in self.transfers.items() if k[0] == sender and held.offer.round <= self.round])
            self._outbox.put(Missing(sender, self.round, reason))
        # What one that is gone sent ahead of its round would keep its block for nothing.
        void = [key for key in self.transfers if key[0] not in self.awaited and self._neighbors[key[0]].gone]
        for key in void:
            self._discard(key)
        if missing or void:
            self._grant()

    def _why_not(self, now: float, sender: int) -> str | None:
        neighbor = self._neighbors[sender]
        if neighbor.gone:
            return f"neighbor is {neighbor.state}: {neighbor.reason}"
        if neighbor.offers_from > self.round:
            return f"neighbor is in round {neighbor.round} and offers nothing older"
        if now - self.awaited[sender] > self._round_deadline_s:
            return f"not here within {self._round_deadline_s:g} s"
        return None

    def _refusal(self, source: int, offer: Offer) -> str | None:
        layout = self._layouts[source](offer.round)
        expected = (layout.hash, layout.bytes, layout.pieces(self._settings.piece_bytes))
        held = [other.offer for (sender, _), other in self.transfers.items() if sender == source]
        known = {other.round: other.digest for other in held} | self._delivered[source]
        if (offer.layout, offer.bytes, offer.pieces) != expected:
            self.strike(source, "its snapshot has not the layout of its model")
            return "layout"
        if offer.round in known:
            if known[offer.round] != offer.digest:
                self.strike(source, f"two different snapshots for round {offer.round}")
                return "equivocation"
            return "duplicate"
        if offer.round < self.round or (offer.round == self.round and source in self._given_up):
            self._outbox.note("late", sender=source, round=offer.round)
            return self._stale()
        return "busy" if len(held) >= OFFERS_HELD else None

    def _grant(self) -> None:
        """Give blocks to offers, in the order of arrival: of this round, and of the next with what this one leaves.

        So the next round's snapshots travel while the peer still learns; a block stays free while one may be needed.
        """
        waiting = [incoming for incoming in self.transfers.values() if incoming.block is None]
        for incoming in waiting:
            if not self.blocks.left():
                return
            if incoming.offer.round == self.round and incoming.sender in self.awaited:
                self._accept(incoming)
        ahead = [incoming for incoming in waiting if self._is_ahead(incoming)]
        if not ahead:
            return
        provided = {
            held.sender for held in self.transfers.values() if held.block is not None and not self._is_ahead(held)
        }
        reserved = min(1, len(self.awaited.keys() - provided)) if self._expected else 1
        for incoming in ahead:
            if self.blocks.free() <= reserved:
                return
            self._accept(incoming)

    def _is_ahead(self, incoming: Incoming) -> bool:
        return incoming.offer.round == self.round + 1

    def _accept(self, incoming: Incoming) -> None:
        incoming.accept(self.blocks.take(incoming.layout.bytes), self._settings.window)
        self._outbox.reply(incoming.sender, Credit(incoming.offer.sequence, incoming.limit))

    def _tell_how_far(self, incoming: Incoming, sent: int) -> None:
        self._outbox.reply(incoming.sender, Credit(incoming.offer.sequence, incoming.limit))
        lost = incoming.lost(sent)[:PIECES_ASKED_FOR]
        if lost:
            self._outbox.reply(incoming.sender, Resend(incoming.offer.sequence, lost))

    def _complete(self, now: float, incoming: Incoming, block: Bytes) -> None:
        offer, source = incoming.offer, incoming.sender
        checksums = tuple(checksum for checksum in incoming.checksums if checksum is not None)
        if digest_of(checksums) != offer.digest:
            self._discard((source, offer.sequence))
            self.strike(source, f"round {offer.round}: the pieces are not what was offered")
            self._answer(source, Decline(offer.sequence, "digest"))
            self._grant()
            return
        del self.transfers[source, offer.sequence]
        if offer.round == self.round:
            self.awaited.pop(source, None)
        self._outbox.put(
            Delivery(
                source,
                offer.round,
                incoming.layout,
                block,
                offer.digest,
                offer.pieces,
                incoming.repeats,
                offer.submitted,
                incoming.first_sent,
                now,
            )
        )
        _remember(self._delivered[source], offer.round, offer.digest)
        self._answer(source, Ack(offer.sequence))

    def _drop(self, keys: Iterable[tuple[int, int]]) -> None:
        """Let go of what came too late, and say so."""
        for sender, sequence in keys:
            self._discard((sender, sequence))
            self._answer(sender, Decline(sequence, self._stale()))

    def _discard(self, key: tuple[int, int]) -> None:
        block = self.transfers.pop(key).block
        if block is not None:
            self.blocks.give_back(block)

    def _stale(self) -> str:
        return f"stale: this peer is in round {self.round}"

    def _answer(self, to: int, answer: Ack | Decline) -> None:
        """A final answer: given now, and again whenever the same offer is repeated."""
        _remember(self._answered[to], answer.sequence, answer)
        self._outbox.reply(to, answer)

    def strike(self, source: int, reason: str) -> None:
        """Refuse what no correct peer says; it is counted."""
        self._neighbors[source].strikes += 1
        self._outbox.note("refused", source=source, reason=reason)


def _remember(memory: dict[int, T], key: int, value: T) -> None:
    memory[key] = value
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
