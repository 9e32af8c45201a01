"""Draws a run: a drawing takes a Run and returns a figure, or None when the run has nothing to show there."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from launch import units
from launch.journals import Event
from launch.results import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by the colour-blind.
BLUE, ORANGE, GREEN, SKY = "#0072B2", "#E69F00", "#009E73", "#56B4E9"
VERMILION, PURPLE, GREY, LIGHT = "#D55E00", "#CC79A7", "#767676", "#D9D9D9"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so a report looks the same everywhere
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "distill-swarm",
}
WIDTH_IN, DOTS_PER_INCH = 5.6, 200

MESSAGE_PARTS = {"queue": GREY, "wire": BLUE, "verify": GREEN, "injected": VERMILION, "inbox": ORANGE}
ROUND_PARTS = {
    "statistics": PURPLE,
    "teachers": BLUE,
    "train": GREEN,
    "evaluate": SKY,
    "send": ORANGE,
    "wait": LIGHT,
    "other": GREY,
}


@dataclass(frozen=True)
class Drawing:
    """One figure of the report: its file name, what it is called, and how to read it."""

    name: str
    title: str
    caption: str
    draw: Callable[[Run], "Figure | None"]


def render(drawing: Drawing, run: Run) -> bytes | None:
    """The drawing as PNG."""
    return to_png(lambda: drawing.draw(run))


def to_png(draw: "Callable[[], Figure | None]") -> bytes | None:
    """What is drawn, as PNG; nothing of matplotlib's global state is used or changed."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = draw()
        if figure is None:
            return None
        FigureCanvasAgg(figure)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=DOTS_PER_INCH, facecolor="white", metadata={"Software": None})
        return png.getvalue()


def blank(height_in: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in))


def count_on(axes: "Axes", axis: str) -> None:
    """Ticks on whole numbers only: rounds and peers have no halves."""
    from matplotlib.ticker import MaxNLocator

    getattr(axes, f"{axis}axis").set_major_locator(
        MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    )


def legend_above(axes: "Axes", columns: int, corner: Literal["lower left", "lower right"]) -> None:
    # Beside long tick labels an axes is narrow: ranged right, the legend has the whole figure's width.
    anchor = (float(corner == "lower right"), 1.01)
    legend = axes.legend(loc=corner, bbox_to_anchor=anchor, ncols=columns, borderaxespad=0.0)
    for line in legend.get_lines():
        line.set_alpha(1.0)  # what is faint among a hundred would not be seen alone


def draw_accuracy(run: Run) -> "Figure | None":
    """Accuracy over rounds: every peer thin, their mean bold."""
    summary = run.summary
    if not any(value is not None for value in summary["global_accuracy_by_round"]):
        return None
    figure = blank(3.9)
    axes = figure.subplots()
    by_peer: dict[int, list[tuple[int, float]]] = {}
    for event in run.journals.rounds:
        if event["global_accuracy"] is not None and event["peer"] != run.topology.coordinator:
            by_peer.setdefault(event["peer"], []).append((event["round"], event["global_accuracy"]))
    lost = {one["peer"] for one in summary["peers_lost"]}
    faint = 0.55 if len(by_peer) <= 20 else 0.2
    for number, (peer, points) in enumerate(sorted(by_peer.items())):
        who = "global, each peer" if run.topology.coordinator is None else "each client"
        label = who if number == 0 else None
        axes.plot(*zip(*sorted(points), strict=True), color=SKY, linewidth=0.7, alpha=faint, label=label)
        if peer in lost:
            first = not any(line.get_label() == "peer lost" for line in axes.lines)
            end = sorted(points)[-1]
            axes.plot(*end, "x", color="black", markersize=5, label="peer lost" if first else None, zorder=6)
    _plot_mean(axes, summary["local_accuracy_by_round"], "local, mean", ORANGE, "--")
    _plot_mean(axes, summary["validation_accuracy_by_round"], "validation, mean", GREEN, ":")
    if summary["global_accuracy_of"] == "coordinator":
        _plot_mean(axes, summary["client_accuracy_by_round"], "clients, mean", SKY, "-", width=2.0)
        _plot_mean(axes, teacher_accuracy(run), "teacher, public", PURPLE, "-.")
        _plot_mean(axes, summary["global_accuracy_by_round"], "coordinator", BLUE, "-", width=2.4)
    else:
        _plot_mean(axes, summary["global_accuracy_by_round"], "global, mean", BLUE, "-", width=2.4)
    if summary["selected_round"]:
        axes.plot(
            summary["selected_round"],
            summary["global_accuracy"],
            "o",
            color=BLUE,
            markeredgecolor="black",
            markersize=7,
            zorder=7,
            label=f"selected round {summary['selected_round']}",
        )
        axes.axvline(summary["selected_round"], color=GREY, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
    axes.set(xlabel="round", ylabel="accuracy (fraction correct)")
    axes.margins(x=0.02)
    axes.grid(axis="y", color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)
    count_on(axes, "x")
    legend_above(axes, 3, "lower left")
    return figure


def teacher_accuracy(run: Run) -> list[float | None]:
    """By round, how often the coordinator's teacher is right about the public samples, where it says so."""
    said = {
        event["round"]: event["method"]["teacher_accuracy"]
        for event in run.journals.rounds
        if "teacher_accuracy" in event["method"]
    }
    return [said.get(number) for number in range(1, max(said, default=0) + 1)]


def _plot_mean(
    axes: "Axes", by_round: Sequence[float | None], label: str, color: str, line: str, width: float = 1.6
) -> None:
    points = [(number, value) for number, value in enumerate(by_round, start=1) if value is not None]
    if points:
        marker = "o" if len(points) == 1 else None
        rounds, values = zip(*points, strict=True)
        axes.plot(
            rounds,
            values,
            line,
            color=color,
            linewidth=width,
            marker=marker,
            markersize=4,
            label=label,
            zorder=5,
        )


def draw_edge_bytes(run: Run) -> "Figure | None":
    """Payload per directed edge, sender by receiver."""
    if not run.journals.delivered:
        return None
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    peers = run.summary["peers"]
    megabytes = np.zeros((peers, peers))
    for event in run.journals.delivered:
        megabytes[event["sender"], event["peer"]] += event["payload"] / 1e6
    shown = np.ma.masked_equal(megabytes, 0.0)
    figure = blank(4.7)
    axes = figure.subplots()
    # The palest blues are left out, so that an edge with little on it is not taken for no edge.
    palette = ListedColormap(colormaps["Blues"](np.linspace(0.25, 1.0, 256)))
    mesh = axes.imshow(shown, cmap=palette, vmin=0.0, vmax=float(megabytes.max()), interpolation="nearest")
    figure.colorbar(mesh, ax=axes, label="payload delivered (MB)", shrink=0.85)
    if peers <= 12:
        for sender, receiver in zip(*np.nonzero(megabytes), strict=True):
            value = megabytes[sender, receiver]
            ink = "white" if value > 0.5 * megabytes.max() else "black"
            axes.text(receiver, sender, units.short(value), ha="center", va="center", fontsize=7, color=ink)
    axes.set(xlabel="receiver (peer)", ylabel="sender (peer)")
    count_on(axes, "x")
    count_on(axes, "y")
    return figure


def draw_latency(run: Run) -> "Figure | None":
    """How long messages took, and which of the five parts the time went into."""
    if not run.journals.delivered:
        return None
    from matplotlib.ticker import FuncFormatter, NullFormatter

    models = group_by_model(run)
    figure = blank(3.4 + 0.45 * len(models))
    top, bottom = figure.subplots(2, 1, height_ratios=(2.2, 0.5 + 0.3 * len(models)))

    floor_ms = 1e-3  # the journal's clock is not finer than this
    observed = np.maximum([event["observed_ms"] for event in run.journals.delivered], floor_ms)
    low, high = float(observed.min()) / 1.1, float(observed.max()) * 1.1
    top.hist(observed, bins=list(np.geomspace(low, high, 41)), color=SKY, edgecolor="white", linewidth=0.3)
    top.set_xscale("log")
    top.set_xticks(_log_ticks(low, high))
    top.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    top.xaxis.set_minor_formatter(NullFormatter())
    for name, line in (("p50", "-"), ("p95", "--"), ("p99", ":")):
        value = run.summary["latency_ms"][name]
        top.axvline(value, color="black", linewidth=1.1, linestyle=line, label=f"{name} {units.milliseconds(value)}")
    top.set(xlabel="observed time of a message (ms, log scale)", ylabel="messages", xlim=(low, high))
    count_on(top, "y")
    legend_above(top, 3, "lower right")

    lefts = np.zeros(len(models))
    for part, color in MESSAGE_PARTS.items():
        means = np.array([np.mean([event[f"{part}_ms"] for event in events]) for events in models.values()])
        if part != "injected" or means.any():
            bottom.barh(range(len(models)), means, left=lefts, color=color, height=0.65, label=part)
        lefts += means
    bottom.set_yticks(range(len(models)), [units.shorten(model) for model in models])
    bottom.set_ylim(len(models) - 0.5, -0.5)
    bottom.set(xlabel="mean time of a message (ms)", ylabel="sender's model")
    legend_above(bottom, 5, "lower right")
    return figure


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers within a range of any width, few enough to be written side by side."""
    steps: tuple[float, ...] = (1,)
    if high / low < 1000:
        steps = (1, 2, 5) if high / low > 4 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]


def group_by_model(run: Run) -> dict[str, list[Event]]:
    """The delivered messages by the sender's model, the eight most frequent models at most."""
    groups: dict[str, list[Event]] = {}
    for event in run.journals.delivered:
        model = run.journals.started.get(event["sender"], {}).get("model", "unknown")
        groups.setdefault(str(model), []).append(event)
    frequent = sorted(groups, key=lambda model: len(groups[model]), reverse=True)[:8]
    return {model: groups[model] for model in groups if model in frequent}


def draw_round_time(run: Run) -> "Figure | None":
    """What the mean round of each peer is made of."""
    trained = [event for event in run.journals.rounds if event["participates"]]
    if not trained:
        return None
    by_peer: dict[int, list[Event]] = {}
    for event in trained:
        by_peer.setdefault(event["peer"], []).append(event["seconds"])
    peers = sorted(by_peer)
    means = {
        part: np.array([np.mean([one.get(part, 0.0) for one in by_peer[peer]]) for peer in peers])
        for part in (*ROUND_PARTS, "total")
    }
    known = sum(means[part] for part in ROUND_PARTS)
    means["other"] = np.maximum(means["total"] - known, 0.0)
    figure = blank(3.7)
    axes = figure.subplots()
    bottoms = np.zeros(len(peers))
    width = 0.85 if len(peers) <= 30 else 1.0
    for part, color in ROUND_PARTS.items():
        if means[part].any():
            axes.bar(peers, means[part], bottom=bottoms, color=color, width=width, label=part)
        bottoms += means[part]
    axes.set(xlabel="peer", ylabel="mean time of a round (s)")
    axes.margins(x=0.01)
    count_on(axes, "x")
    legend_above(axes, 4, "lower left")
    return figure


DRAWINGS = (
    Drawing(
        "accuracy",
        "Accuracy over rounds",
        "Global: on the common test set. Local: on the test half of each peer's own held-out data, or, where nothing "
        "is held out, on test samples like its own. The selected round has the best mean validation accuracy, or is "
        "the last where nothing is held out or a coordinator is judged.",
        draw_accuracy,
    ),
    Drawing(
        "edge-bytes",
        "Bytes per edge",
        "Payload (tensor bytes handed to the method) that each receiver took from each sender in the whole "
        "run. White: nothing was delivered.",
        draw_edge_bytes,
    ),
    Drawing(
        "latency",
        "Latency of a message",
        "Observed: from the sender's hand-over to the receiver's method. Its five parts, averaged, add up to "
        "it; injected is delay that a fault rule added on purpose and no property of the network.",
        draw_latency,
    ),
    Drawing(
        "round-time",
        "Where the time of a round goes",
        "Averaged over the rounds a peer took part in. Wait: nothing to do but wait for neighbors.",
        draw_round_time,
    ),
)
