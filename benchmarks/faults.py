"""What faults cost: accuracy with liars among the peers, accuracy and bytes with lost messages, recovery from a split.

Ten small peers on the digits, in paired seeds: with one seed all have the same partition, weights and batches. Accuracy
is that of the honest peers on the common test set. Runs what is not there yet, one after another; prints tables in
Markdown and draws them. Started again, it goes on.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w
from machine import SWARM, describe
from seeds import spread

from launch.spread import mean_and_error

PARTS = ("liars", "losses", "splits")
METHODS = ("crad", "agreement", "uniform")
WITH_STATISTICS = METHODS[:2]
LIES = {"lying_statistics": "lying about their accuracy", "label_flip": "with labels moved on by one"}
LOSSES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
COLORS = ("#0072B2", "#D55E00", "#009E73")
SPLIT_FROM = 3  # the round in which the swarm is cut in two

Point = tuple[float, list[float]]
"""Where on the x axis, and what each seed came to."""


class Experiments:
    """The runs in one folder, and the tables and pictures made of them."""

    def __init__(self, folder: Path, rounds: int, peers: int, seeds: Sequence[int]) -> None:
        self.folder, self.rounds, self.peers, self.seeds = folder, rounds, peers, seeds

    def run(self, name: str, seed: int, method: str, faults: Sequence[Mapping[str, Any]], **swarm: Any) -> Path:
        """The folder of a run, made now if it has not ended before."""
        out = self.folder / f"{name}-{method}-{seed}"
        if (out / "summary.json").exists():
            return out
        file = self.folder / f"{out.name}.toml"
        described = {
            "swarm": {"name": out.name, "peers": self.peers, "rounds": self.rounds, "seed": seed} | swarm,
            "data": {"name": "digits", "alpha": 0.3},
            "models": {"pool": [{"name": "mlp", "hidden": [64]}]},
            "method": {"name": method},
            "training": {"optimizer": "adam", "learning_rate": 0.002, "batch_size": 32, "test_every": self.rounds},
            "fault": list(faults),
        }
        file.write_text(tomli_w.dumps(described))
        command = [*SWARM, "run", str(file), "--out", str(out), "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode not in (0, 3):  # with peers or messages missing it is degraded, as it was meant to be
            sys.exit(f"{out.name} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
        return out

    def liars(self, most: int) -> None:
        """Accuracy of the honest by the number of liars."""
        for mode, words in LIES.items():
            curves = {method: [self._with_liars(mode, method, number) for number in range(most + 1)]
                      for method in METHODS}  # fmt: skip
            what = f"{self.peers} peers, some {words}"
            self._show(mode, what, "liars", "accuracy of the honest peers", curves)

    def _with_liars(self, mode: str, method: str, number: int) -> Point:
        liars = range(self.peers - number, self.peers)
        faults = [{"id": f"liar-{peer}", "kind": "byzantine", "peer": peer, "mode": mode} for peer in liars]
        if mode == "lying_statistics" and method not in WITH_STATISTICS:  # it never hears this lie
            faults = []
        name = f"{mode}-{number}" if faults else "honest"
        honest = set(range(self.peers)) - set(liars)
        return number, [accuracy(self.run(name, seed, method, faults), honest) for seed in self.seeds]

    def losses(self, method: str = "crad") -> None:
        """Accuracy and bytes by the share of messages that vanish."""
        world, sent, missing = [], [], []
        for probability in LOSSES:
            messages = ["offer", "credit", "piece", "resend", "ack"]
            rule = {"id": "loss", "kind": "loss", "probability": probability, "messages": messages}
            runs = [self.run(f"loss-{probability:g}", seed, method, [rule] if probability else [],
                             round_deadline_s=20.0) for seed in self.seeds]  # fmt: skip
            percent = 100 * probability
            world.append((percent, [accuracy(out, set(range(self.peers))) for out in runs]))
            sent.append((percent, [summary(out)["bytes"]["stream"] / 1e6 for out in runs]))
            missing.append((percent, [float(len(summary(out)["missing"])) for out in runs]))
        what = f"{self.peers} peers, lost messages"
        axis = "messages lost on arrival (%)"
        self._show("loss-accuracy", what, axis, "accuracy of all peers", {method: world})
        self._show("loss-bytes", what, axis, "bytes on all edges (MB)", {method: sent})
        self._show("loss-missing", what, axis, "snapshots missing", {method: missing})

    def splits(self, lengths: Iterable[int], method: str = "crad") -> None:
        """How long after a split's end the first snapshot crosses, by how many rounds it lasted."""
        seconds: list[Point] = []
        for length in lengths:
            until = SPLIT_FROM + length
            rule = {"id": "split", "kind": "partition", "groups": "halves"} | {
                key: {"round": round} for key, round in (("at", SPLIT_FROM), ("until", until))
            }
            runs = [self.run(f"split-{length}", seed, method, [rule], rounds=until + 4, round_deadline_s=20.0)
                    for seed in self.seeds]  # fmt: skip
            seconds.append((length, [recovery_s(out, self.peers, until) for out in runs]))
        axis = "rounds that the split lasts"
        self._show("split", f"{self.peers} peers in two halves", axis, "until a snapshot crosses again (s)",
                   {method: seconds})  # fmt: skip

    def _show(self, name: str, title: str, x: str, y: str, curves: Mapping[str, Sequence[Point]]) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        print(f"\n{title}, {len(self.seeds)} seeds: {y}\n")
        print(f"| {x} | " + " | ".join(curves) + " |\n|---|" + "---|" * len(curves))
        for rows in zip(*curves.values(), strict=True):
            print(f"| {rows[0][0]:g} | " + " | ".join(spread(values) for _, values in rows) + " |", flush=True)
        figure = Figure(figsize=(4.4, 3.0), constrained_layout=True)
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for color, (label, points) in zip(COLORS, curves.items(), strict=False):
            means = [mean_and_error(values) or (float("nan"), None) for _, values in points]
            where = [at for at, _ in points]
            axes.errorbar(where, [mean for mean, _ in means], [error or 0.0 for _, error in means], fmt="o-",
                          color=color, capsize=2, label=label)  # fmt: skip
        axes.set(xlabel=x, ylabel=y, title=f"{title} (mean ± standard error, {len(self.seeds)} seeds)")
        axes.title.set_fontsize(8)
        axes.legend(frameon=False, fontsize=8)
        figure.savefig(self.folder / f"{name}.png", dpi=160)


def summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    """What all peers wrote of one kind."""
    lines = [(path, line) for path in (out / "peers").glob("*/events.jsonl") for line in path.read_text().splitlines()]
    found = [json.loads(line) | {"peer": int(path.parent.name)} for path, line in lines]
    return [event for event in found if event["event"] == kind]


def accuracy(out: Path, peers: set[int]) -> float:
    """Mean accuracy of these peers on the common test set, after the last round."""
    last = summary(out)["rounds"]
    return fmean(e["global_accuracy"] for e in events(out, "round") if e["peer"] in peers and e["round"] == last)


def recovery_s(out: Path, peers: int, until: int) -> float:
    """From the moment when all are in the round that ends the split, to the first snapshot that crosses."""
    healed = max(event["t"] for event in events(out, "round") if event["round"] == until - 1)
    half = (peers + 1) // 2
    crossed = [e["t"] for e in events(out, "delivered") if (e["peer"] < half) != (e["sender"] < half)]
    after = [t for t in crossed if t >= healed]
    return min(after) - healed if after else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs and the pictures are kept")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--peers", type=int, default=10)
    parser.add_argument("--most-liars", type=int, default=4)
    parser.add_argument("--splits", nargs="+", type=int, default=[1, 2, 4, 8], help="lengths in rounds")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    print(describe())
    experiments = Experiments(chosen.folder, chosen.rounds, chosen.peers, chosen.seeds)
    if "liars" in chosen.parts:
        experiments.liars(chosen.most_liars)
    if "losses" in chosen.parts:
        experiments.losses()
    if "splits" in chosen.parts:
        experiments.splits(chosen.splits)


if __name__ == "__main__":
    main()
