"""The sender's half: every snapshot offered to a neighbor ends acknowledged, declined or given up, with the reason."""

from collections.abc import Collection, Mapping

from topology.sections import TransportSection
from transport.layout import Snapshot
from transport.liveness import Neighbor
from transport.messages import Ack, Credit, Decline, Piece, Resend
from transport.transfers import Outbox, Outgoing, Send


class Sender:
    """What a peer has underway to its neighbors."""

    def __init__(
        self,
        sends_to: Collection[int],
        neighbors: Mapping[int, Neighbor],
        settings: TransportSection,
        round_deadline_s: float,
        outbox: Outbox,
    ) -> None:
        self._neighbors = neighbors
        self._settings = settings
        self._round_deadline_s = round_deadline_s
        self._outbox = outbox
        self.transfers: dict[tuple[int, int], Outgoing] = {}
        self._next_sequence = dict.fromkeys(sends_to, 0)
        self._offered_through = 0

    def offer(self, now: float, round: int, snapshots: Mapping[int, Snapshot]) -> None:
        pause = self._settings.retry_s
        for to, snapshot in sorted(snapshots.items(), key=lambda one: one[0]):
            sequence = self._next_sequence[to]
            self._next_sequence[to] += 1
            outgoing = Outgoing(sequence, to, round, snapshot, now, now, now + pause, pause)
            self.transfers[to, sequence] = outgoing
            self._outbox.put(Send(to, outgoing.offer()))
        self._offered_through = round

    def offers_from(self, to: int, round: int) -> int:
        """The lowest round for which this neighbor may still get a snapshot from here."""
        open_rounds = [outgoing.round for outgoing in self.transfers.values() if outgoing.to == to]
        return min(open_rounds, default=max(round, self._offered_through + 1))

    def on_answer(self, now: float, source: int, answer: Credit | Resend | Ack | Decline) -> None:
        outgoing = self.transfers.get((source, answer.sequence))
        if outgoing is None:
            return
        parked = isinstance(answer, Credit) and answer.limit == 0
        outgoing.attempts, outgoing.probed_at = 0, None
        outgoing.pause = self._settings.retry_max_s if parked else self._settings.retry_s
        outgoing.probe_at = now + outgoing.pause
        match answer:
            case Credit(limit=limit):
                outgoing.limit = min(max(outgoing.limit, limit), len(outgoing.snapshot.checksums))
                while outgoing.sent < outgoing.limit:
                    self._send_piece(now, outgoing, outgoing.sent)
                    outgoing.sent += 1
                    self._neighbors[source].earn()
            case Resend(indices=indices):
                for index in [index for index in indices if index < outgoing.sent]:
                    outgoing.resent_bytes += len(outgoing.snapshot.piece(index))
                    self._send_piece(now, outgoing, index, again=True)
            case Ack():
                self._settle(outgoing, None)
            case Decline(reason=reason):
                self._settle(outgoing, f"declined: {reason}")

    def follow(self, neighbor: Neighbor) -> None:
        """A neighbor said where it is: one still on its way to the round gets its time in it."""
        for outgoing in self.transfers.values():
            if outgoing.to == neighbor.id and neighbor.round <= outgoing.round:
                outgoing.since = max(outgoing.since, neighbor.round_since)

    def restart(self, to: int) -> None:
        """A neighbor began a new life, and knows nothing of what was underway to it."""
        for outgoing in self.transfers.values():
            if outgoing.to == to:
                outgoing.limit = outgoing.sent = outgoing.attempts = 0
                outgoing.probed_at = None
                self._outbox.put(Send(to, outgoing.offer()))

    def push(self, now: float) -> None:
        """Give up what is over, and ask again how the rest stands."""
        for outgoing in list(self.transfers.values()):
            neighbor = self._neighbors[outgoing.to]
            if neighbor.gone:
                self._settle(outgoing, f"neighbor is {neighbor.state}: {neighbor.reason}")
            elif now - outgoing.since > self._round_deadline_s:
                self._settle(outgoing, f"not taken within {self._round_deadline_s:g} s")
            elif now >= outgoing.probe_at:
                self._probe(now, outgoing, neighbor)

    def due(self) -> float:
        """When to push again at the latest."""
        return min((outgoing.probe_at for outgoing in self.transfers.values()), default=float("inf"))

    def _probe(self, now: float, outgoing: Outgoing, neighbor: Neighbor) -> None:
        # Only an answer that a talking neighbor owes is counted; silence is judged by liveness.
        if outgoing.probed_at is not None and neighbor.heard_at > outgoing.probed_at:
            outgoing.attempts += 1
        if outgoing.attempts >= self._settings.attempts:
            self._settle(outgoing, f"no answer to {outgoing.attempts} offers")
            return
        outgoing.probed_at = now
        outgoing.pause = min(2 * outgoing.pause, self._settings.retry_max_s)
        outgoing.probe_at = now + outgoing.pause
        self._outbox.put(Send(outgoing.to, outgoing.offer()))

    def _send_piece(self, now: float, outgoing: Outgoing, index: int, again: bool = False) -> None:
        piece = Piece(outgoing.sequence, index, outgoing.snapshot.checksums[index], now)
        self._outbox.put(Send(outgoing.to, piece, outgoing.snapshot.piece(index), again=again))

    def _settle(self, outgoing: Outgoing, reason: str | None) -> None:
        del self.transfers[outgoing.to, outgoing.sequence]
        if reason is None:
            self._outbox.note(
                "acknowledged",
                receiver=outgoing.to,
                round=outgoing.round,
                payload=outgoing.snapshot.layout.bytes,
                retransmitted=outgoing.resent_bytes,
            )
        else:
            self._outbox.note("undelivered", receiver=outgoing.to, round=outgoing.round, reason=reason)
