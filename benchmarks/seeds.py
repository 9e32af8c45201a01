"""CRAD against its rivals on the digits, over seeds: mean and standard error, and the differences seed by seed.

Runs what is not there yet, one run after another, and prints a table in Markdown. Started again, it goes on.
"""

import argparse
import sys
from math import nan
from pathlib import Path

from machine import EXAMPLES, describe

from launch.grid import Cell, check
from launch.results import RunFolderError, load_summary
from launch.spread import mean_and_error
from launch.sweep import run_cells
from topology import TopologyError

Accuracies = dict[int, tuple[float, float]]
"""By seed: global and local accuracy."""


def run(file: Path, out: Path, changes: list[str]) -> tuple[float, float]:
    """Global and local accuracy of a run of this file with these changes, made now if it is not there."""
    cell = Cell(out, file, dict(change.split("=", 1) for change in changes))
    try:
        todo = [one for one in check([cell]) if not one.finished]
    except (TopologyError, RunFolderError) as error:
        sys.exit(str(error))
    told: list[str] = []
    run_cells(todo, 1, lambda _, status, said: told.append(f"exit status {status}\n{said}"))
    found = load_summary(out)
    if found["status"] != "complete":
        sys.exit(f"{out} is {found['status']}: remove it, and start again\n{''.join(told)}")
    return found["global_accuracy"], found["local_accuracy"]


def spread(values: list[float]) -> str:
    mean, error = mean_and_error(values) or (nan, None)
    return f"{mean:.4f} ± {nan if error is None else error:.4f}"


def table(results: dict[str, Accuracies], seeds: list[int]) -> str:
    first = next(iter(results))
    lines = [
        "| method | global | local | " + " | ".join(f"seed {seed}" for seed in seeds) + f" | {first} minus it |",
        "|---|---|---|" + "---|" * (len(seeds) + 1),
    ]
    for method, by_seed in results.items():
        world = [by_seed[seed][0] for seed in seeds]
        differences = [results[first][seed][0] - by_seed[seed][0] for seed in seeds]
        lines.append(
            f"| {method} | {spread(world)} | {spread([by_seed[seed][1] for seed in seeds])} | "
            + " | ".join(f"{value:.4f}" for value in world)
            + f" | {'' if method == first else spread(differences)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs are kept")
    parser.add_argument("--methods", nargs="+", default=["crad", "agreement", "uniform", "local"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--set", action="append", default=[], dest="changes", help="as in swarm run")
    chosen = parser.parse_args()
    print(describe())
    results = {
        method: {
            seed: run(
                EXAMPLES / "crad-digits.toml",
                chosen.folder / f"{method}-{seed}",
                [f"method.name={method}", f"swarm.seed={seed}", *chosen.changes],
            )
            for seed in chosen.seeds
        }
        for method in chosen.methods
    }
    print(table(results, chosen.seeds))


if __name__ == "__main__":
    main()
