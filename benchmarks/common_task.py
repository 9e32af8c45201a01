"""The common task: ten peers on a ring, ten rounds of D-PSGD, in a private network namespace whose loopback is counted.

Every decentralized tool can run it: 1,500 digits in 10 equal shards, an MLP 64-256-128-10, SGD 0.1, batches of 32. Then
once more for the bits, and once with a peer killed at a third of the run.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import EXAMPLES, SWARM, Bars, describe, watch

PAYLOAD = 40_660_800
INSIDE = "SWARM_COMMON_TASK_INSIDE"


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    sys.exit("there is no loopback interface")


def command(out: Path, *options: str) -> list[str]:
    return [*SWARM, "run", str(EXAMPLES / "dpsgd-digits.toml"), "--out", str(out), *options]


def digests(out: Path) -> list[tuple[str, int, str]]:
    """(peer, round, digest of its weights), for every peer and round."""
    found = []
    for journal in sorted(out.glob("peers/*/events.jsonl")):
        events = map(json.loads, journal.read_text().splitlines())
        found += [
            (journal.parent.name, event["round"], event["snapshot"]) for event in events if event["event"] == "round"
        ]
    return found


def kill_at_a_third(out: Path) -> tuple[int, dict[str, object]]:
    """Run with peer 4 killed once it has finished a third of its rounds."""
    child = subprocess.Popen(command(out), stdout=subprocess.DEVNULL)
    journal = out / "peers" / "4" / "events.jsonl"
    end = time.monotonic() + 60
    while time.monotonic() < end:
        lines = journal.read_text().splitlines() if journal.exists() else []
        if sum('"event": "round"' in line for line in lines) >= 3:
            os.kill(json.loads(lines[0])["pid"], signal.SIGKILL)
            break
        time.sleep(0.01)
    status = child.wait(timeout=120)
    return status, json.loads((out / "summary.json").read_text())


def main() -> None:
    if INSIDE not in os.environ:
        if shutil.which("unshare") is None or shutil.which("ip") is None:
            sys.exit("this needs unshare (util-linux) and ip (iproute2), and the right to make a network namespace")
        inside = f"ip link set lo up && exec {sys.executable} {Path(__file__).resolve()}"
        environment = os.environ | {INSIDE: "1"}
        sys.exit(subprocess.run(["unshare", "-rn", "sh", "-c", inside], env=environment).returncode)
    print(describe())
    bars = Bars()
    with tempfile.TemporaryDirectory(prefix="common-task-") as name:
        folder = Path(name)
        before = loopback_bytes()
        used = watch(command(folder / "one"), folder / "one.txt")
        on_loopback = loopback_bytes() - before
        summary = json.loads((folder / "one" / "summary.json").read_text())
        print(used.output.strip().splitlines()[-2])
        bars.equal("exit status", used.status, 0)
        bars.equal("payload, bytes", summary["bytes"]["payload"], PAYLOAD)
        bars.equal("connections that differ from the kernel", summary["connections"]["mismatched"], [])
        bars.at_most(f"bytes on loopback ({on_loopback:,}) over payload", on_loopback / PAYLOAD, 1.02)
        bars.at_most("processes", used.processes, 13)
        bars.at_most("memory of them all (PSS)", used.pss_mib, 500, " MiB")
        bars.at_most("wall time, report included", used.wall_s, 10, " s")
        watch(command(folder / "two"), folder / "two.txt", memory=False)
        bars.equal("the same bits again", digests(folder / "one") == digests(folder / "two"), True)
        status, summary = kill_at_a_third(folder / "killed")
        bars.equal("exit status with peer 4 killed", status, 3)
        bars.equal("rounds that the others completed", summary["rounds_completed"], 10)
        print(f"missing: {summary['missing']}")
    bars.exit()


if __name__ == "__main__":
    main()
