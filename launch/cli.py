"""The command line. Wrong input gives one message and exit status 2, never a traceback."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from topology import TopologyError, load

PAGE_WIDTH = 130  # of what goes to a file or a pipe, where no window narrows it

app = typer.Typer(
    help="Decentralized federated learning with real processes and real sockets, from one topology file.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

File = Annotated[Path, typer.Argument(help="The topology file (docs/topology-file.md).")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change a key: --set swarm.rounds=3. May be repeated.")]


@contextmanager
def _wrong_input_ends_with_2() -> Iterator[None]:
    try:
        yield
    except TopologyError as error:
        Console(stderr=True).print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _fresh_folder(name: str) -> Path:
    """runs/NAME-TIME; of two runs begun in the same second the later has a number behind it."""
    named = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    return next(path for n in count(1) if not (path := named if n == 1 else Path(f"{named}-{n}")).exists())


@app.command()
def run(
    file: File,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder; must be empty or new. Default: runs/NAME-TIME.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing but troubles and the last line.")] = False,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Let the faults befall the messages that they befell in this run folder."),
    ] = None,
) -> None:
    """Run a swarm to its end. Exit status: 0 complete, 3 degraded, 1 failed, 2 the input was wrong."""
    zero = time.monotonic()
    console = Console()
    with _wrong_input_ends_with_2():
        topology = load(file, set_ or [])
        folder = out or _fresh_folder(topology.swarm.name)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise TopologyError(f"--out: {folder} exists and is not an empty folder. Name another, or remove it")
        from launch.libraries import import_torch
        from topology.neighbors import neighbors_in

        neighbors = neighbors_in(topology)  # before torch, which takes over the memory that this gives back
        import_torch()
        from launch.start import start

        supervisor = start(topology, neighbors, folder, console, quiet, zero, replay)
    outcome = supervisor.run()
    from launch.finish import finish
    from launch.results import EXIT_STATUS

    finish(folder, outcome, console)
    raise typer.Exit(EXIT_STATUS[outcome.status])


@app.command()
def check(
    file: File,
    set_: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    draw: Annotated[Path | None, typer.Option(help="Write a picture of the graph to this PNG file.")] = None,
) -> None:
    """Print what a file would run: peers, devices, graph, memory, and the exact payload bytes of a round."""
    with _wrong_input_ends_with_2():
        topology = load(file, set_ or [])
        from launch.check import describe, print_plan
        from peer.plan import make_plan

        plan = make_plan(topology)
        if draw is not None:
            from topology import graphs
            from topology.drawing import draw as draw_graph

            draw_graph(graphs.build(plan.topology), draw, [facts.spec.name for facts in plan.facts])
    if as_json:
        print(json.dumps(describe(plan)))
    else:
        console = Console()
        print_plan(plan, console if console.is_terminal else Console(width=PAGE_WIDTH))


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")]) -> None:
    """Write report.html and its figures anew from a run folder."""
    from launch.report import write_report

    with _wrong_folder_ends_with_2():
        print(write_report(folder))


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR DIR …", help="Run folders.")],
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Of two runs, name the first round, peer and tensor that differ in a bit."),
    ] = False,
) -> None:
    """Print runs side by side; runs that differ in their seed alone are averaged.

    With --exact: exit status 0 if two runs are equal to the bit as far as both go, 1 if they part.
    """
    console = Console()
    if exact:
        from launch.exact import compare_exactly

        with _wrong_folder_ends_with_2():
            if len(folders) != 2:
                raise TopologyError(f"--exact: compares two run folders, {len(folders)} were given")
            found = compare_exactly(*folders)
        _say(found.lines, console)
        raise typer.Exit(0 if found.equal else 1)
    from launch.compare import compare as compare_runs

    with _wrong_folder_ends_with_2():
        comparison = compare_runs(folders)
    console.print(comparison.table(), crop=False)
    _say(comparison.notes, console)


def _say(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command()
def sweep(
    file: File,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="A key and its values: --vary method.name=crad,uniform --vary swarm.seed=1,2,3."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of all runs. Default: runs/NAME-sweep.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="How many may run at once, where memory allows it.")] = 1,
) -> None:
    """Run every combination of values that has not been run, and print mean and standard error over seeds.

    Started again, it goes on where it stopped. Exit status: 0 all complete, 3 some degraded, 1 some failed or it was
    stopped, 2 the input was wrong.
    """
    from launch.sweep import sweep as sweep_grid

    with _wrong_folder_ends_with_2():
        status = sweep_grid(file, vary or [], out, at_once, Console())
    raise typer.Exit(status)


@app.command(name="pretrain-clip")
def pretrain_clip(
    recipe: Annotated[str, typer.Argument(help="digits (half a minute) or fashion-mnist (a few minutes).")],
) -> None:
    """Train the small CLIP of a recipe, on images that no peer ever gets, and keep it for the model tiny-clip."""
    with _wrong_input_ends_with_2():
        from launch.pretrain import pretrain

        pretrain(recipe, Console())


@app.command()
def methods() -> None:
    """List the methods, one line each."""
    from peer.methods.registry import METHODS, find

    for name in METHODS:
        print(f"{name:12} {find(name).summary}")


@contextmanager
def _wrong_folder_ends_with_2() -> Iterator[None]:
    from launch.journals import RunFolderError

    try:
        with _wrong_input_ends_with_2():
            yield
    except RunFolderError as error:
        Console(stderr=True).print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
