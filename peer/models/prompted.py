"""A frozen CLIP as a peer's model: what learns, travels and is kept of it are its prompts alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from peer.models import clip, tiny_clip
from peer.models.cache import cache_folder
from peer.models.words import context_ids, sentence_ids
from topology.errors import TopologyError
from topology.mistakes import suggestion

if TYPE_CHECKING:
    from peer.data.sets import DataSet


class PromptedClip(nn.Module):
    """A visual prompt (L_p, n_v, W) and a text context (n_ctx, W_t), one for all classes, around a backbone.

    The backbone is no part of the module: it has no parameter that learns, and one serves all peers of a machine.
    """

    def __init__(
        self, backbone: clip.FrozenClip, names: tuple[str, ...], visual: tuple[int, int], context_tokens: int
    ) -> None:
        super().__init__()
        blocks, tokens = visual
        self.visual = nn.Parameter(clip.PROMPT_DEVIATION * torch.randn(blocks, tokens, backbone.width))
        self.context = nn.Parameter(clip.PROMPT_DEVIATION * torch.randn(context_tokens, backbone.text_width))
        limit = backbone.context_length
        self._frozen = (backbone,)  # in a tuple, so that torch does not take it for a part
        self.ids = context_ids(backbone.tokenizer, names, context_tokens, limit)
        self.sentences = sentence_ids(backbone.tokenizer, names, limit)

    @property
    def backbone(self) -> clip.FrozenClip:
        return self._frozen[0]

    def texts(self) -> Tensor:
        """Features (C, d) of the classes under the learnt context."""
        return self.backbone.encode_texts(self.ids, self.context)

    @torch.no_grad()
    def plain_texts(self) -> Tensor:
        """Features (C, d) of "a photo of a {name}"."""
        return self.backbone.encode_texts(self.sentences)

    def see(self, images: NDArray[np.uint8], data: DataSet) -> Tensor:
        """Images (B, H, W, C) of a data set as the backbone reads them."""
        fits = data.shape == (self.backbone.channels, self.backbone.side, self.backbone.side)
        return data.normalize(images) if fits else clip.preprocess(images, self.backbone.side)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C) under both prompts, of images that are normalized already, whatever their size."""
        side, channels = self.backbone.side, self.backbone.channels
        if x.shape[2:] != (side, side):
            x = F.interpolate(x, (side, side), mode="bicubic", align_corners=False)
        features = self.backbone.encode_images(x.expand(-1, channels, -1, -1), self.visual)
        return clip.logits(features, self.texts(), self.backbone.scale)


def build_clip(
    names: tuple[str, ...],
    folder: str,
    visual_tokens: int,
    visual_blocks: int | None,
    context_tokens: int,
    context_words: str,
) -> PromptedClip:
    return _prompted(_saved(folder), names, visual_tokens, visual_blocks, context_tokens, context_words)


def build_tiny_clip(
    names: tuple[str, ...],
    recipe: str,
    visual_tokens: int,
    visual_blocks: int | None,
    context_tokens: int,
    context_words: str,
) -> PromptedClip:
    if recipe not in tiny_clip.RECIPES:
        raise TopologyError(
            f"model 'tiny-clip': there is no recipe {recipe!r}.{suggestion(recipe, tiny_clip.RECIPES)} There are "
            f"{', '.join(tiny_clip.RECIPES)}"
        )
    return _prompted(_trained(recipe), names, visual_tokens, visual_blocks, context_tokens, context_words)


def _prompted(
    backbone: clip.FrozenClip,
    names: tuple[str, ...],
    tokens: int,
    blocks: int | None,
    context_tokens: int,
    context_words: str,
) -> PromptedClip:
    visual = (backbone.depth - 1 if blocks is None else blocks, tokens)
    if not context_words:
        return PromptedClip(backbone, names, visual, context_tokens)
    said = clip.context_of_words(backbone, context_words)
    model = PromptedClip(backbone, names, visual, len(said))
    model.context.data.copy_(said)
    return model


@cache
def _saved(folder: str) -> clip.FrozenClip:
    path = Path(folder).expanduser()
    return clip.load(path if path.exists() or folder.count("/") != 1 else _download(folder))


def _download(name: str) -> Path:
    """The folder of a model on the Hugging Face hub, from its cache or, when the network allows, from there."""
    clip.import_transformers()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "merges.txt"]))
    except (OSError, ValueError) as error:
        raise TopologyError(
            f"model 'clip': folder = {name!r}: there is no such folder, and no model of that name could be had from "
            f"the hub: {error}. Name a folder that transformers' save_pretrained wrote"
        ) from error


@cache
def _trained(recipe: str) -> clip.FrozenClip:
    from peer.data import sets

    known = tiny_clip.RECIPES[recipe]
    path = tiny_clip.file(known, cache_folder())
    if not path.is_file():
        raise TopologyError(
            f"model 'tiny-clip': {path} is not there: the model of the recipe {recipe!r} has to be trained first, once "
            f"on this machine: swarm pretrain-clip {recipe}"
        )
    return tiny_clip.obtain(known, sets.load(known.data), cache_folder())
