"""Two peers share one CUDA device in a real swarm, and CRAD's target is the CPU's within float tolerance."""

import json
import sys
import tempfile
from pathlib import Path

import tomli_w
import torch
from machine import SWARM, Bars, describe, watch

from peer.methods.crad import class_target
from peer.methods.distillation import soften
from peer.models import build
from topology.file import ModelSpec


def largest_difference() -> float:
    """Between the targets of CPU and CUDA, teachers' forward passes included."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, 32, 32, generator=generator)
    n = torch.randint(0, 50, (4, 10), generator=generator, dtype=torch.int32)
    a = torch.rand(4, 10, generator=generator)
    teachers = [build(ModelSpec(name="cnn6"), (3, 32, 32), 10, seed=1, peer=j).eval() for j in range(4)]
    targets = []
    for device in ("cpu", "cuda:0"):
        with torch.no_grad():
            q = torch.stack([soften(teacher.to(device)(x.to(device)), 3.0) for teacher in teachers])
        targets.append(class_target(q, n.to(device), a.to(device)).cpu())
    return float((targets[0] - targets[1]).abs().max())


def main() -> None:
    print(describe())
    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing to check")
        sys.exit(0)
    print(f"device    {torch.cuda.get_device_name(0)}")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    bars = Bars()
    bars.at_most("largest difference between the targets of CPU and CUDA", largest_difference(), 1e-4)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        out, file = Path(name) / "run", Path(name) / "swarm.toml"
        topology = {
            "swarm": {"name": "gpu-check", "peers": 2, "rounds": 2},
            "models": {"pool": ["cnn6"]},
            "devices": {"assign": "cuda:0"},
        }
        file.write_text(tomli_w.dumps(topology))
        used = watch([*SWARM, "run", str(file), "--out", str(out)], Path(name) / "output.txt", memory=False)
        print(used.output)
        bars.equal("exit status of the swarm", used.status, 0)
        started = [json.loads(path.read_text().splitlines()[0]) for path in out.glob("peers/*/events.jsonl")]
        bars.equal("devices of the peers", [event["device"] for event in started], ["cuda:0", "cuda:0"])
    bars.exit()


if __name__ == "__main__":
    main()
