"""Guarantees a frozen CLIP that prompts steer from outside: deep visual prompts and learnt text contexts.

Visual prompts as in VPT (Jia et al. 2022), deep, and text contexts as in CoOp (Zhou et al. 2022), one for all
classes. The model's own forward pass is never rewritten: hooks put the prompts in for one call and are gone after it,
so one model serves everybody. Gradients flow through the frozen blocks to the prompts, and no further.

Shapes: B images, C classes, d joint features; L_p blocks with n_v prompt tokens each, of width W; n_ctx context
tokens, of width W_t.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from peer.models.cache import cache_folder
from peer.models.words import Tokenizer
from topology.errors import TopologyError
from topology.seeds import stream_seed

if TYPE_CHECKING:
    from transformers import CLIPModel  # only here: importing it takes seconds, and only runs with a CLIP need it

PROMPT_DEVIATION = 0.02
# Channel means and standard deviations of the images OpenAI's models were trained on.
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class Backbone(Protocol):
    """What FedBST needs of an image-text model. Features are (…, d) and not yet of unit length."""

    tokenizer: Tokenizer

    @property
    def depth(self) -> int:
        """Blocks of the image tower."""

    @property
    def width(self) -> int:
        """Of an image token, W."""

    @property
    def text_width(self) -> int:
        """Of a text token, W_t."""

    @property
    def dimension(self) -> int:
        """Of the features, d."""

    @property
    def context_length(self) -> int:
        """How many tokens the text tower reads."""

    @property
    def scale(self) -> float:
        """The frozen factor of the logits, s."""

    def encode_images(self, images: Tensor, visual: Tensor | None = None) -> Tensor:
        """Features (B, d) of images (B, channels, side, side), under a visual prompt (L_p, n_v, W)."""

    def encode_texts(self, ids: Tensor, context: Tensor | None = None) -> Tensor:
        """Features (C, d) of token ids (C, L), a context (n_ctx, W_t) in place of tokens 1..n_ctx."""

    def embed(self, ids: Tensor) -> Tensor:
        """The text tower's embeddings (…, W_t) of token ids, to begin a context from words."""


class FrozenClip:
    """`transformers`' CLIPModel with a vision transformer, as a `Backbone`."""

    def __init__(self, model: CLIPModel, tokenizer: Tokenizer) -> None:
        """Freezes `model` and puts it into float32. Raises ValueError for a model that is no CLIP with a ViT."""
        vision = getattr(model, "vision_model", None)
        if type(model).__name__ != "CLIPModel" or not isinstance(getattr(vision, "pre_layrnorm", None), nn.Module):
            raise ValueError(
                f"a {type(model).__name__} cannot take deep visual prompts: they are tokens put before each block of "
                "a vision transformer. Use transformers' CLIPModel, such as ViT-B/32 or ViT-B/16"
            )
        self._model: Any = model.float().eval().requires_grad_(False)
        self.tokenizer = tokenizer
        end = self._model.config.text_config.eos_token_id
        if tokenizer.end != end and not (end == 2 and tokenizer.end == self._model.config.text_config.vocab_size - 1):
            raise ValueError(
                f"the tokenizer ends a text with {tokenizer.end}, the text tower looks for {end}: they do not belong "
                "together"
            )

    @property
    def model(self) -> nn.Module:
        module: nn.Module = self._model
        return module

    @property
    def depth(self) -> int:
        return len(self._blocks)

    @property
    def width(self) -> int:
        return int(self._model.config.vision_config.hidden_size)

    @property
    def side(self) -> int:
        """Of the square images it reads, in pixels."""
        return int(self._model.config.vision_config.image_size)

    @property
    def channels(self) -> int:
        return int(self._model.config.vision_config.num_channels)

    @property
    def text_width(self) -> int:
        return int(self._model.config.text_config.hidden_size)

    @property
    def dimension(self) -> int:
        return int(self._model.config.projection_dim)

    @property
    def context_length(self) -> int:
        return int(self._model.config.text_config.max_position_embeddings)

    @property
    def scale(self) -> float:
        return float(self._model.logit_scale.exp())

    @property
    def _blocks(self) -> Sequence[nn.Module]:
        blocks: Sequence[nn.Module] = self._model.vision_model.encoder.layers
        return blocks

    @property
    def _embedding(self) -> nn.Module:
        embedding: nn.Module = self._model.text_model.embeddings.token_embedding
        return embedding

    def encode_images(self, images: Tensor, visual: Tensor | None = None) -> Tensor:
        """Before block i the n_v tokens of `visual`[i] join the others, behind them; after it they are taken off.

        They come after position embedding and layer norm, and there may be fewer of them than blocks.
        """
        with _visual_prompt(self._blocks, self._check_visual(visual)):
            features: Tensor = self._model.get_image_features(pixel_values=images).pooler_output
        return features

    def encode_texts(self, ids: Tensor, context: Tensor | None = None) -> Tensor:
        """`ids` are `context_ids` where there is a context, with as many placeholders as it has tokens."""
        with _text_context(self._embedding, self._check_context(ids, context)):
            features: Tensor = self._model.get_text_features(input_ids=ids).pooler_output
        return features

    def embed(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self._embedding(ids)
        return embedded

    def _check_visual(self, visual: Tensor | None) -> Sequence[Tensor]:
        if visual is None:
            return ()
        if visual.dim() != 3 or len(visual) > self.depth or visual.shape[2] != self.width:
            raise ValueError(
                f"the visual prompt has shape {tuple(visual.shape)}; it must be (blocks, tokens, width), at most "
                f"{self.depth} blocks and width {self.width}"
            )
        return tuple(visual)

    def _check_context(self, ids: Tensor, context: Tensor | None) -> Tensor | None:
        if context is None:
            return None
        if context.dim() != 2 or context.shape[1] != self.text_width:
            raise ValueError(
                f"the context has shape {tuple(context.shape)}; it must be (tokens, width {self.text_width})"
            )
        if (ids[:, 1 : 1 + len(context)] != self.tokenizer.placeholder).any() or ids.shape[1] < 2 + len(context):
            raise ValueError(f"the ids have no {len(context)} placeholders for the context to replace; see context_ids")
        return context


def visual_prompt(backbone: Backbone, tokens: int, seed: int, *, blocks: int | None = None) -> Tensor:
    """A first visual prompt (L_p, n_v, W) from N(0, 0.02^2), the same for the same seed; all blocks but the last."""
    return _draw((backbone.depth - 1 if blocks is None else blocks, tokens, backbone.width), seed, "visual prompt")


def text_context(backbone: Backbone, tokens: int, seed: int) -> Tensor:
    """A first text context (n_ctx, W_t) from N(0, 0.02^2), the same for the same seed."""
    return _draw((tokens, backbone.text_width), seed, "text context")


def context_of_words(backbone: Backbone, words: str) -> Tensor:
    """A first text context (n_ctx, W_t) that says `words`, such as "a photo of a"."""
    return backbone.embed(torch.tensor(backbone.tokenizer(words))).detach().clone()


def logits(features: Tensor, texts: Tensor, scale: float) -> Tensor:
    """s z . t (B, C), features (B, d) and texts (C, d) brought to unit length first."""
    return scale * F.normalize(features, dim=1) @ F.normalize(texts, dim=1).T


class Images:
    """The images of one client as a backbone sees them; what no visual prompt changes is computed only once."""

    def __init__(self, backbone: Backbone, load: Callable[[Tensor], Tensor], count: int, batch_size: int = 256) -> None:
        """`load` gives the images (B, channels, side, side) at some of the indices 0..`count` - 1."""
        self._backbone, self._load, self._count, self._batch_size = backbone, load, count, batch_size
        self._plain: Tensor | None = None

    def features(self, chosen: Tensor | None = None, visual: Tensor | None = None) -> Tensor:
        """Features (B, d) of all images, or of those at the indices `chosen`; with a gradient to `visual` alone."""
        chosen = torch.arange(self._count) if chosen is None else chosen
        if visual is not None:
            return self._encode(chosen, visual)
        if self._plain is None:
            with torch.no_grad():
                self._plain = self._encode(torch.arange(self._count), None)
        return self._plain[chosen.to(self._plain.device)]

    def _encode(self, chosen: Tensor, visual: Tensor | None) -> Tensor:
        if len(chosen) == 0:
            return torch.zeros(0, self._backbone.dimension)
        pieces = (self._load(part) for part in torch.split(chosen, self._batch_size))
        return torch.cat([self._backbone.encode_images(piece, visual) for piece in pieces])


def preprocess(images: NDArray[np.uint8], side: int) -> Tensor:
    """What OpenAI's models see of images (B, H, W, 1 or 3): float32 (B, 3, side, side).

    The shorter side is brought to `side` by bicubic interpolation, the middle cut out, each channel normalized.
    """
    x = torch.from_numpy(np.array(images.transpose(0, 3, 1, 2), order="C"))
    height, width = x.shape[2:]
    factor = side / min(height, width)
    size = [max(side, int(factor * length)) for length in (height, width)]
    x = F.interpolate(x, size, mode="bicubic", antialias=True, align_corners=False)  # of bytes, as Pillow does it
    top, left = ((length - side) // 2 for length in size)
    x = x[:, :, top : top + side, left : left + side].expand(-1, 3, -1, -1)
    mean, std = (torch.tensor(moment).view(1, 3, 1, 1) for moment in (MEAN, STD))
    return (x / 255 - mean) / std


def load(folder: str | Path) -> FrozenClip:
    """A CLIP from a folder that `transformers` saved: config.json, weights and tokenizer. Nothing is ever downloaded.

    Raises `TopologyError` for a folder that is not there or incomplete, and for what is no CLIP with a ViT.
    """
    folder = Path(folder).expanduser()
    _check_folder(folder)
    transformers = import_transformers()
    try:
        model, found = transformers.CLIPModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        if missing := sorted(found["missing_keys"]):
            raise ValueError(f"its weights lack {missing[0]} and {len(missing) - 1} more")  # they would be random
        tokenizer = transformers.CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        return FrozenClip(model, BytePairs(tokenizer))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise TopologyError(f"the CLIP in {folder} cannot be loaded: {error}") from error


class BytePairs:
    """`transformers`' tokenizer of CLIP, as a `Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.start: int = tokenizer.bos_token_id
        self.end: int = tokenizer.eos_token_id
        self.placeholder = self("X")[0]

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def import_transformers() -> Any:
    """The package, imported here and not with this module; raises `TopologyError` saying how to install it."""
    # It imports torch's compiler, which would leave a folder in the place for temporary files.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torch"))
    try:
        import transformers
    except ImportError as error:
        raise TopologyError("a CLIP needs the package transformers: run `pip install 'distill-swarm[clip]'`") from error
    return transformers


def _check_folder(folder: Path) -> None:
    if "RN50" in folder.name or "RN101" in folder.name or _is_resnet(folder / "open_clip_config.json"):
        raise TopologyError(
            f"{folder} is a CLIP with a ResNet, which has no sequence of tokens between blocks, so that deep visual "
            "prompts do not exist there. Use one with a vision transformer, such as ViT-B/32 or ViT-B/16"
        )
    config = folder / "config.json"
    if not config.is_file():
        raise TopologyError(
            f"there is no CLIP in {folder}: it has no config.json. Models are not downloaded here; copy the files of "
            "e.g. openai/clip-vit-base-patch32 into a folder (config.json, model.safetensors or pytorch_model.bin, "
            "vocab.json, merges.txt) and give its path"
        )
    kind = json.loads(config.read_text()).get("model_type")
    if kind != "clip":
        raise TopologyError(
            f"{config} describes a model of type {kind!r}; it must be 'clip', with a vision transformer for images"
        )


def _is_resnet(config: Path) -> bool:
    """Whether an open_clip configuration has ResNet stages in place of a number of blocks."""
    if not config.is_file():
        return False
    vision = json.loads(config.read_text()).get("model_cfg", {}).get("vision_cfg", {})
    return isinstance(vision.get("layers"), list)


def _draw(shape: tuple[int, ...], seed: int, purpose: str) -> Tensor:
    generator = torch.Generator().manual_seed(stream_seed(seed, purpose))
    return PROMPT_DEVIATION * torch.randn(shape, generator=generator)


@contextmanager
def _visual_prompt(blocks: Sequence[nn.Module], visual: Sequence[Tensor]) -> Iterator[None]:
    def put_in(_: nn.Module, inputs: tuple[Tensor, ...], *, tokens: Tensor) -> tuple[Tensor, ...]:
        seen = inputs[0]
        return torch.cat([seen, tokens.expand(len(seen), -1, -1)], 1), *inputs[1:]

    def take_off(_: nn.Module, __: tuple[Tensor, ...], output: Tensor, *, tokens: Tensor) -> Tensor:
        return output[:, : output.shape[1] - len(tokens)]

    handles = []
    try:
        for block, tokens in zip(blocks, visual, strict=False):
            handles.append(block.register_forward_pre_hook(partial(put_in, tokens=tokens)))
            handles.append(block.register_forward_hook(partial(take_off, tokens=tokens)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _text_context(embedding: nn.Module, context: Tensor | None) -> Iterator[None]:
    if context is None:
        yield
        return

    def replace(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return torch.cat([output[:, :1], context.expand(len(output), -1, -1), output[:, 1 + len(context) :]], 1)

    handle = embedding.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()
