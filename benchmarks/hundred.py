"""A hundred peers on one machine: how long until all of them learn, and what memory of its own each takes by then."""

import argparse
import json
import tempfile
from pathlib import Path

from machine import EXAMPLES, SWARM, Bars, describe, watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(describe())
    bars = Bars()
    with tempfile.TemporaryDirectory(prefix="hundred-") as name:
        out = Path(name) / "run"
        command = [*SWARM, "run", str(EXAMPLES / "crad-hundred.toml"), "--out", str(out)]
        used = watch([*command, "--set", f"swarm.rounds={rounds}"], Path(name) / "output.txt", memory=False)
        print(used.output.strip().splitlines()[-2])
        summary = json.loads((out / "summary.json").read_text())
        journals = [path.read_text().splitlines() for path in out.glob("peers/*/events.jsonl")]
        own = [json.loads(lines[0])["own_mb"] for lines in journals]
        bars.equal("exit status", used.status, 0)
        bars.equal("peers", len(journals), 100)
        bars.at_most("start to first round", summary["startup_s"], 15, " s")
        bars.at_most("own memory of the largest peer before learning", max(own), 60, " MiB")
        bars.equal("connections that differ from the kernel", summary["connections"]["mismatched"], [])
        print(f"{summary['connections']['verified']} connections verified, {used.wall_s:.1f} s in all")
    bars.exit()


if __name__ == "__main__":
    main()
