"""A neighbor's life as a peer sees it: alive, suspect, stalled, dead, left or banned, judged by its own clock only."""

import math
from dataclasses import dataclass
from typing import Literal

from topology.sections import TransportSection
from transport.messages import Beat

STRIKES = 3
"""After that many messages that no correct peer sends, a neighbor is not listened to any more."""

BUDGET, BUDGET_PER_S = 1000.0, 500.0
"""Messages a neighbor may say at once, and in the long run, beside the pieces it is asked for and what it answers to
pieces. A correct one says some ten a second."""
DROPPED_A_STRIKE = 1000

State = Literal["alive", "suspect", "stalled", "dead", "left", "banned"]


@dataclass
class Neighbor:
    """One neighbor as seen from here. Times are seconds of this peer's monotonic clock."""

    id: int
    heard_at: float = math.inf  # nobody is silent who could not speak yet
    incarnation: int = -1
    state: State = "alive"
    reason: str = ""
    disconnected_at: float | None = None
    round: int = 0
    round_since: float = 0.0
    offers_from: int = 0
    strikes: int = 0
    budget: float = BUDGET
    budget_at: float = -math.inf
    dropped: int = 0

    @property
    def gone(self) -> bool:
        return self.state in ("dead", "left", "banned")

    def spend(self, now: float) -> bool:
        """Whether one more message of it is listened to."""
        if now > self.budget_at:
            self.budget = min(BUDGET, self.budget + BUDGET_PER_S * min(now - self.budget_at, 10.0))
            self.budget_at = now
        if self.budget < 1.0:
            self.dropped += 1
            return False
        self.budget -= 1.0
        return True

    def reborn(self) -> "Neighbor":
        """The same in a new life: only what it has done wrong goes with it."""
        return Neighbor(self.id, strikes=self.strikes, budget=self.budget, budget_at=self.budget_at)

    def earn(self) -> None:
        """It was sent a piece, or sent one that it was asked for: that is no word too much."""
        self.budget = min(BUDGET, self.budget + 1.0)

    def follow(self, now: float, beat: Beat) -> None:
        """Note where it is. A neighbor only moves forward: a beat that was overtaken changes nothing."""
        if beat.round > self.round:
            self.round, self.round_since = beat.round, now - min(beat.seconds_in_round, now)
        self.offers_from = max(self.offers_from, beat.offers_from)

    def judge(self, now: float, settings: TransportSection, round_deadline_s: float) -> tuple[State, str]:
        """The state this neighbor is in now, and why."""
        if self.state in ("left", "banned"):
            return self.state, self.reason
        silence = now - self.heard_at
        if self.disconnected_at is not None and now - self.disconnected_at > settings.disconnected_s:
            return "dead", f"its connection closed and was not opened again in {settings.disconnected_s:g} s"
        if silence > settings.dead_s:
            return "dead", f"silent for {silence:.1f} s"
        if silence > settings.suspect_s:
            return "suspect", f"silent for {silence:.1f} s"
        if self.disconnected_at is not None:
            return "suspect", "its connection closed"
        if self.round and now - self.round_since > round_deadline_s:
            return "stalled", f"in round {self.round} for {now - self.round_since:.1f} s"
        return "alive", "heard from"
