"""Loads a named data set, checked and read-only, with everything a network needs to know to read its images.

Images stay uint8 and are normalized batch by batch, so that processes forked after loading share one copy.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from topology.errors import TopologyError
from topology.mistakes import suggestion

Augment = Literal["none", "flip", "crop-flip"]

DATA_VARIABLE = "DISTILL_SWARM_DATA"
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
DIGITS_FOR_TRAINING = 1500

CIFAR_ARCHIVES = {"cifar10": ("CIFAR10", "cifar-10"), "cifar100": ("CIFAR100", "cifar-100")}
# Channel means and standard deviations of the whole training sets, as fractions of full brightness.
CIFAR_MOMENTS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
FASHION_MOMENTS = ((0.2860,), (0.3530,))
FASHION_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
FASHION_URL = "https://github.com/zalandoresearch/fashion-mnist"
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
PATHMNIST_URL = "https://zenodo.org/records/10519652/files/pathmnist.npz"
PATHMNIST_CLASSES = (
    *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa"),
    *("cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
)


@dataclass(frozen=True, eq=False)
class DataSet:
    name: str
    x_train: NDArray[np.uint8]  # (N, H, W, C)
    y_train: NDArray[np.int64]  # (N,)
    x_test: NDArray[np.uint8]
    y_test: NDArray[np.int64]
    class_names: tuple[str, ...]
    scale: float  # the pixel value of full brightness
    mean: tuple[float, ...]  # per channel, of the training images divided by scale
    std: tuple[float, ...]
    pad: int = 0  # black pixels added on every side
    augment: Augment = "none"  # what data.augment = "auto" means for this set

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) as a network sees an image."""
        _, height, width, channels = self.x_train.shape
        return channels, height + 2 * self.pad, width + 2 * self.pad

    def normalize(self, images: NDArray[np.uint8]) -> torch.Tensor:
        """Turn uint8 images (B, H, W, C) into the float32 tensor (B, C, H, W) a network takes."""
        x = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32))
        if self.pad:
            x = functional.pad(x, [self.pad] * 4)
        mean, std = (torch.tensor(moment).view(1, -1, 1, 1) for moment in (self.mean, self.std))
        return x.div_(self.scale).sub_(mean).div_(std)


def load(name: str, root: str = "") -> DataSet:
    """Load a data set, looking for its files in `root`, else in the folder that DISTILL_SWARM_DATA names."""
    if name.startswith("npz:"):
        return _load_npz(name, Path(root).expanduser() / Path(name.removeprefix("npz:")).expanduser())
    if name.startswith("folder:"):
        return _load_folder(name, Path(root).expanduser() / Path(name.removeprefix("folder:")).expanduser())
    if name.startswith("shifted:"):
        from peer.data import shifted  # it knows the recipes of models, which know data sets

        return shifted.load(name.removeprefix("shifted:"), root)
    if name not in _LOADERS:
        raise TopologyError(
            f"data.name = {name!r}: there is no such data set.{suggestion(name, _LOADERS)} "
            f"There are {', '.join(_LOADERS)}, npz:PATH, folder:PATH and shifted:RECIPE."
        )
    return _LOADERS[name](name, root)


def names() -> tuple[str, ...]:
    """The sets that `load` knows, besides npz:PATH."""
    return tuple(_LOADERS)


def _load_digits(name: str, root: str) -> DataSet:
    # Read from the package's own file: importing scikit-learn costs 1.5 s and 50 MB in every peer.
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise TopologyError("data.name = 'digits': they ship inside scikit-learn; run `pip install scikit-learn`.")
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    with gzip.open(path, "rt", encoding="ascii") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    images, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    split = DIGITS_FOR_TRAINING
    return _complete(
        name, images[:split], labels[:split], images[split:], labels[split:], tuple("0123456789"), scale=16.0
    )


def _load_fashion_mnist(name: str, root: str) -> DataSet:
    local = _local_folder(root)
    folders = [DEBIAN_FASHION_MNIST] if local is None else [local / "FashionMNIST" / "raw", DEBIAN_FASHION_MNIST]
    for folder in folders:
        paths = [_idx_path(folder, file) for file in FASHION_FILES]
        found = [path for path in paths if path is not None]
        if len(found) == len(FASHION_FILES):
            x_train, y_train, x_test, y_test = (_read_idx(path) for path in found)
            return _complete(name, x_train, y_train, x_test, y_test, FASHION_CLASSES, moments=FASHION_MOMENTS)
    place = (local or Path("FOLDER")) / "FashionMNIST" / "raw"
    raise TopologyError(
        f"data.name = 'fashion-mnist': {_searched(root, 'FashionMNIST/raw')}, and {DEBIAN_FASHION_MNIST} has "
        "no copy either. On Debian or Ubuntu run `apt-get install dataset-fashion-mnist`; anywhere else "
        f"download {', '.join(FASHION_FILES)} (.gz or unpacked) from {FASHION_URL} "
        f"into {place} and {_point_to(root, 'FOLDER')}."
    )


def _load_cifar(name: str, root: str) -> DataSet:
    class_name, archive = CIFAR_ARCHIVES[name]
    folder, inside = _local_folder(root), f"{archive}-{'batches-py' if name == 'cifar10' else 'python'}"
    download = f"https://www.cs.toronto.edu/~kriz/{archive}-python.tar.gz"
    if folder is None or not (folder / inside).is_dir():
        raise TopologyError(
            f"data.name = {name!r}: {_searched(root, inside)}. Download {download}, unpack it so that "
            f"{(folder or Path('FOLDER')) / inside} exists, and {_point_to(root, 'FOLDER')}."
        )
    import torchvision  # here, not above: it takes seconds and 150 MB that no other set needs

    try:
        train, test = (getattr(torchvision.datasets, class_name)(folder, train=part) for part in (True, False))
    except (RuntimeError, OSError) as error:
        raise TopologyError(
            f"data.name = {name!r}: the copy in {folder / inside} is incomplete or damaged ({error}). "
            f"Download {download} again and unpack it in {folder}."
        ) from error
    y_train, y_test = np.array(train.targets), np.array(test.targets)
    moments = CIFAR_MOMENTS[name]
    return _complete(
        name,
        train.data,
        y_train,
        test.data,
        y_test,
        tuple(train.classes),
        moments=moments,
        augment="crop-flip",
    )


def _load_pathmnist(name: str, root: str) -> DataSet:
    folder = _local_folder(root)
    path = (folder or Path("FOLDER")) / "pathmnist.npz"
    if folder is None or not path.is_file():
        raise TopologyError(
            f"data.name = 'pathmnist': {_searched(root, 'pathmnist.npz')}. Download {PATHMNIST_URL} "
            f"to {path} and {_point_to(root, 'FOLDER')}."
        )
    keys = ("train_images", "train_labels", "test_images", "test_labels")
    arrays = _read_npz(name, path, keys)
    x_train, y_train, x_test, y_test = (arrays[key] for key in keys)
    return _complete(
        *(name, x_train, y_train.reshape(-1), x_test, y_test.reshape(-1), PATHMNIST_CLASSES),
        pad=2,
        augment="flip",
    )


def _load_npz(name: str, path: Path) -> DataSet:
    if not path.is_file():
        raise TopologyError(
            f"data.name = {name!r}: there is no file {path.absolute()}. A relative PATH starts from "
            "data.root, or from the working directory where that is empty."
        )
    keys = ("x_train", "y_train", "x_test", "y_test")
    arrays = _read_npz(name, path, keys, optional=("class_names",))
    x_train, y_train, x_test, y_test = (arrays[key] for key in keys)
    class_names = arrays.get("class_names")
    known = tuple(str(label) for label in class_names.reshape(-1)) if class_names is not None else None
    return _complete(name, x_train, y_train, x_test, y_test, known)


def _load_folder(name: str, path: Path) -> DataSet:
    from peer.data import folder
    from peer.models.clip import MEAN, STD

    (x_train, y_train), (x_test, y_test), class_names = folder.read(name, path)
    return _complete(name, x_train, y_train, x_test, y_test, class_names, moments=(MEAN, STD))


_LOADERS: dict[str, Callable[[str, str], DataSet]] = {
    "digits": _load_digits,
    "fashion-mnist": _load_fashion_mnist,
    "cifar10": _load_cifar,
    "cifar100": _load_cifar,
    "pathmnist": _load_pathmnist,
}


def _local_folder(root: str) -> Path | None:
    given = root or os.environ.get(DATA_VARIABLE, "")
    return Path(given).expanduser() if given else None


def _searched(root: str, wanted: str) -> str:
    if root:
        return f"data.root = {root!r} has no {wanted}"
    if os.environ.get(DATA_VARIABLE):
        return f"{DATA_VARIABLE} = {os.environ[DATA_VARIABLE]!r} has no {wanted}"
    return f"data.root is empty and {DATA_VARIABLE} is not set"


def _point_to(root: str, folder: str) -> str:
    if _local_folder(root) is not None:
        return "run again"
    return f"set data.root (or the environment variable {DATA_VARIABLE}) to {folder}"


def _idx_path(folder: Path, file: str) -> Path | None:
    return next((path for path in (folder / file, folder / f"{file}.gz") if path.is_file()), None)


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an array of bytes in the IDX format of MNIST, plain or gzipped."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, axes = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{axes}I", raw, 4)
        if (zeros, kind) != (0, 8):
            raise ValueError("it does not start like an IDX file of bytes")
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error) as error:
        raise TopologyError(f"data: {path} is damaged ({error}); download it again.") from error


def _read_npz(name: str, path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    with path.open("rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
        except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
            raise TopologyError(f"data.name = {name!r}: {path} is not an .npz archive.") from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise TopologyError(f"data.name = {name!r}: {path} is not an .npz archive but a single array.")
        missing = [key for key in required if key not in archive]
        if missing:
            raise TopologyError(
                f"data.name = {name!r}: {path} lacks {', '.join(missing)}; "
                f"it has {', '.join(archive) or 'nothing'}. "
                f"Save it with np.savez(PATH, {', '.join(f'{key}=...' for key in required)})."
            )
        arrays: dict[str, NDArray[Any]] = {}
        for key in (*required, *(key for key in optional if key in archive)):
            try:
                arrays[key] = archive[key]
            except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
                raise TopologyError(f"data.name = {name!r}: {key} in {path} is damaged ({error}).") from error
            except ValueError as error:
                raise TopologyError(
                    f"data.name = {name!r}: {key} in {path} holds Python objects, which are not read, "
                    "for safety; save plain numbers or text, such as np.array(names, dtype=str)."
                ) from error
    return arrays


def _complete(
    name: str,
    x_train: NDArray[Any],
    y_train: NDArray[Any],
    x_test: NDArray[Any],
    y_test: NDArray[Any],
    class_names: tuple[str, ...] | None,
    *,
    scale: float = 255.0,
    moments: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    pad: int = 0,
    augment: Augment = "none",
) -> DataSet:
    parts = {"train": (x_train, y_train), "test": (x_test, y_test)}
    mistakes = [mistake for part, (x, y) in parts.items() for mistake in _find_mistakes(part, x, y)]
    if not mistakes and x_train.shape[1:] != x_test.shape[1:]:
        mistakes.append(f"x_train has images of {x_train.shape[1:]}, x_test of {x_test.shape[1:]}")
    if not mistakes:
        highest = int(max(y_train.max(), y_test.max()))
        class_names = class_names or tuple(str(label) for label in range(highest + 1))
        if highest >= len(class_names):
            mistakes.append(f"the label {highest} has no entry among the {len(class_names)} class_names")
        elif len(class_names) < 2:
            mistakes.append("there is only one class (C = 1); learning to classify needs at least 2")
    if mistakes or class_names is None:
        raise TopologyError("\n".join(f"data.name = {name!r}: {mistake}." for mistake in mistakes))
    x_train, x_test = (x if x.ndim == 4 else x[..., None] for x in (x_train, x_test))
    mean, std = moments or _measure_moments(x_train, scale)
    images = (_freeze(x, np.uint8) for x in (x_train, x_test))
    labels = (_freeze(y, np.int64) for y in (y_train, y_test))
    (x_train, x_test), (y_train, y_test) = images, labels
    return DataSet(name, x_train, y_train, x_test, y_test, class_names, scale, mean, std, pad, augment)


def _find_mistakes(part: str, x: NDArray[Any], y: NDArray[Any]) -> list[str]:
    mistakes = []
    if x.dtype != np.uint8:
        mistakes.append(f"x_{part} has dtype {x.dtype}; images must be uint8, 0 to 255")
    if x.ndim not in (3, 4) or 0 in x.shape:
        mistakes.append(f"x_{part} has shape {x.shape}; it must be (N, H, W) or (N, H, W, C), none of them 0")
    if y.dtype.kind not in "iu":
        mistakes.append(f"y_{part} has dtype {y.dtype}; labels must be integers")
    elif y.shape != x.shape[:1]:
        mistakes.append(f"y_{part} has shape {y.shape}; x_{part} has {x.shape}, so it must be {x.shape[:1]}")
    elif y.size and y.min() < 0:
        mistakes.append(f"y_{part} has the label {y.min()}; labels go from 0 to C-1")
    return mistakes


def _freeze(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    frozen = np.ascontiguousarray(array, dtype=dtype)
    frozen.setflags(write=False)
    return frozen


def _measure_moments(images: NDArray[np.uint8], scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, exact, from how often each of the 256 values occurs."""
    values = np.arange(256) / scale
    means, deviations = [], []
    for channel in range(images.shape[3]):
        counts = np.zeros(256, np.int64)
        for start in range(0, len(images), 4096):
            counts += np.bincount(images[start : start + 4096, ..., channel].reshape(-1), minlength=256)
        mean = float((counts * values).sum() / counts.sum())
        variance = float((counts * (values - mean) ** 2).sum() / counts.sum())
        means.append(mean)
        deviations.append(variance**0.5 or 1.0)  # a channel of one value is left at 0, not divided by 0
    return tuple(means), tuple(deviations)
