"""Reads images from folders, one a class, as CLIP sees them; decoded once and memory-mapped, so peers share them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from peer.models.cache import cache_folder
from topology.errors import TopologyError

SIDE = 224
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")

Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


def read(name: str, path: Path) -> tuple[Part, Part, tuple[str, ...]]:
    """Training part, test part and class names of PATH/train/CLASS/*.jpg and PATH/test/CLASS/*.jpg."""
    parts = [path / part for part in ("train", "test")]
    if missing := [str(part) for part in parts if not part.is_dir()]:
        raise TopologyError(
            f"data.name = {name!r}: there is no folder {missing[0]}. Images lie in PATH/train/CLASS and "
            f"PATH/test/CLASS, one folder a class, as {', '.join(ENDINGS)}"
        )
    classes = sorted(folder.name for folder in parts[0].iterdir() if folder.is_dir())
    if strange := sorted({folder.name for folder in parts[1].iterdir() if folder.is_dir()} - set(classes)):
        raise TopologyError(f"data.name = {name!r}: {parts[1] / strange[0]} is of a class that {parts[0]} has not")
    train, test = (_read_part(name, part, classes) for part in parts)
    return train, test, tuple(classes)


def _read_part(name: str, folder: Path, classes: list[str]) -> Part:
    files = [
        (file, label)
        for label, known in enumerate(classes)
        if (folder / known).is_dir()
        for file in sorted((folder / known).iterdir())
        if file.suffix.lower() in ENDINGS
    ]
    if not files:
        raise TopologyError(f"data.name = {name!r}: {folder} holds no image ({', '.join(ENDINGS)})")
    labels = np.array([label for _, label in files], dtype=np.int64)
    stats = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file, _ in files]
    digest = hashlib.blake2b(repr((SIDE, stats)).encode(), digest_size=8).hexdigest()
    decoded = cache_folder() / "images" / f"{digest}.npy"
    if not decoded.is_file():
        _decode(name, [file for file, _ in files], decoded)
    images: NDArray[np.uint8] = np.load(decoded, mmap_mode="r")
    return images, labels


def _decode(name: str, files: list[Path], decoded: Path) -> None:
    decoded.parent.mkdir(parents=True, exist_ok=True)
    unfinished = decoded.with_suffix(f".{os.getpid()}")
    images = open_memmap(unfinished, mode="w+", dtype=np.uint8, shape=(len(files), SIDE, SIDE, 3))
    try:
        for number, file in enumerate(files):
            images[number] = decode(name, file)
        images.flush()
        unfinished.replace(decoded)  # whole or not at all
    finally:
        unfinished.unlink(missing_ok=True)


def decode(name: str, file: Path) -> NDArray[Any]:
    """One image as (224, 224, 3) bytes: its shorter side brought to 224, bicubic, and the middle cut out."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise TopologyError(f"data.name = {name!r}: {file} is no image that can be read: {error}") from error
    factor = SIDE / min(picture.size)
    width, height = (max(SIDE, int(factor * length)) for length in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    return np.asarray(picture.crop((left, top, left + SIDE, top + SIDE)))
