"""What a person sees while a swarm runs: a table that stays in place on a terminal, plain lines elsewhere."""

import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from launch.supervisor import PeerState, View
from launch.units import fraction, megabytes
from peer.plan import Plan

ROWS = 24
"""Peers shown one by one; of a larger swarm, those that others wait for and the furthest behind come first."""


class QuietView(View):
    """Nothing but troubles."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def trouble(self, text: str) -> None:
        self._say(f"! {text}", style="red")

    def _say(self, text: str, style: str | None = None) -> None:
        # Lines stay whole, so that a log can be searched.
        self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


class PlainView(QuietView):
    """One line a round, once every living peer has finished it, and one for every trouble."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._rounds: defaultdict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
        self._peers: dict[int, PeerState] = {}
        self._said = 0

    def begin(self, plan: Plan, folder: Path) -> None:
        self._plan, self._began = plan, time.monotonic()
        swarm = plan.topology.swarm
        self._say(
            f"{swarm.name}: {swarm.peers} peers, {plan.topology.method.name} on {plan.data.name}, "
            f"{swarm.rounds} rounds, into {folder}"
        )

    def show(self, peers: dict[int, PeerState]) -> None:
        self._peers = peers
        living = {id for id, peer in peers.items() if peer.alive or (peer.phase == "ended" and not peer.reason)}
        while living and living <= self._rounds[self._said + 1].keys():
            self._said += 1
            self._finish(self._said, self._rounds.pop(self._said))

    def round(self, peer: PeerState, facts: dict[str, Any]) -> None:
        self._rounds[facts["round"]][peer.id] = facts

    def _finish(self, round: int, facts: dict[int, dict[str, Any]]) -> None:
        self._say(self._line(round, facts))

    def _line(self, round: int, facts: dict[int, dict[str, Any]]) -> str:
        payload = sum(peer.payload for peer in self._peers.values())
        absent = sum(len(fact["missing"]) for fact in facts.values())
        learners = [fact for peer, fact in facts.items() if peer != self._plan.coordinator]
        return (
            f"round {round:>3}/{self._plan.topology.swarm.rounds}  global {_mean(learners, 'global_accuracy')}  "
            + self._at_coordinator(facts)
            + (f"validation {_mean(learners, 'validation_accuracy')}  " if self._plan.topology.data.held_out else "")
            + (f"local {_mean(learners, 'local_accuracy')}  " if self._plan.topology.data.test == "dealt" else "")
            + f"received {megabytes(payload)}  {time.monotonic() - self._began:.1f} s"
            + (f"  missing {absent}" if absent else "")
        )

    def _at_coordinator(self, facts: dict[int, dict[str, Any]]) -> str:
        """What the coordinator knows of the method: its accuracy on the test set, else on the public samples."""
        at = facts.get(-1 if self._plan.coordinator is None else self._plan.coordinator, {})
        if at.get("global_accuracy") is not None:
            return f"coordinator {fraction(at['global_accuracy'])}  "
        teacher = at.get("method", {}).get("teacher_accuracy")
        return "" if teacher is None else f"teacher on public samples {fraction(teacher)}  "

    def end(self) -> None:
        return


def _mean(facts: list[dict[str, Any]], key: str) -> str:
    values = [fact[key] for fact in facts if fact[key] is not None]
    return fraction(fmean(values)) if values else "-"


class LiveView(PlainView):
    """The table of all peers: round, accuracy, bytes, and who is waiting for whom."""

    def begin(self, plan: Plan, folder: Path) -> None:
        super().begin(plan, folder)
        self._last = ""
        self._drawn_at = 0.0
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, peers: dict[int, PeerState]) -> None:
        super().show(peers)
        if time.monotonic() - self._drawn_at > 0.2:
            self._drawn_at = time.monotonic()
            self._live.update(self._table(peers), refresh=True)

    def _finish(self, round: int, facts: dict[int, dict[str, Any]]) -> None:
        self._last = self._line(round, facts)

    def _table(self, peers: dict[int, PeerState]) -> Table:
        table = Table(title=self._last or "starting", title_justify="left", expand=False)
        for column in ("peer", "model", "state", "round", "validation", "global", "received", "waits for"):
            table.add_column(column, justify="left" if column in ("model", "state", "waits for") else "right")
        awaited = {j for peer in peers.values() for j in peer.waiting_for}
        order = sorted(peers.values(), key=lambda peer: (peer.id not in awaited, peer.round, peer.id))
        shown = sorted(order[:ROWS], key=lambda peer: peer.id)
        for peer in shown:
            waits = ", ".join(map(str, peer.waiting_for[:8])) + (" …" if len(peer.waiting_for) > 8 else "")
            table.add_row(
                str(peer.id),
                self._plan.facts[peer.id].spec.name,
                (peer.reason and "lost") or peer.phase,
                str(min(peer.round, self._plan.topology.swarm.rounds)),
                fraction(peer.validation_accuracy),
                fraction(peer.global_accuracy),
                megabytes(peer.payload),
                waits,
                style="red" if peer.reason else None,
            )
        if len(peers) > len(shown):
            table.caption = f"and {len(peers) - len(shown)} more peers"
        return table

    def end(self) -> None:
        self._live.stop()
        if self._last:
            self._say(self._last)


def view_for(console: Console, quiet: bool) -> View:
    """The live table on a terminal, lines elsewhere, troubles alone when it is to be quiet."""
    if quiet:
        return QuietView(console)
    return LiveView(console) if console.is_terminal else PlainView(console)
