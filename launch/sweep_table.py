"""What a sweep came to: mean and standard error over seeds of each other combination, as a table and a figure."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from launch import units
from launch.compare import keep_whole
from launch.grid import Cell
from launch.results import load_summary
from launch.spread import mean_and_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEED = "swarm.seed"
MEASURES = {"global_accuracy": "global", "local_accuracy": "local", "payload_mb": "payload MB", "wall_s": "wall s"}


@dataclass(frozen=True)
class Line:
    """Cells alike but for their seed; only complete ones are in the means."""

    values: Mapping[str, str]
    runs: int
    measures: Mapping[str, tuple[float, float | None] | None]  # mean and standard error of each of MEASURES

    @property
    def label(self) -> str:
        return ", ".join(self.values.values()) or "all"


@dataclass(frozen=True)
class SweepTable:
    """All lines in the order of the grid, the status of every cell, and what was left out of the means."""

    lines: tuple[Line, ...]
    statuses: tuple[str, ...]
    notes: tuple[str, ...]

    def table(self) -> Table:
        """For a terminal; print it with crop=False."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for key in self.lines[0].values:
            table.add_column(key)
        for header in ("n", *(f"{header} ± s.e." for header in MEASURES.values())):
            table.add_column(header, justify="right")
        for line in self.lines:
            measured = [_write(name, pair) for name, pair in line.measures.items()]
            table.add_row(*map(escape, line.values.values()), str(line.runs), *measured)
        keep_whole(table)
        return table

    def write(self, folder: Path) -> None:
        """Write sweep.csv and sweep.png."""
        from launch.figures import to_png

        with (folder / "sweep.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            names = [part for name in MEASURES for part in (name, f"{name}_error")]
            writer.writerow([*self.lines[0].values, "runs", *names])
            for line in self.lines:
                pairs = [pair or (None, None) for pair in line.measures.values()]
                writer.writerow([*line.values.values(), line.runs, *(part for pair in pairs for part in pair)])
        png = to_png(self._draw)
        if png is not None:
            (folder / "sweep.png").write_bytes(png)

    def _draw(self) -> "Figure":
        """Local and global accuracy of each line, with its standard error."""
        from launch.figures import BLUE, ORANGE, blank, legend_above

        figure = blank(1.1 + 0.34 * len(self.lines))
        axes = figure.subplots()
        looks = (("local_accuracy", "local", ORANGE, "s", 0.12), ("global_accuracy", "global", BLUE, "o", -0.12))
        for name, label, color, marker, shift in looks:
            found = [(place, pair) for place, line in enumerate(self.lines) if (pair := line.measures[name])]
            axes.errorbar(
                [mean for _, (mean, _) in found],
                [place + shift for place, _ in found],
                xerr=[error or 0.0 for _, (_, error) in found],
                fmt=marker, color=color, label=label, capsize=3, markersize=5, linewidth=1.2,
            )  # fmt: skip
        axes.set_yticks(range(len(self.lines)), [units.shorten(line.label, 40) for line in self.lines])
        axes.set_ylim(len(self.lines) - 0.5, -0.5)
        axes.set_xlabel("accuracy, mean ± standard error over seeds")
        axes.set_ylabel(", ".join(self.lines[0].values))
        legend_above(axes, 2, "lower right")
        return figure


def tabulate(cells: Sequence[Cell]) -> SweepTable:
    """Read the summaries of all cells; one that left none has failed."""
    groups: dict[str, list[tuple[Cell, Mapping[str, Any] | None]]] = {}
    notes, statuses = [], []
    for cell in cells:
        summary = load_summary(cell.folder) if (cell.folder / "summary.json").is_file() else None
        status = summary["status"] if summary else "failed"
        statuses.append(status)
        if status != "complete":
            notes.append(f"{cell.name} is {status}: left out of the means.")
        values = {key: value for key, value in cell.values.items() if key != SEED}
        groups.setdefault(json.dumps(values), []).append((cell, summary if status == "complete" else None))
    lines = tuple(
        Line(json.loads(values), len(whole), _measure(whole))
        for values, group in groups.items()
        for whole in [[summary for _, summary in group if summary is not None]]
    )
    return SweepTable(lines, tuple(statuses), tuple(notes))


def _measure(summaries: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float | None] | None]:
    measured = [
        {
            "global_accuracy": summary["global_accuracy"],
            "local_accuracy": summary["local_accuracy"],
            "payload_mb": summary["bytes"]["payload"] / 1e6,
            "wall_s": summary["wall_s"],
        }
        for summary in summaries
    ]
    return {name: mean_and_error(one[name] for one in measured) for name in MEASURES}


def _write(name: str, pair: tuple[float, float | None] | None) -> str:
    if pair is None:
        return "–"
    shown = [
        units.fraction(value) if name.endswith("accuracy") else f"{value:,.2f}" for value in pair if value is not None
    ]
    return " ± ".join(shown)
