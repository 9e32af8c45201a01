"""FedBST, its parts, and what it is compared with, on examples/fedbst-fashion.toml: paired seeds, and sweeps.

This measures our implementations against each other on a small CLIP of our own, under a shift. It reproduces no
published figure. Paired: with one seed all methods have the same partition and the same first prompts. Runs what is not
there yet, one after another, and prints tables in Markdown. Started again, it goes on.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from machine import EXAMPLES, describe
from seeds import run, spread

from launch.results import load

PERIOD = "method.relabel_every=3"
LONG = ["swarm.rounds=6", "training.test_every=6"]  # two labellings
SHORT = [PERIOD, "swarm.rounds=3", "training.test_every=3"]  # one, for a sweep

METHODS = {
    "zero-shot": ["method.name=zeroshot"],
    "PromptFL + FPL": ["method.name=promptfl", PERIOD],
    "FedCoPL": ["method.name=fedcopl", PERIOD],
    "FedCoPL + UACP": ["method.name=fedbst", "method.alpha=1", PERIOD],
    "FedCoPL + ensemble": ["method.name=fedbst", "method.uacp_weight=0", PERIOD],
    "FedBST": ["method.name=fedbst", PERIOD],
}
SWEEPS = {
    "tau_con": [[f"method.tau_con={value}"] for value in (0.1, 0.2, 0.3, 0.4)],
    "lambda": [[f"method.uacp_weight={value}"] for value in (0, 0.001, 0.01, 0.1, 1)],
    "alpha": [[f"method.alpha={value}"] for value in (1, 0.8, 0.5, 0.2)],
    "clients": [[f"swarm.peers={clients + 1}"] for clients in (5, 10, 20, 50)],
    "joining": [[f"swarm.participants={number}"] for number in (2, 4, 6, 8)] + [["swarm.participants=all"]],
}
FILE = EXAMPLES / "fedbst-fashion.toml"


def summary_of(out: Path, changes: list[str]) -> dict[str, Any]:
    run(FILE, out, changes)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def row(name: str, runs: list[dict[str, Any]], folders: list[Path], baseline: list[float]) -> str:
    """One line: local test accuracy, mean over clients and seeds, and what each client came to."""
    scores = [one["local_accuracy"] for one in runs]
    differences = [score - base for score, base in zip(scores, baseline, strict=True)]
    every = [(load(folder).journals.rounds, event_rounds(folder)) for folder in folders]
    ends = [[event for event in events if event["round"] == last] for events, last in every]
    worst = fmean(min(e["local_accuracy"] for e in end if e["local_accuracy"] is not None) for end in ends)
    labels = [e["method"]["label_accuracy"] for events, _ in every for e in events if "label_accuracy" in e["method"]]
    shown = f"{fmean(labels):.3f}" if labels else "-"
    payload = fmean(one["bytes"]["payload"] for one in runs) / 1e6
    return (
        f"| {name} | {spread(scores)} | {', '.join(f'{score:.4f}' for score in scores)} | {spread(differences)} | "
        f"{worst:.3f} | {shown} | {payload:.2f} | {fmean(one['wall_s'] for one in runs):.0f} |"
    )


def event_rounds(folder: Path) -> int:
    return int(load(folder).topology.swarm.rounds)


def compare(folder: Path, seeds: list[int]) -> None:
    print(
        "| method | local accuracy | each seed | minus FedCoPL | worst client | labels right | payload MB | wall s |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    results: dict[str, tuple[list[dict[str, Any]], list[Path]]] = {}
    for name, changes in METHODS.items():
        folders = [folder / f"{name.replace(' ', '')}-{seed}" for seed in seeds]
        runs = [summary_of(out, [f"swarm.seed={s}", *LONG, *changes]) for s, out in zip(seeds, folders, strict=True)]
        results[name] = runs, folders
    baseline = [one["local_accuracy"] for one in results["FedCoPL"][0]]
    for name, (runs, folders) in results.items():
        print(row(name, runs, folders, baseline))


def sweep(folder: Path, name: str) -> None:
    """One seed, one key after another: a table, and a picture of it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    print(f"\n| {name} | local accuracy | worst client | ambiguous at the last labelling |\n|---|---|---|---|")
    labels, scores = [], []
    for changes in SWEEPS[name]:
        value = changes[0].partition("=")[2]
        shown = str(int(value) - 1) if name == "clients" else value
        out = folder / f"{name}-{shown}"
        found = summary_of(out, ["swarm.seed=1", *SHORT, *changes])
        events = load(out).journals.rounds
        last = [event["local_accuracy"] for event in events if event["round"] == found["rounds"]]
        counted = [event for event in events if "ambiguous" in event["method"]]
        newest = max(event["round"] for event in counted)
        ambiguous = sum(event["method"]["ambiguous"] for event in counted if event["round"] == newest)
        worst = min(value for value in last if value is not None)
        print(f"| {shown} | {found['local_accuracy']:.4f} | {worst:.3f} | {ambiguous:.0f} |")
        labels.append(shown)
        scores.append(found["local_accuracy"])
    figure = Figure(figsize=(4.2, 2.8), constrained_layout=True)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(labels, scores, "o-", color="#0072B2")
    axes.set(xlabel=name, ylabel="local test accuracy", title="FedBST, Fashion-MNIST turned by 20 degrees, seed 1")
    axes.title.set_fontsize(8)
    figure.savefig(folder / f"{name}.png", dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs and the pictures are kept")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--sweeps", nargs="*", choices=SWEEPS, default=list(SWEEPS))
    chosen = parser.parse_args()
    print(describe())
    if chosen.seeds:
        compare(chosen.folder, chosen.seeds)
    for name in chosen.sweeps:
        sweep(chosen.folder, name)


if __name__ == "__main__":
    main()
