"""FedCC and what it is compared with, on one data set, over seeds: mean and standard deviation, bytes and time.

The scaled protocol of examples/fedcc-digits.toml: ten clients with one class each unless told otherwise. Runs what is
not there yet, one run after another, and prints a table in Markdown. Started again, it goes on.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from machine import EXAMPLES, describe
from seeds import run

from peer.data import sets

ONE_MODEL = 'models.pool=[{name = "resnet8", width = 8}]'
METHODS = {
    "fedcc": ["method.name=fedcc"],
    "fedcc, label prior": ["method.name=fedcc", "method.majority=label_prior"],
    "fedavg": ["method.name=fedavg", ONE_MODEL],
    "fedmd": ["method.name=fedmd"],
    "feddf": ["method.name=feddf"],
    "feddf-logits": ["method.name=feddf-logits"],
    "fedct": ["method.name=fedct"],
    "ssl": ["method.name=ssl", "swarm.rounds=1"],
    "plain ensemble": ["method.name=fedmd", "swarm.rounds=1"],  # local training once, then the mean probability
}


def shortened(name: str, images: int, folder: Path) -> str:
    """The first training images of a data set, equally many a class, as a file of its own."""
    path = folder / f"{name}-{images}.npz"
    if not path.exists():
        data = sets.load(name)
        each = images // data.classes
        chosen = np.sort(np.concatenate([np.flatnonzero(data.y_train == c)[:each] for c in range(data.classes)]))
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(
            path, x_train=data.x_train[chosen], y_train=data.y_train[chosen], x_test=data.x_test, y_test=data.y_test
        )
    return f"npz:{path.absolute()}"


def spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    deviation = stdev(known) if len(known) > 1 else float("nan")
    return f"{fmean(known):.3f} ± {deviation:.3f}"


def row(method: str, runs: list[dict[str, Any]]) -> str:
    """One line of the table, from the summaries of a method's runs."""

    def column(key: str) -> str:
        return spread([one[key][-1] if key.endswith("by_round") else one[key] for one in runs])

    judged = "coordinator" if runs[0]["global_accuracy_of"] == "coordinator" else "mean of clients"
    raw = ", ".join(f"{one['global_accuracy']:.3f}" for one in runs)
    payload = fmean(one["bytes"]["payload"] for one in runs) / 1e6
    wall = fmean(one["wall_s"] for one in runs)
    return (
        f"| {method} | {column('global_accuracy')} | {raw} | {judged} | {column('client_accuracy_by_round')} | "
        f"{column('local_accuracy')} | {payload:.2f} | {wall:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs are kept")
    parser.add_argument("--data", default="digits", help="as data.name, npz:PATH included")
    parser.add_argument("--images", type=int, help="take only so many training images")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], dest="changes", help="as in swarm run")
    chosen = parser.parse_args()
    print(describe())
    data = shortened(chosen.data, chosen.images, chosen.folder) if chosen.images else chosen.data
    lines = [
        "| method | global, mean ± deviation | each seed | judged at | a client alone | local | payload MB | wall s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in chosen.methods:
        runs = []
        for seed in chosen.seeds:
            out = chosen.folder / f"{method.replace(', ', '-').replace(' ', '-')}-{seed}"
            changes = [f"swarm.seed={seed}", f"data.name={data}", *chosen.changes, *METHODS[method]]
            run(EXAMPLES / "fedcc-digits.toml", out, changes)
            runs.append(json.loads((out / "summary.json").read_text()))
        lines.append(row(method, runs))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
