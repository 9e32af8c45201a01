"""A model as it travels and as it is kept: its floating parameters and buffers, in order, in 32 or 16 bits.

Step counters and other integer buffers stay at home: a teacher in evaluation mode does not use them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as safetensors
from torch import Tensor, nn

from transport.layout import Field, Layout, seal

WIRE_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

COUNTS = {"n", "counts", "selected", "quota"}
"""What comes beside weights and counts something. Accuracies come as "a"."""


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The floating parameters and buffers of a model, by name: what a snapshot holds. No copy, no gradient."""
    return {name: tensor.detach() for name, tensor in _named(model) if tensor.is_floating_point()}


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def fields(model: nn.Module, dtype: str) -> tuple[Field, ...]:
    """The layout of a model's snapshot on the wire."""
    return tuple(Field(f"model.{name}", dtype, tuple(tensor.shape)) for name, tensor in weights(model).items())


def named(model: nn.Module) -> dict[str, Tensor]:
    """A model's snapshot as the tensors of a message."""
    return {f"model.{name}": tensor for name, tensor in weights(model).items()}


def to_wire(tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, np.ndarray]:
    """Tensors as buffers for `Layout.pack`, each in the type that the layout gives it."""
    types = {field.name: field.dtype for field in layout.fields}
    return {
        name: encode(tensor, types[name]) if types.get(name) in WIRE_TYPES else tensor.cpu().numpy()
        for name, tensor in tensors.items()
    }


def encode(tensor: Tensor, dtype: str) -> np.ndarray:
    """A tensor as a numpy array of a wire type. bfloat16 becomes its bits, for numpy has no such type."""
    sent = tensor.detach().to("cpu", WIRE_TYPES[dtype])
    return (sent.view(torch.uint16) if dtype == "bfloat16" else sent).numpy()


def decode(buffer: np.ndarray, dtype: str) -> Tensor:
    """The inverse of `encode`; shares the buffer's memory."""
    tensor = torch.from_numpy(buffer)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def from_wire(buffers: Mapping[str, np.ndarray], layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A received message: the weights in it, by name, and what came beside; they share the message's memory."""
    types = {field.name: field.dtype for field in layout.fields}
    tensors = {name: decode(buffer, types[name]) for name, buffer in buffers.items()}
    beside = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.")}
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name not in beside}, beside


def nonsense(weights: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> str | None:
    """Why nobody can use a message: weights that are no numbers, or statistics that nobody can have measured."""
    if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
        return "its weights are not finite"
    counted = all(bool((extras[name] >= 0).all()) for name in COUNTS & extras.keys())
    if not counted or ("a" in extras and not bool(((extras["a"] >= 0) & (extras["a"] <= 1)).all())):
        return "its statistics are no counts and fractions"
    return None


@torch.no_grad()
def load(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy weights into a model of the same architecture."""
    for name, tensor in weights(model).items():
        tensor.copy_(values[name])


def digest(model: nn.Module) -> str:
    """64 bits that tell two states of one architecture apart, as 16 hexadecimal digits."""
    layout = Layout(fields(model, "float32"))
    return f"{seal(layout, layout.pack(to_wire(named(model), layout)), 2**20).digest:016x}"


def save(folder: Path, name: str, model: nn.Module, facts: Mapping[str, object]) -> None:
    """Write a model to NAME.safetensors and what it is to NAME.json, each whole or not at all."""
    save_tensors(folder / f"{name}.safetensors", weights(model))
    _replace(folder / f"{name}.json", json.dumps(dict(facts), indent=2).encode())


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors to a file, whole or not at all."""
    _replace(path, tensors_file(tensors))


def tensors_file(tensors: Mapping[str, Tensor]) -> bytes:
    """Named tensors as a safetensors file holds them."""
    return safetensors({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
