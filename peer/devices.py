"""Which device each peer computes on. Looking for devices never initializes CUDA, for it could not be forked then."""

import json
import os
import subprocess
import sys

from topology import Topology, TopologyError

# Counting through NVML leaves no CUDA context behind.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


CUDA_CONTEXT_MB = 600.0
"""Device memory that a process takes before its first tensor."""


def visible_devices() -> int:
    """How many CUDA devices there are, after CUDA_VISIBLE_DEVICES."""
    import torch

    return torch.cuda.device_count()


def free_device_mb() -> dict[str, float]:
    """Free memory of each visible CUDA device, asked for in another process: asking leaves a context."""
    question = (
        "import json, torch; "
        "print(json.dumps([torch.cuda.mem_get_info(i)[0] / 1e6 for i in range(torch.cuda.device_count())]))"
    )
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, timeout=120)
    if answer.returncode != 0:
        raise TopologyError(f"devices.assign: the CUDA devices cannot be used: {answer.stderr.strip()[-500:]}")
    return {f"cuda:{index}": free for index, free in enumerate(json.loads(answer.stdout))}


def assign_devices(topology: Topology) -> tuple[str, ...]:
    """The device of each peer. "auto" deals the visible CUDA devices round robin, or takes the CPU without any."""
    assign = topology.devices.assign
    peers = range(topology.swarm.peers)
    wanted = [override.device for i in peers if (override := topology.override(i)) is not None and override.device]
    count = 0 if assign == "cpu" and not any(device.startswith("cuda") for device in wanted) else visible_devices()
    if assign == "auto":
        pool = [f"cuda:{index}" for index in range(count)] or ["cpu"]
    else:
        pool = [assign] if isinstance(assign, str) else list(assign)
    devices = []
    for i in peers:
        override = topology.override(i)
        own = override is not None and override.device
        device = str(own) if own else pool[i % len(pool)]
        key = f"[[peer]] {i}: device" if own else "devices.assign"
        devices.append(_checked(device, key, count))
    return tuple(devices)


def _checked(device: str, key: str, count: int) -> str:
    there = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
    device = "cuda:0" if device == "cuda" else device
    if device != "cpu" and device not in {f"cuda:{index}" for index in range(count)}:
        raise TopologyError(f"{key}: there is no device {device!r} on this machine. There is: {there}")
    return device
