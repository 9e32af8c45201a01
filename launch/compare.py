"""Puts runs side by side: one row a run, means over seeds, and every setting in which the runs differ."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from launch import units
from launch.results import RunFolderError, load_summary, load_topology
from launch.settings import flatten
from launch.spread import mean_and_error
from topology import Topology

MEASURES = (
    "global_accuracy",
    "local_accuracy",
    "payload_mb",
    "stream_mb",
    "latency_p50_ms",
    "wall_s",
    "peak_rss_mb",
)
HEADERS = [
    *("run", "method", "seed", "status"),
    *("global", "local", "round", "payload MB", "stream MB", "latency p50 ms", "wall s", "peak MiB"),
]
WORDS = 4  # so many leading columns are words, not measurements


@dataclass(frozen=True)
class Row:
    """One run: what its summary says, in the units of the table."""

    run: str
    method: str
    seed: int
    status: str
    selected_round: int | None
    measures: Mapping[str, float | None]  # one entry for each of MEASURES


@dataclass(frozen=True)
class Mean:
    """Complete runs that differ in nothing but their seed: mean and standard error of each measure."""

    method: str
    seeds: tuple[int, ...]
    measures: Mapping[str, tuple[float, float] | None]


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, the means over seeds, and what a reader must know before comparing them."""

    rows: tuple[Row, ...]
    means: tuple[Mean, ...]
    notes: tuple[str, ...]

    def table(self) -> Table:
        """The table; print it with crop=False, for it folds and cuts nothing to fit a narrow window."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for place, header in enumerate(HEADERS):
            table.add_column(header, justify="left" if place < WORDS else "right")
        for row in self.rows:
            selected = "–" if row.selected_round is None else str(row.selected_round)
            values = [_write(name, value) for name, value in row.measures.items()]
            table.add_row(
                escape(row.run),
                escape(row.method),
                str(row.seed),
                row.status,
                *values[:2],
                selected,
                *values[2:],
            )
        for place, mean in enumerate(self.means):
            if place == 0:
                table.add_section()
            values = [
                "–" if pair is None else f"{_write(name, pair[0])}\n±{_write(name, pair[1])}"
                for name, pair in mean.measures.items()
            ]
            seeds = f"n = {len(mean.seeds)}"
            table.add_row("mean ± s.e.", escape(mean.method), seeds, "", *values[:2], "", *values[2:])
        keep_whole(table)
        return table


def keep_whole(table: Table) -> None:
    """Let no window, however narrow, cut or fold a cell; headers fold between words."""
    for column in table.columns:
        lines = [line for cell in column.cells for line in str(cell).splitlines()]
        column.min_width = max(map(len, [*lines, *str(column.header).split()]))


def compare(run_dirs: Sequence[str | Path]) -> Comparison:
    """Read the summaries and topology files of the folders and put them side by side, in the order given."""
    folders = [Path(run_dir) for run_dir in run_dirs]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise RunFolderError("the same run folder is given twice: name each run once.")
    plans = [load_topology(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    labels = [str(f) if names.count(name) > 1 else name for f, name in zip(folders, names, strict=True)]
    rows = [_read_row(label, folder) for label, folder in zip(labels, folders, strict=True)]
    means, left_out = _average(rows, plans)
    return Comparison(tuple(rows), tuple(means), (*left_out, *_list_differences(rows, plans)))


def _read_row(label: str, folder: Path) -> Row:
    summary = load_summary(folder)
    return Row(
        run=label,
        method=summary["method"],
        seed=summary["seed"],
        status=summary["status"],
        selected_round=summary["selected_round"],
        measures={
            "global_accuracy": summary["global_accuracy"],
            "local_accuracy": summary["local_accuracy"],
            "payload_mb": summary["bytes"]["payload"] / 1e6,
            "stream_mb": summary["bytes"]["stream"] / 1e6,
            "latency_p50_ms": summary["latency_ms"]["p50"],
            "wall_s": summary["wall_s"],
            "peak_rss_mb": summary["peak_rss_mb"],
        },
    )


def _average(rows: Sequence[Row], plans: Sequence[Topology]) -> tuple[list[Mean], list[str]]:
    """One mean for each set of runs alike but for the seed; a repeated seed would count as new evidence."""
    groups: dict[str, dict[int, Row]] = {}
    notes: list[str] = []
    for row, plan in zip(rows, plans, strict=True):
        settings = {key: value for key, value in flatten(plan).items() if key != "swarm.seed"}
        group = groups.setdefault(repr(sorted(settings.items())), {})
        if row.status != "complete":
            notes.append(f"{row.run} is {row.status}: left out of the means.")
        elif row.seed in group:
            notes.append(f"{row.run} repeats {group[row.seed].run} (same settings and seed): left out of the means.")
        else:
            group[row.seed] = row
    means = [
        Mean(
            method=next(iter(group.values())).method,
            seeds=tuple(sorted(group)),
            measures={name: _over_runs([row.measures[name] for row in group.values()]) for name in MEASURES},
        )
        for group in groups.values()
        if len(group) > 1
    ]
    return means, notes if means else []


def _over_runs(values: Iterable[float | None]) -> tuple[float, float] | None:
    """Mean and standard error; of one measurement alone there is none to tell beside the others' number of runs."""
    found = mean_and_error(values)
    return (found[0], found[1]) if found and found[1] is not None else None


def _list_differences(rows: Sequence[Row], plans: Sequence[Topology]) -> list[str]:
    """Each setting with more than one value; a method's own settings are compared within that method."""
    values: dict[str, dict[str, list[str]]] = {}
    keys: dict[str, None] = {}
    flat = [flatten(plan) for plan in plans]
    for settings in flat:
        keys |= dict.fromkeys(settings)
    for row, settings in zip(rows, flat, strict=True):
        for key in keys:
            section, _, rest = key.partition(".")
            if key in ("swarm.seed", "method.name"):
                continue
            shown = f"method.{rest} of {row.method}" if section == "method" else key
            given = repr(settings[key]) if key in settings else "not set"
            values.setdefault(shown, {}).setdefault(given, []).append(row.run)
    return [f"{key} differs: {_tell(by_value)}" for key, by_value in values.items() if len(by_value) > 1]


def _tell(by_value: Mapping[str, Sequence[str]]) -> str:
    """Which value is in which run; where one value is in most runs, only the exceptions are named."""
    common = max(by_value, key=lambda value: len(by_value[value]))
    rest = f"; {common} in the {len(by_value[common])} others" if len(by_value[common]) > 3 else ""
    named = [value for value in by_value if not rest or value != common]
    return "; ".join(f"{value} in {', '.join(by_value[value])}" for value in named) + rest


def _write(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name.endswith("accuracy"):
        return units.fraction(value)
    return f"{value:,.2f}" if name in ("payload_mb", "stream_mb") else units.short(value)
