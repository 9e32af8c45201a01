"""Teachers are streamed: the largest peer's own memory with 40 neighbors is that with 10, within a fifth."""

import argparse
import json
import tempfile
from pathlib import Path

import tomli_w
from machine import SWARM, Bars, describe, watch

PEERS = 41


def largest_peer(folder: Path, degree: int, model: str, rounds: int) -> float:
    """Private memory of the peer that ever took most, MiB."""
    graph = {"kind": "complete"} if degree == PEERS - 1 else {"kind": "k-regular", "degree": degree}
    file, out = folder / f"{degree}.toml", folder / f"{degree}"
    topology = {
        "swarm": {"name": f"degree-{degree}", "peers": PEERS, "rounds": rounds},
        "graph": graph,
        "data": {"name": "digits", "partition": "iid"},
        "models": {"pool": [model]},
    }
    file.write_text(tomli_w.dumps(topology))
    used = watch([*SWARM, "run", str(file), "--out", str(out)], folder / f"{degree}.txt", interval_s=0.3)
    if used.status != 0:
        raise SystemExit(used.output)
    pids = [json.loads(path.read_text().splitlines()[0])["pid"] for path in out.glob("peers/*/events.jsonl")]
    return max(used.own_mib[pid] for pid in pids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cnn6")
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    print(describe())
    bars = Bars()
    with tempfile.TemporaryDirectory(prefix="memory-") as name:
        few = largest_peer(Path(name), 10, chosen.model, chosen.rounds)
        many = largest_peer(Path(name), 40, chosen.model, chosen.rounds)
        print(f"largest peer: {few:.1f} MiB with 10 neighbors, {many:.1f} MiB with 40 ({chosen.model})")
        bars.at_most("difference", abs(many - few) / few, 0.2)
    bars.exit()


if __name__ == "__main__":
    main()
