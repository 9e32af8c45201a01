"""faults.jsonl: one line for each fault, written by whoever brings it about, before it is brought about.

All processes of a run append to the one file; each line goes out whole with one system call.
"""

import json
import os
import time
from pathlib import Path

from topology.faults import Rule


class FaultLog:
    """Appends to the run folder's file, from any thread; `t` counts seconds from `zero` on the monotonic clock."""

    def __init__(self, folder: Path, zero: float) -> None:
        self._descriptor = os.open(folder / "faults.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._zero = zero

    def write(self, rule: Rule, *, peer: int, round: int | None, exact: bool = True, **facts: object) -> None:
        """A fault that befalls `peer`, in the round it is in. Exact: bound to the protocol and not to seconds."""
        kind = getattr(rule, "kind", "")
        line = {"t": _rounded(time.monotonic() - self._zero), "rule": rule.id, "kind": kind, "exact": exact}
        os.write(self._descriptor, (json.dumps(line | {"round": round, "peer": peer} | facts) + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
