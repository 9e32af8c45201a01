"""Guarantees a small CLIP that really knows something, trained here from a recipe and kept under the recipe's hash.

Real CLIP weights cannot always be had. This one goes through the very code that real ones do, knows the class names
of one data set, and is weaker on some classes, as CLIP is. It learns from images that no peer ever gets: see `split`.
The same recipe gives the same bytes on the same kind of machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peer.data.shard import evaluation_batches
from peer.models import clip
from peer.models.words import TEMPLATE, WordList, sentence_ids, spell
from topology.errors import TopologyError
from topology.seeds import stream, stream_seed

if TYPE_CHECKING:
    from numpy.random import Generator
    from transformers import CLIPModel  # only here: importing it takes seconds, and only runs with a CLIP need it

    from peer.data.sets import DataSet

CAPTIONS = (
    *(TEMPLATE, "a photo of a {}.", "a picture of a {}.", "a small photo of a {}.", "a blurry photo of a {}."),
    *("an image of one {}.", "this is a {}.", "{}."),
)
TEXT_POSITIONS = 24
HIGHEST_SCALE = 100.0
VERSION = 1  # of this file's arithmetic: a change that gives other weights from the same recipe raises it


@dataclass(frozen=True)
class Recipe:
    """All that the weights depend on, beside the data set itself."""

    data: str
    images: int  # how many training images are kept from the peers, to learn from
    least: float  # the share kept of the rarest class; the others lie between it and 1, geometrically
    patch: int  # side of an image token, in pixels
    width: int
    layers: int
    heads: int
    text_width: int
    text_layers: int
    text_heads: int
    dimension: int  # of the joint features
    epochs: int
    batch_size: int
    rate: float = 1e-3  # AdamW's
    weight_decay: float = 0.05
    start_scale: float = 10.0  # of the logits
    shift: float = 0.1  # images are moved by up to this share of their side
    seed: int = 1

    @property
    def digest(self) -> str:
        """The name its weights are kept under."""
        spelled = json.dumps([VERSION, CAPTIONS, asdict(self)], sort_keys=True).encode()
        return hashlib.blake2b(spelled, digest_size=8).hexdigest()


RECIPES = {
    "fashion-mnist": Recipe(
        *("fashion-mnist", 20_000, 0.1, 7, 96, 4, 4, 64, 2, 4, 48),
        epochs=15,
        batch_size=256,
    ),
    "digits": Recipe("digits", 700, 1.0, 2, 48, 3, 4, 32, 2, 4, 32, epochs=30, batch_size=64),
}


def split(recipe: Recipe, data: DataSet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the training images this model may learn from, and of those that are left for the peers.

    The first are then thinned out, class by class, by `thin`. Raises `TopologyError` where nothing would be left.
    """
    count = len(data.y_train)
    if data.name != recipe.data or recipe.images >= count:
        raise TopologyError(
            f"the recipe takes {recipe.images} training images of {recipe.data!r}; {data.name!r} has {count}, and the "
            "peers need some as well"
        )
    order = stream(recipe.seed, "tiny clip", "split").permutation(count)
    return np.sort(order[: recipe.images]), np.sort(order[recipe.images :])


def thin(recipe: Recipe, labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Which of the images with these labels are learnt from: of the classes, in a drawn order, fewer and fewer."""
    draw = stream(recipe.seed, "tiny clip", "thin")
    kept = []
    for place, label in enumerate(draw.permutation(classes)):
        of_class = draw.permutation(np.flatnonzero(labels == label))
        share = recipe.least ** (place / max(classes - 1, 1))
        kept.append(of_class[: math.ceil(share * len(of_class))])
    return np.sort(np.concatenate(kept))


def build(recipe: Recipe, data: DataSet) -> tuple[CLIPModel, WordList]:
    """The model with its first weights, and its vocabulary."""
    transformers = clip.import_transformers()
    channels, height, width = data.shape
    if height != width or height % recipe.patch:
        raise TopologyError(
            f"{data.name!r} has images of {height}x{width}; this CLIP reads squares that tokens of "
            f"{recipe.patch}x{recipe.patch} fill"
        )
    words = _words(data)
    text = {
        "vocab_size": words.size,
        "hidden_size": recipe.text_width,
        "intermediate_size": 2 * recipe.text_width,
        "num_hidden_layers": recipe.text_layers,
        "num_attention_heads": recipe.text_heads,
        "max_position_embeddings": TEXT_POSITIONS,
        "bos_token_id": words.start,
        "eos_token_id": words.end,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": recipe.width,
        "intermediate_size": 2 * recipe.width,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "image_size": height,
        "patch_size": recipe.patch,
        "num_channels": channels,
    }
    config = transformers.CLIPConfig(
        text_config=text,
        vision_config=vision,
        projection_dim=recipe.dimension,
        logit_scale_init_value=math.log(recipe.start_scale),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream_seed(recipe.seed, "tiny clip", "init"))
        return transformers.CLIPModel(config), words


def matching_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """CLIP's loss for B images and one caption of each of C classes, a scalar in nats; logits (B, C), labels (B,).

    The mean of two cross-entropies: of each image's caption among all captions, and of each present class's images
    among all images, as many positives as it has. (CLIP's own would take the class's other images for negatives.)
    """
    of_class = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    present = of_class.sum(0) > 0
    among_images = -(logits.log_softmax(0) * of_class).sum(0)[present] / of_class.sum(0)[present]
    return (F.cross_entropy(logits, labels) + among_images.mean()) / 2


def train(
    recipe: Recipe, data: DataSet, after_epoch: Callable[[int, float], None] = lambda epoch, loss: None
) -> clip.FrozenClip:
    """Learn from the images that `split` and `thin` leave; `after_epoch` is told each epoch's number and mean loss.

    On one thread, so that the sums come out the same wherever it runs.
    """
    model, words = build(recipe, data)
    indices, _ = split(recipe, data)
    indices = indices[thin(recipe, data.y_train[indices], data.classes)]
    captions = torch.stack(
        [F.pad(ids, (0, TEXT_POSITIONS - ids.shape[1])) for ids in _captions(words, data.class_names)]
    )  # (templates, C, positions)
    draw = stream(recipe.seed, "tiny clip", "train")
    learner: Any = model  # transformers' types do not say what its methods return
    learner.train()
    optimizer = torch.optim.AdamW(model.parameters(), recipe.rate, weight_decay=recipe.weight_decay)
    with _one_thread():
        for epoch in range(1, recipe.epochs + 1):
            losses = []
            for images, labels in _batches(recipe, data, indices, draw):
                said = captions[torch.from_numpy(draw.integers(len(CAPTIONS), size=data.classes)), range(data.classes)]
                texts = learner.get_text_features(
                    input_ids=said[:, : int((said == words.end).nonzero()[:, 1].max()) + 1]
                )
                seen = learner.get_image_features(pixel_values=images)
                scale = model.logit_scale.exp().clamp(max=HIGHEST_SCALE)
                loss = matching_loss(clip.logits(seen.pooler_output, texts.pooler_output, scale), labels)
                if not loss.isfinite():
                    raise FloatingPointError(f"epoch {epoch}: the loss is {loss.item()}; lower the recipe's rate")
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                losses.append(loss.item())
            after_epoch(epoch, sum(losses) / len(losses))
    return clip.FrozenClip(model, words)


def obtain(
    recipe: Recipe, data: DataSet, folder: Path, after_epoch: Callable[[int, float], None] = lambda epoch, loss: None
) -> clip.FrozenClip:
    """The recipe's model from its file in `folder`; where there is none, it is trained and kept."""
    path = file(recipe, folder)
    if path.is_file():
        return _read(recipe, data, path)
    backbone = train(recipe, data, after_epoch)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    metadata = {"recipe": json.dumps(asdict(recipe)), "words": json.dumps(_words(data).words)}
    safetensors.torch.save_file(backbone.model.state_dict(), unfinished, metadata)
    unfinished.replace(path)  # whole or not at all, also when two train at once
    return backbone


def file(recipe: Recipe, folder: Path) -> Path:
    """Where the recipe's weights are kept."""
    return folder / f"tiny-clip-{recipe.data}-{recipe.digest}.safetensors"


@torch.no_grad()
def zero_shot_accuracy(backbone: clip.Backbone, data: DataSet) -> float:
    """The share of the test images that "a photo of a {name}" gets right."""
    texts = backbone.encode_texts(sentence_ids(backbone.tokenizer, data.class_names, backbone.context_length))
    right = 0
    for images, labels in evaluation_batches(data, "test"):
        said = clip.logits(backbone.encode_images(images), texts, backbone.scale)
        right += int((said.argmax(1) == labels).sum())
    return right / len(data.y_test)


def _words(data: DataSet) -> WordList:
    return WordList.of([caption.format(spell(name)) for caption in CAPTIONS for name in data.class_names])


def _captions(words: WordList, names: tuple[str, ...]) -> Iterator[Tensor]:
    return (sentence_ids(words, names, TEXT_POSITIONS, caption) for caption in CAPTIONS)


def _batches(
    recipe: Recipe, data: DataSet, indices: NDArray[np.int64], draw: Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch in a drawn order, each image moved a little; what comes in at the border is black."""
    black = data.normalize(np.zeros_like(data.x_train[:1]))
    order = draw.permutation(indices)
    for start in range(0, len(order), recipe.batch_size):
        chosen = order[start : start + recipe.batch_size]
        moves = torch.eye(2, 3).repeat(len(chosen), 1, 1)
        # affine_grid's unit is half a side
        moves[:, :, 2] = torch.from_numpy(draw.uniform(-2 * recipe.shift, 2 * recipe.shift, (len(chosen), 2)))
        images = data.normalize(data.x_train[chosen]) - black
        grid = F.affine_grid(moves, list(images.shape), align_corners=False)
        yield F.grid_sample(images, grid, align_corners=False) + black, torch.from_numpy(data.y_train[chosen])


def _read(recipe: Recipe, data: DataSet, path: Path) -> clip.FrozenClip:
    model, words = build(recipe, data)
    try:
        with safe_open(path, "pt") as stored:
            if stored.metadata().get("words") != json.dumps(words.words):
                raise ValueError("its vocabulary is not that of these classes")
            weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118, it is no mapping
        model.load_state_dict(weights)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise TopologyError(f"{path} is damaged or of another model; delete it, and train again: {error}") from error
    return clip.FrozenClip(model, words)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
