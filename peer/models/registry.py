"""Builds the network a topology file names, with weights that depend on the seed and the peer alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from peer import own_code
from peer.models.plain import build_cnn3, build_cnn6, build_mlp
from peer.models.resnet import ResNet
from topology.errors import TopologyError
from topology.file import ModelSpec
from topology.mistakes import suggestion
from topology.seeds import stream_seed

Shape = tuple[int, int, int]  # (channels, height, width)


def build(
    spec: ModelSpec, shape: Shape, classes: int, seed: int, peer: int, class_names: tuple[str, ...] = ()
) -> nn.Module:
    """Build the network on the CPU with its initial weights; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also queue a seed for CUDA.
        torch.default_generator.manual_seed(stream_seed(seed, "init", peer))
        module = _construct(spec, shape, classes, class_names)
        if spec.name in _BUILDERS:
            _initialize(module)
    return module


def describe(spec: ModelSpec, shape: Shape, classes: int, class_names: tuple[str, ...] = ()) -> nn.Module:
    """Build the network on the meta device, to count its parameters without holding them, and check it.

    A `package.module:callable` is built for real first and given two black images, so that a wrong output is
    found here. (On the meta device a forward pass would import torch._dynamo: 2.6 s and 150 MB.)
    """
    if spec.name in _BUILDERS and spec.name not in _AROUND_BACKBONES:
        with torch.device("meta"):
            return _construct(spec, shape, classes, class_names)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module = _construct(spec, shape, classes, class_names).eval()
        try:
            output = module(torch.zeros(2, *shape))
        except Exception as error:
            raise _mistake(
                spec.name,
                f"its forward pass raised {type(error).__name__}: {error}. It must take a float32 tensor "
                f"(batch, {', '.join(map(str, shape))}).",
            ) from error
    got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if got != (2, classes):
        raise _mistake(spec.name, f"for 2 images it returned {got}; it must return logits (2, {classes}).")
    return module.to("meta")


def names() -> dict[str, str]:
    """The networks that exist here, each with one line about it."""
    return {name: (inspect.getdoc(builder) or "").splitlines()[0] for name, builder in _BUILDERS.items()}


def _resnet18(*, shape: Shape, classes: int) -> nn.Module:
    """ResNet-18 with a 3x3 stem; 11,173,962 parameters for 3 channels and 10 classes."""
    return ResNet(shape[0], classes, width=64, blocks=(2, 2, 2, 2), projection=True)


def _resnet18_half(*, shape: Shape, classes: int) -> nn.Module:
    """resnet18 with half the channels; 2,797,610 parameters for 3 channels and 10 classes."""
    return ResNet(shape[0], classes, width=32, blocks=(2, 2, 2, 2), projection=True)


def _resnet14(*, shape: Shape, classes: int) -> nn.Module:
    """ResNet-14 for CIFAR, 16/32/64 channels; 172,506 parameters for 3 channels and 10 classes."""
    return ResNet(shape[0], classes, width=16, blocks=(2, 2, 2), projection=False)


def _resnet20(*, shape: Shape, classes: int) -> nn.Module:
    """ResNet-20 for CIFAR, 16/32/64 channels; 269,722 parameters for 3 channels and 10 classes."""
    return ResNet(shape[0], classes, width=16, blocks=(3, 3, 3), projection=False)


def _resnet8(*, shape: Shape, classes: int, width: int = 16) -> nn.Module:
    """The shortest CIFAR ResNet, three blocks of width, 2*width and 4*width channels."""
    _require_positive("resnet8", "width", width)
    return ResNet(shape[0], classes, width=width, blocks=(1, 1, 1), projection=False)


def _cnn6(*, shape: Shape, classes: int) -> nn.Module:
    """Six convolutions and two linear layers; 814,570 parameters for 32x32x3 images and 10 classes."""
    _require_side("cnn6", shape, 8)
    return build_cnn6(shape, classes)


def _cnn3(*, shape: Shape, classes: int, width: int = 16) -> nn.Module:
    """Three convolutions of width, 2*width and 4*width channels, global average, one linear layer."""
    _require_positive("cnn3", "width", width)
    _require_side("cnn3", shape, 4)
    return build_cnn3(shape, classes, width)


def _mlp(*, shape: Shape, classes: int, hidden: tuple[int, ...] | list[int] = (256, 128)) -> nn.Module:
    """Multilayer perceptron without batch norm; 50,826 parameters for 8x8x1 images and 10 classes."""
    if not isinstance(hidden, (list, tuple)):
        raise _mistake("mlp", f"hidden = {hidden!r} must be a list of positive integers, such as [256, 128].")
    for size in hidden:
        _require_positive("mlp", "hidden, an entry of it,", size)
    return build_mlp(shape, classes, hidden)


def _clip(
    *,
    shape: Shape,
    classes: int,
    class_names: tuple[str, ...],
    folder: str,
    visual_tokens: int = 5,
    visual_blocks: int | None = None,
    context_tokens: int = 16,
    context_words: str = "",
) -> nn.Module:
    """Prompts around the frozen CLIP in a folder, as transformers saves it (ViT); needs the extra `clip`."""
    from peer.models.prompted import build_clip

    return build_clip(class_names, folder, visual_tokens, visual_blocks, context_tokens, context_words)


def _tiny_clip(
    *,
    shape: Shape,
    classes: int,
    class_names: tuple[str, ...],
    recipe: str,
    visual_tokens: int = 5,
    visual_blocks: int | None = None,
    context_tokens: int = 4,
    context_words: str = "",
) -> nn.Module:
    """Prompts around a small frozen CLIP that `swarm pretrain-clip` has trained; needs the extra `clip`."""
    from peer.models.prompted import build_tiny_clip

    return build_tiny_clip(class_names, recipe, visual_tokens, visual_blocks, context_tokens, context_words)


_AROUND_BACKBONES = ("clip", "tiny-clip")

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": _resnet18,
    "resnet18_half": _resnet18_half,
    "cnn6": _cnn6,
    "resnet14": _resnet14,
    "resnet20": _resnet20,
    "resnet8": _resnet8,
    "cnn3": _cnn3,
    "mlp": _mlp,
    "clip": _clip,
    "tiny-clip": _tiny_clip,
}


def _mistake(name: str, text: str) -> TopologyError:
    return TopologyError(f"model {name!r} (in models.pool or a [[peer]]): {text}")


def _require_positive(model: str, option: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _mistake(model, f"{option} = {value!r} must be a positive integer.")


def _require_side(model: str, shape: Shape, least: int) -> None:
    if min(shape[1:]) < least:
        raise _mistake(model, f"{shape[1]}x{shape[2]} images are too small; it takes {least}x{least} and up.")


def _construct(spec: ModelSpec, shape: Shape, classes: int, class_names: tuple[str, ...]) -> nn.Module:
    builder = _BUILDERS.get(spec.name) or _import_callable(spec.name)
    given = {"class_names": class_names} if spec.name in _AROUND_BACKBONES else {}
    _check_options(spec, builder, given)
    try:
        module = builder(shape=shape, classes=classes, **given, **spec.options)
    except TopologyError:
        raise
    except Exception as error:
        raise _mistake(
            spec.name,
            f"calling it with shape={shape}, classes={classes} and the options {spec.options} raised "
            f"{type(error).__name__}: {error}",
        ) from error
    if not isinstance(module, nn.Module):
        raise _mistake(spec.name, f"it returned a {type(module).__name__}, not a torch.nn.Module.")
    return module


def _initialize(module: nn.Module) -> None:
    # Not in the constructors: on the meta device drawing from a normal distribution imports torch._dynamo.
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")


def _check_options(spec: ModelSpec, builder: Callable[..., Any], given: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(builder)
    except ValueError:  # some callables written in C have no signature; calling them will tell
        return
    try:
        signature.bind(shape=(), classes=0, **given, **spec.options)
    except TypeError as error:
        taken = [
            str(parameter.replace(annotation=inspect.Parameter.empty))
            for name, parameter in signature.parameters.items()
            if name not in ("shape", "classes", "class_names")
        ]
        raise _mistake(
            spec.name,
            f"it cannot be called with shape, classes and the options {spec.options}: {error}. "
            f"Besides shape and classes it accepts {', '.join(taken) or 'no options'}.",
        ) from error


def _import_callable(name: str) -> Callable[..., Any]:
    if ":" not in name:
        raise _mistake(
            name,
            f"there is no such model.{suggestion(name, _BUILDERS)} There are {', '.join(_BUILDERS)}; one of "
            "your own is written package.module:callable.",
        )
    try:
        found = own_code.load(name)
    except own_code.OwnCodeError as error:
        raise _mistake(name, str(error)) from error
    if not callable(found):
        raise _mistake(name, f"{name} is there, but it cannot be called.")
    return found
