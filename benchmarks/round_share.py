"""The share of a round's time in which a peer does not compute, for ten peers with CNN-6 on 32x32 images and CRAD.

Computing is statistics, teachers, training and evaluation. Shards are equal, so that waiting is not for a larger one.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean

import numpy as np
import tomli_w
from machine import SWARM, Bars, describe, watch


def images(path: Path, samples: int) -> None:
    """Noise in ten colors: what is measured does not depend on what is learnt."""
    rng = np.random.default_rng(0)
    labels = np.arange(samples) % 10
    pixels = rng.integers(0, 128, (samples, 32, 32, 3)) + (labels * 12)[:, None, None, None]
    test = slice(0, samples // 10)
    pixels = pixels.astype(np.uint8)
    np.savez(path, x_train=pixels, y_train=labels, x_test=pixels[test], y_test=labels[test])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an .npz of 32x32 images; made up when left out")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=4)
    chosen = parser.parse_args()
    print(describe())
    bars = Bars()
    with tempfile.TemporaryDirectory(prefix="round-share-") as name:
        folder = Path(name)
        data = chosen.data
        if data is None:
            data = folder / "images.npz"
            images(data, chosen.samples)
        topology = {
            "swarm": {"name": "round-share", "peers": 10, "rounds": chosen.rounds},
            "data": {"name": f"npz:{data.resolve()}", "partition": "iid"},
            "models": {"pool": ["cnn6"]},
        }
        (folder / "swarm.toml").write_text(tomli_w.dumps(topology))
        out = folder / "run"
        used = watch(
            [*SWARM, "run", str(folder / "swarm.toml"), "--out", str(out)], folder / "output.txt", memory=False
        )
        bars.equal("exit status", used.status, 0)
        shares, names = [], ("statistics", "teachers", "train", "evaluate")
        spent: dict[str, float] = {}
        for journal in out.glob("peers/*/events.jsonl"):
            for event in map(json.loads, journal.read_text().splitlines()):
                if event["event"] == "round" and event["round"] > 1:
                    seconds = event["seconds"]
                    shares.append(1 - sum(seconds[part] for part in names) / seconds["total"])
                    for part, value in seconds.items():
                        spent[part] = spent.get(part, 0.0) + value
        rounds = len(shares)
        print("mean round: " + ", ".join(f"{part} {value / rounds:.3f} s" for part, value in spent.items()))
        print(f"largest share of one peer in one round: {max(shares):.3f}")
        bars.at_most("share of a round that is not computing", fmean(shares), 0.15)
    bars.exit()


if __name__ == "__main__":
    main()
