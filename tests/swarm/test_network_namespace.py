"""A whole swarm in a private network namespace: the bytes on its loopback are those of the books, to the byte.

The device counts packets with their headers; every packet has 20 bytes of IP and 32 of TCP, and the two that open a
connection 8 more, once selective acknowledgements, whose size varies, are switched off in there.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

SWARM = Path(sys.executable).with_name("swarm")
HEADERS = 20 + 32
OPENING = 2 * 8
PRIVATE = ["unshare", "--user", "--map-root-user", "--net"]
COUNTERS = ("/proc/net/dev", "/proc/net/snmp")
INSIDE = f"""
set -e
echo 0 > /proc/sys/net/ipv4/tcp_sack
echo 0 > /proc/sys/net/ipv4/tcp_dsack
ip link set lo up
"$@"
cat {" ".join(COUNTERS)} > counters.txt
"""
TOPOLOGY: dict[str, dict[str, Any]] = {
    "swarm": {"name": "private", "peers": 3, "rounds": 3, "seed": 5, "round_deadline_s": 60.0},
    "data": {"alpha": 1.0},
    "models": {"pool": [{"name": "mlp", "hidden": [64]}]},
    "transport": {"beat_s": 0.2},
}


def has_namespaces() -> bool:
    """Whether this machine lets a user have a network of his own, with `ip` to switch it on."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*PRIVATE, "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0


def loopback(text: str) -> tuple[int, int, int]:
    """Bytes and packets of the loopback, and the connections that were opened, as the kernel's tables say."""
    fields = next(line.split(":")[1].split() for line in text.splitlines() if line.strip().startswith("lo:"))
    names, values = (line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:"))
    return int(fields[8]), int(fields[9]), int(dict(zip(names, values, strict=True))["ActiveOpens"])


@pytest.mark.skipif(not has_namespaces(), reason="this machine allows no private network namespace, or has no `ip`")
def test_the_loopback_of_a_private_network_carried_what_the_books_say(tmp_path: Path) -> None:
    (tmp_path / "swarm.toml").write_text(tomli_w.dumps(TOPOLOGY))
    inside = [*PRIVATE, "sh", "-c", INSIDE, "sh", SWARM, "run", "swarm.toml", "--out", "run", "--quiet"]
    done = subprocess.run(inside, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    size, packets, opened = loopback((tmp_path / "counters.txt").read_text())
    books = kernel = 0
    for journal in sorted((tmp_path / "run" / "peers").glob("*/events.jsonl")):
        for event in map(json.loads, journal.read_text().splitlines()):
            if event["event"] == "connection":
                assert event["verified"] is True
                books += event["stream_out"]
                kernel += event["kernel_retransmitted"]
    assert opened == 3 * 2
    assert size - HEADERS * packets - OPENING * opened == books + kernel
