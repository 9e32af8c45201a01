"""A peer's diary: one JSON object a line, each written whole with one system call at the moment the thing happens."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any


class Journal:
    """Appends to `events.jsonl`, from any thread; `t` counts seconds from `zero` on the machine's monotonic clock."""

    def __init__(self, path: Path, zero: float) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._zero = zero

    def write(self, event: str, facts: dict[str, Any]) -> None:
        line = {"event": event, "t": round(time.monotonic() - self._zero, 6)} | facts
        os.write(self._descriptor, (json.dumps(_finite(line), allow_nan=False) + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as text, not lost."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
