"""Independent random streams: each depends on the run's seed and the names of its purpose, and on nothing else."""

import hashlib
import json

import numpy as np


def stream_seed(seed: int, *names: str | int) -> int:
    """Derive a 63-bit seed for one purpose: `stream_seed(1024, "init", 3)`. Other names, unrelated seed."""
    # JSON tells 1 from "1" and ("a", "b") from ("ab",), and refuses what has no lasting spelling.
    spelled = json.dumps(names).encode()
    digest = hashlib.blake2b(spelled, key=str(seed).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Start the random generator of one purpose."""
    return np.random.Generator(np.random.PCG64(stream_seed(seed, *names)))
