"""What was broken on purpose, as a report tells it: rules that never fired, and every fault on the run's timeline."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from launch import page, units
from launch.figures import (
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Drawing,
    blank,
    count_on,
    legend_above,
)
from launch.journals import read_faults
from launch.page import Html
from launch.results import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = (VERMILION, BLUE, ORANGE, GREEN, PURPLE, SKY, "#000000", GREY)
MARKERS = "oXsD^vP*"


def never_fired(run: Run) -> list[str]:
    """A sentence for each rule of the plan that nothing came of: whoever wrote it believes something else."""
    return [
        f"Fault {rule!r} never fired: this run says nothing about it."
        for rule, times in run.summary["faults"].items()
        if not times
    ]


def faults_fired(run: Run) -> Html:
    """A table of the plan: how often each rule fired, when, and whether its time was exact."""
    if not run.topology.fault:
        return Html("")
    by_rule: dict[str, list[dict[str, Any]]] = {fault.id: [] for fault in run.topology.fault}
    for line in read_faults(run.path):
        by_rule.setdefault(line["rule"], []).append(line)
    kinds = {fault.id: fault.kind for fault in run.topology.fault}
    rows = []
    for rule, lines in by_rule.items():
        rounds = {line["round"] for line in lines if line.get("round") is not None}
        injected = sum(line.get("injected_ms") or 0.0 for line in lines)
        rows.append(
            [
                rule,
                kinds.get(rule, "–"),
                f"{len(lines):,}" if lines else "never",
                units.ranges(rounds) if rounds else "–",
                f"{min(line['t'] for line in lines):.1f}" if lines else "–",
                f"{max(line['t'] for line in lines):.1f}" if lines else "–",
                units.milliseconds(injected) if injected else "–",
                "–" if not lines else "exact" if all(line["exact"] for line in lines) else "not exact",
            ]
        )
    headers = ["fault", "kind", "fired", "rounds", "first at s", "last at s", "injected", "when"]
    note = "Injected: delay added to messages, summed over them. Not exact: timed by seconds and not by the protocol."
    return page.join(
        [page.heading("Faults on purpose"), page.table(headers, rows, left=2), page.paragraph(note, quiet=True)]
    )


def draw_faults(run: Run) -> "Figure | None":
    """Every fault as it fired, at the peer it befell, over the rounds of all peers."""
    lines = read_faults(run.path)
    if not lines:
        return None
    peers = run.summary["peers"]
    figure = blank(1.6 + min(0.22 * peers, 4.4))
    axes = figure.subplots()
    for event in run.journals.rounds:
        axes.plot(2 * [event["t"]], [event["peer"] - 0.4, event["peer"] + 0.4], color=LIGHT, linewidth=0.8, zorder=1)
    fired = Counter(line["rule"] for line in lines)
    for number, rule in enumerate(run.summary["faults"]):
        of_rule = [line for line in lines if line["rule"] == rule]
        if of_rule:
            axes.plot(
                [line["t"] for line in of_rule],
                [_whom(line) for line in of_rule],
                MARKERS[number % len(MARKERS)],
                color=COLORS[number % len(COLORS)],
                markersize=4.5,
                alpha=1.0 if len(of_rule) <= 50 else 0.35,
                markeredgewidth=0,
                zorder=3,
                label=f"{rule} ({fired[rule]:,})",
            )
    axes.set(xlabel="time since the start (s)", ylabel="peer", ylim=(peers - 0.5, -0.5))
    axes.margins(x=0.02)
    count_on(axes, "y")
    legend_above(axes, 3, "lower left")
    return figure


def _whom(line: dict[str, Any]) -> int:
    return int(line["peer"] if line.get("receiver") is None else line["receiver"])


FAULTS = Drawing(
    "faults",
    "Faults on the timeline",
    "Each mark is a fault as it fired, beside the peer it befell (of a message, its receiver); in brackets how often. "
    "Grey strokes: a peer has finished a round.",
    draw_faults,
)
