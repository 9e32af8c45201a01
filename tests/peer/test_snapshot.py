"""What travels is what the model holds: every floating tensor, in 32 bits exactly, in 16 bits rounded once."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from peer import snapshot
from peer.models import build, describe
from topology.file import ModelSpec
from transport.layout import Layout

SPEC = ModelSpec(name="cnn3", options={"width": 4})


def network(peer: int) -> nn.Module:
    return build(SPEC, (1, 8, 8), 10, seed=1, peer=peer)


def test_a_snapshot_holds_parameters_and_running_statistics_but_no_counters() -> None:
    names = set(snapshot.weights(network(0)))
    assert any("running_var" in name for name in names)
    assert not any("num_batches_tracked" in name for name in names)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_snapshot_travels_and_arrives(dtype: str) -> None:
    sender, receiver = network(0), network(1)
    # The receiver knows the layout without having seen the sender.
    layout = Layout(snapshot.fields(describe(SPEC, (1, 8, 8), 10), dtype))
    block = layout.pack(snapshot.to_wire(snapshot.named(sender), layout))
    assert block.nbytes == sum(
        tensor.numel() * (4 if dtype == "float32" else 2) for tensor in snapshot.weights(sender).values()
    )
    snapshot.load(receiver, snapshot.from_wire(layout.unpack(block), layout)[0])
    for name, tensor in snapshot.weights(sender).items():
        expected = tensor.to(snapshot.WIRE_TYPES[dtype]).to(torch.float32)
        assert torch.equal(snapshot.weights(receiver)[name], expected), name


def test_loading_copies() -> None:
    sender, receiver = network(0), network(1)
    layout = Layout(snapshot.fields(sender, "float32"))
    block = layout.pack(snapshot.to_wire(snapshot.named(sender), layout))
    snapshot.load(receiver, snapshot.from_wire(layout.unpack(block), layout)[0])
    block[:] = 0  # the transport uses the block again
    assert snapshot.digest(receiver) == snapshot.digest(sender)


def test_digest_sees_one_bit() -> None:
    one, other = network(0), network(0)
    assert snapshot.digest(one) == snapshot.digest(other) != snapshot.digest(network(1))
    with torch.no_grad():
        next(other.parameters()).view(-1).view(torch.int32)[0] ^= 1
    assert snapshot.digest(one) != snapshot.digest(other)


def test_checkpoint_is_whole_and_readable(tmp_path: Path) -> None:
    model = network(0)
    for round in (1, 2):
        snapshot.save(tmp_path, "checkpoint", model, {"peer": 0, "round": round})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.json", "checkpoint.safetensors"]
    assert json.loads((tmp_path / "checkpoint.json").read_text())["round"] == 2
    kept = load_file(tmp_path / "checkpoint.safetensors")
    assert {name: tensor.tolist() for name, tensor in kept.items()} == {
        name: tensor.tolist() for name, tensor in snapshot.weights(model).items()
    }
