"""Runs commands, a line of standard input each, in this one process, and lets them start no other."""

import contextlib
import faulthandler
import io
import json
import os
import sys
import traceback
from typing import Any

import torch  # noqa: F401  before the hook, for its own import asks ldconfig

LIMIT_S = 60
STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system", "subprocess.Popen")
attempts: list[str] = []


def refuse(event: str, _: Any) -> None:
    if event in STARTS:
        attempts.append(event)
        raise PermissionError(f"{event}: this process may start no other")


def run(arguments: list[str], cwd: str) -> tuple[Any, str, list[str]]:
    """Status and output of `swarm ARGUMENTS`, and what it tried to start."""
    from launch.cli import app  # the entry point around it would end this process

    os.chdir(cwd)
    attempts.clear()
    said = io.StringIO()
    status: Any = None
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            app(arguments, prog_name="swarm")
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc(file=said)
    faulthandler.cancel_dump_traceback_later()
    return status, said.getvalue(), list(attempts)


if __name__ == "__main__":
    sys.addaudithook(refuse)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
