"""A model as it travels and as it is kept: its floating parameters and buffers, in order, in 32 or 16 bits.

Step counters and other integer buffers stay at home: a teacher in evaluation mode does not use them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from transport.layout import Field, Layout, seal

WIRE_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The floating parameters and buffers of a model, by name: what a snapshot holds. No copy, no gradient."""
    return {name: tensor.detach() for name, tensor in _named(model) if tensor.is_floating_point()}


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def fields(model: nn.Module, dtype: str) -> tuple[Field, ...]:
    """The layout of a model's snapshot on the wire."""
    return tuple(Field(f"model.{name}", dtype, tuple(tensor.shape)) for name, tensor in weights(model).items())


def to_wire(model: nn.Module, dtype: str) -> dict[str, np.ndarray]:
    """A model's snapshot as buffers for `Layout.pack`."""
    return {f"model.{name}": encode(tensor, dtype) for name, tensor in weights(model).items()}


def encode(tensor: Tensor, dtype: str) -> np.ndarray:
    """A tensor as a numpy array of a wire type. bfloat16 becomes its bits, for numpy has no such type."""
    sent = tensor.detach().to("cpu", WIRE_TYPES[dtype])
    return (sent.view(torch.uint16) if dtype == "bfloat16" else sent).numpy()


def decode(buffer: np.ndarray, dtype: str) -> Tensor:
    """The inverse of `encode`; shares the buffer's memory."""
    tensor = torch.from_numpy(buffer)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def received(buffers: Mapping[str, np.ndarray], dtype: str) -> dict[str, Tensor]:
    """The weights in a received message, by name; they share the message's memory."""
    return {
        name.removeprefix("model."): decode(buffer, dtype)
        for name, buffer in buffers.items()
        if name.startswith("model.")
    }


@torch.no_grad()
def load(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy weights into a model of the same architecture."""
    for name, tensor in weights(model).items():
        tensor.copy_(values[name])


def digest(model: nn.Module) -> str:
    """64 bits that tell two states of one architecture apart, as 16 hexadecimal digits."""
    layout = Layout(fields(model, "float32"))
    return f"{seal(layout, layout.pack(to_wire(model, 'float32')), 2**20).digest:016x}"


def checkpoint(model: nn.Module) -> bytes:
    """A model's weights as a safetensors file holds them."""
    return save({name: tensor.cpu().contiguous() for name, tensor in weights(model).items()})


def save_checkpoint(folder: Path, model: nn.Module, facts: Mapping[str, object]) -> None:
    """Write `checkpoint.safetensors` and what it is in `checkpoint.json`, each whole or not at all."""
    _replace(folder / "checkpoint.safetensors", checkpoint(model))
    _replace(folder / "checkpoint.json", json.dumps(dict(facts), indent=2).encode())


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
