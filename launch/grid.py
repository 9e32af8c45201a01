"""The cells of a sweep: every combination of the varied values, each checked and told to be finished or not."""

import hashlib
import multiprocessing
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path

from launch.results import load_summary, load_topology
from launch.settings import differences, flatten
from topology import Topology, TopologyError, load

NAME_LIMIT = 200  # a file name may have 255 bytes, and what is set aside has a longer one


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: a topology file, the keys that are set for this run, and the run folder."""

    folder: Path
    file: Path
    values: Mapping[str, str]  # as in --set

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def changes(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]

    def load(self) -> Topology:
        """The topology of this cell. Raises `TopologyError`, which names the cell."""
        try:
            return load(self.file, self.changes)
        except TopologyError as error:
            raise TopologyError(f"cell {self.name}:\n{error}") from error


@dataclass(frozen=True)
class Checked:
    """A cell that can run, or has run."""

    cell: Cell
    finished: bool
    memory_mb: float  # predicted, of its peers


def read_variations(options: Sequence[str]) -> dict[str, list[str]]:
    """`method.name=crad,uniform` … as the values of each key. Commas in brackets, braces and quotes divide nothing."""
    grid: dict[str, list[str]] = {}
    for option in options:
        key, equals, text = option.partition("=")
        key, values = key.strip(), [value.strip() for value in _split(text)]
        if not (equals and re.fullmatch(r"\w+\.[\w-]+", key) and all(values)):
            raise TopologyError(f"--vary {option!r}: is section.key=value,value,…, such as swarm.seed=1,2,3")
        if key in grid:
            raise TopologyError(f"--vary {key}: is given twice; put all its values into one")
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise TopologyError(f"--vary {option!r}: {twice} is there twice")
        grid[key] = values
    if not grid:
        raise TopologyError("--vary: name at least one key and its values, such as --vary swarm.seed=1,2,3")
    return grid


def _split(text: str) -> Iterator[str]:
    """The parts between commas that are in no bracket, brace or quotation."""
    begin, depth, quote = 0, 0, ""
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[]{}":
            depth += 1 if letter in "[{" else -1
        elif letter == "," and depth == 0:
            yield text[begin:place]
            begin = place + 1
    yield text[begin:]


def lay_out(file: Path, grid: Mapping[str, Sequence[str]], out: Path) -> list[Cell]:
    """All cells, the last key changing fastest. Raises `TopologyError` for one that the file makes no sense with."""
    chosen = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    cells = [Cell(out / _name(values), file, values) for values in chosen]
    known: dict[str, Cell] = {}
    for cell in cells:
        settings = repr(sorted(flatten(cell.load()).items()))
        other = known.setdefault(settings, cell)
        if other is not cell:
            raise TopologyError(f"cell {cell.name}: is the same run as {other.name}; leave one of them out")
    return cells


def _name(values: Mapping[str, str]) -> str:
    """`method.name=crad,swarm.seed=1`; what no file name should hold is left out; a digest keeps such names apart."""
    full = ",".join(f"{key}={value}" for key, value in values.items())
    plain = re.sub(r"[^\w.,=+-]+", "_", full, flags=re.ASCII)[:NAME_LIMIT]
    return plain if plain == full else f"{plain}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def check(cells: Sequence[Cell]) -> list[Checked]:
    """Plan every cell in a child process, which gives torch and the data back. Raises `TopologyError`."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("fork")) as child:
        return child.submit(_check_all, cells).result()


def _check_all(cells: Sequence[Cell]) -> list[Checked]:
    from launch.libraries import import_torch

    import_torch()
    return [_check(cell) for cell in cells]


def _check(cell: Cell) -> Checked:
    from launch.start import check_descriptors, check_memory, check_ports
    from peer.plan import make_plan

    wanted = cell.load()
    try:
        plan = make_plan(wanted)
        finished = _is_finished(cell, wanted, plan.topology)
        if not finished:
            check_ports(wanted)
            check_descriptors(plan)
            check_memory(plan)
    except TopologyError as error:
        raise TopologyError(f"cell {cell.name}:\n{error}") from error
    return Checked(cell, finished, sum(plan.predicted_memory_mb(peer) for peer in plan.peers))


def _is_finished(cell: Cell, wanted: Topology, resolved: Topology) -> bool:
    """Whether the folder holds this very run, ended. Raises `TopologyError` where it holds something else."""
    if not cell.folder.exists() or (cell.folder.is_dir() and not any(cell.folder.iterdir())):
        return False
    there = flatten(load_topology(cell.folder))
    # What the file leaves to the machine may have come out otherwise when the cell ran.
    left_open = {f"devices.{key}" for key, value in wanted.devices if value == "auto"}
    found = differences(there, flatten(resolved))
    differing = [f"{key}: {old} there, {new} here" for key, (old, new) in found.items() if key not in left_open]
    if differing:
        raise TopologyError(
            f"{cell.folder} holds a run of other settings: {'; '.join(differing)}. Name another --out, or remove it"
        )
    return (cell.folder / "summary.json").exists() and load_summary(cell.folder)["status"] in ("complete", "degraded")


def set_aside(cell: Cell) -> None:
    """Move what an interrupted or failed try has left out of the way."""
    if cell.folder.exists() and any(cell.folder.iterdir()):
        places = (cell.folder.with_name(f"{cell.name}.aside-{number}") for number in count(1))
        cell.folder.rename(next(place for place in places if not place.exists()))
