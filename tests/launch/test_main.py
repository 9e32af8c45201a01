"""The `swarm` command says all it has to say, ends with the status it should, and does not take torch down in order."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import atexit, sys
atexit.register(lambda: print("taken down in order", file=sys.stderr))
from launch.__main__ import main
main()
"""


def swarm(*arguments: str, out: int = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], stdout=out, stderr=subprocess.PIPE, text=True, timeout=60,
        env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip


def test_it_ends_at_once_when_all_is_said() -> None:
    done = swarm("methods")
    assert (done.returncode, done.stderr) == (0, "")
    assert "dpsgd" in done.stdout and done.stdout.endswith("\n")


def test_wrong_input_still_is_status_2(tmp_path: Path) -> None:
    done = swarm("check", str(tmp_path / "none.toml"))
    assert done.returncode == 2
    assert "there is no such file" in done.stderr and "in order" not in done.stderr


def test_what_cannot_be_written_is_told() -> None:
    with Path("/dev/full").open("w") as full:
        done = swarm("methods", out=full.fileno())
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
