"""Splits a peer's samples into training, validation and test, and draws batches that can be drawn again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from peer.data.sets import DataSet
from topology.seeds import stream

Indices = NDArray[np.int64]
Batch = tuple[torch.Tensor, torch.Tensor]  # x float32 (B, C, H, W), y int64 (B,)
CROP_PAD = 4


@dataclass(frozen=True, eq=False)
class Shard:
    """Indices into a data set's training arrays, and, where the test set is dealt too, into its test arrays."""

    train: Indices
    validation: Indices
    test: Indices
    own_of_common_test: Indices = field(default_factory=lambda: np.empty(0, np.int64))


def split_shard(labels: NDArray[np.integer[Any]], indices: Indices, rng: Generator, held_out: float = 0.2) -> Shard:
    """Hold out a share of every class, rounded, and deal it in turn to validation and test, validation first.

    At least one sample of each class stays for training.
    """
    parts: tuple[list[Indices], list[Indices], list[Indices]] = ([], [], [])
    for label in np.unique(labels[indices]):
        shuffled = rng.permutation(indices[labels[indices] == label])
        held = min(int(held_out * len(shuffled) + 0.5), len(shuffled) - 1)
        for part, piece in zip(parts, (shuffled[held:], shuffled[:held:2], shuffled[1:held:2]), strict=True):
            part.append(piece)
    return Shard(*(np.sort(np.concatenate(part)).astype(np.int64) for part in parts))


class Batches:
    """The augmented mini-batches of one epoch, in order; asking for one again gives the same bits.

    A teacher that arrives late therefore sees exactly what the student saw. All is drawn from (seed, peer,
    round, epoch) and the name of the step, where a round has several; the order from another stream than the
    augmentation, so that changing one leaves the other. `targets` stand in for the labels of all training samples.
    A last batch of a single sample is dropped, because batch norm cannot learn from it; a shard of a single
    sample gives one batch that holds it twice, so that it too can be learned from.
    """

    def __init__(
        self,
        data: DataSet,
        indices: Indices,
        *,
        batch_size: int,
        seed: int,
        peer: int,
        round: int,
        epoch: int = 0,
        step: str = "",
        augment: Literal["auto", "none", "flip", "crop-flip"] = "auto",
        targets: NDArray[np.int64] | None = None,
    ) -> None:
        if len(indices) == 0:
            raise ValueError(f"peer {peer}, round {round}: there are no samples to make batches of")
        self._data = data
        self._targets = data.y_train if targets is None else targets
        self._augment = data.augment if augment == "auto" else augment
        self._batch_size = batch_size
        purpose = (peer, round, epoch, *((step,) if step else ()))
        self._order = stream(seed, "loader", *purpose).permutation(indices)
        if len(self._order) == 1:
            self._order = np.repeat(self._order, 2)
        count = len(self._order)
        draws = stream(seed, "augment", *purpose)
        self._flips = draws.random(count) < 0.5
        self._corners = draws.integers(0, 2 * CROP_PAD, size=(count, 2), endpoint=True)
        self._length = -(-count // batch_size) - (count % batch_size == 1)

    def __repr__(self) -> str:
        return f"Batches({len(self)} of {self._batch_size} from {self._data.name}, augment={self._augment!r})"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < self._length:
            raise IndexError(f"batch {number} of {self._length}")
        chosen = slice(number * self._batch_size, (number + 1) * self._batch_size)
        order = self._order[chosen]
        images = self._data.x_train[order]
        if self._augment == "crop-flip":
            images = crop(images, self._corners[chosen])
        if self._augment != "none":
            flips = self._flips[chosen]
            images[flips] = images[flips, :, ::-1]
        return self._data.normalize(images), torch.from_numpy(self._targets[order])

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))


def evaluation_batches(
    data: DataSet, part: Literal["train", "test"], indices: Indices | None = None, batch_size: int = 500
) -> Iterator[Batch]:
    """Go once, in order and without augmentation, through all images of `part` or those at `indices`."""
    x, y = (data.x_train, data.y_train) if part == "train" else (data.x_test, data.y_test)
    order = np.arange(len(y)) if indices is None else indices
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        yield data.normalize(x[chosen]), torch.from_numpy(y[chosen])


def crop(images: NDArray[np.uint8], corners: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Pad each image with CROP_PAD black pixels and cut out a window of its old size from the corner on."""
    count, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (CROP_PAD, CROP_PAD), (CROP_PAD, CROP_PAD), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    cropped = windows[np.arange(count), corners[:, 0], corners[:, 1]]  # (B, C, H, W)
    return np.ascontiguousarray(cropped.transpose(0, 2, 3, 1))
