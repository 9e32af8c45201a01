"""CRAD against its rivals on the digits, over seeds: mean and standard error, and the differences seed by seed.

Runs what is not there yet, one run after another, and prints a table in Markdown. Started again, it goes on.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

from machine import EXAMPLES, SWARM, describe

from topology import load

Accuracies = dict[int, tuple[float, float]]
"""By seed: global and local accuracy."""


def run(file: Path, out: Path, changes: list[str]) -> tuple[float, float]:
    """Global and local accuracy of a run of this file with these changes, made now if it is not there."""
    if not (out / "summary.json").exists():
        options = [part for change in changes for part in ("--set", change)]
        command = [*SWARM, "run", str(file), "--quiet", "--out", str(out), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{out}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    found = json.loads((out / "summary.json").read_text())
    if found["status"] != "complete":
        sys.exit(f"{out} holds a run that is {found['status']}: remove it, and start again")
    if not is_of(file, out, changes):
        sys.exit(f"{out} holds a run with other settings: remove it, or name another folder")
    return found["global_accuracy"], found["local_accuracy"]


def is_of(file: Path, out: Path, changes: list[str]) -> bool:
    """Whether a run folder is of this file with these changes."""
    wanted, there = load(file, changes), load(out / "topology.toml")
    sections = ("swarm", "graph", "data", "models", "training", "transport", "peer")
    return (
        all(getattr(wanted, section) == getattr(there, section) for section in sections)
        and wanted.method.name == there.method.name
        and wanted.method.options.items() <= there.method.options.items()
    )


def spread(values: list[float]) -> str:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{fmean(values):.4f} ± {error:.4f}"


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
