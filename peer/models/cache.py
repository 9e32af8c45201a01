"""Where what was computed once on this machine is kept for the next time."""

import os
from pathlib import Path

CACHE_VARIABLE = "DISTILL_SWARM_CACHE"


def cache_folder() -> Path:
    """The folder that the environment names, else the user's usual place."""
    usual = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "distill-swarm"
    return Path(os.environ.get(CACHE_VARIABLE, usual)).expanduser()
