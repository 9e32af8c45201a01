"""Every data set comes out right, checked and read-only; what is missing is named together with its place."""

from __future__ import annotations

import gzip
import importlib.util
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from peer.data import sets
from peer.data.sets import DataSet, load
from topology.errors import TopologyError

Arrays = dict[str, NDArray[Any]]


@pytest.fixture(autouse=True)
def no_data_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(sets.DATA_VARIABLE, raising=False)
    monkeypatch.setattr(sets, "DEBIAN_FASHION_MNIST", tmp_path / "debian")


@pytest.fixture(scope="module")
def digits() -> DataSet:
    return load("digits")


def make_arrays(**changes: Any) -> Arrays:
    rng = np.random.default_rng(0)
    arrays: Arrays = {
        "x_train": rng.integers(0, 256, (12, 10, 9, 3), dtype=np.uint8),
        "y_train": np.arange(12, dtype=np.uint8) % 3,
        "x_test": rng.integers(0, 256, (6, 10, 9, 3), dtype=np.uint8),
        "y_test": np.arange(6, dtype=np.uint8) % 3,
    }
    return {key: array for key, array in (arrays | changes).items() if array is not None}


def load_arrays(folder: Path, **changes: Any) -> DataSet:
    np.savez(folder / "own.npz", **make_arrays(**changes))
    return load(f"npz:{folder / 'own.npz'}")


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_fashion(folder: Path, suffix: str = "") -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 256, (20, 28, 28), dtype=np.uint8), np.arange(20, dtype=np.uint8) % 10]
    arrays += [rng.integers(0, 256, (10, 28, 28), dtype=np.uint8), np.arange(10, dtype=np.uint8)]
    for file, array in zip(sets.FASHION_FILES, arrays, strict=True):
        write_idx(folder / f"{file}{suffix}", array)
    return arrays


def test_digits_are_those_of_scikit_learn(digits: DataSet) -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1)
    assert np.array_equal(digits.x_train, images[:1500])
    assert np.array_equal(digits.x_test, images[1500:])
    assert np.array_equal(digits.y_train, labels[:1500])
    assert np.array_equal(digits.y_test, labels[1500:])
    assert (digits.shape, digits.classes, digits.scale, digits.augment) == ((1, 8, 8), 10, 16.0, "none")


def test_loading_digits_imports_no_heavy_package() -> None:
    program = """
import sys
from peer.data.sets import load
load("digits")
print([name for name in ("sklearn", "torchvision", "torch._dynamo") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TopologyError, match="pip install scikit-learn"):
        load("digits")


def test_arrays_are_read_only_and_contiguous(digits: DataSet) -> None:
    for images in (digits.x_train, digits.x_test):
        assert images.dtype == np.uint8
        assert images.flags.c_contiguous
        assert not images.flags.writeable
    for labels in (digits.y_train, digits.y_test):
        assert labels.dtype == np.int64
        assert not labels.flags.writeable


def test_normalizing_centers_the_training_images(digits: DataSet) -> None:
    x = digits.normalize(digits.x_train)
    assert (x.dtype, x.shape, x.is_contiguous()) == (torch.float32, (1500, 1, 8, 8), True)
    assert abs(float(x.mean())) < 1e-5
    assert abs(float(x.std(correction=0)) - 1) < 1e-5
    expected = (digits.x_train[7, 3, 4, 0] / 16 - digits.mean[0]) / digits.std[0]
    assert float(x[7, 0, 3, 4]) == pytest.approx(expected, abs=1e-6)


def test_moments_are_measured_per_channel(tmp_path: Path) -> None:
    data = load_arrays(tmp_path)
    fractions = data.x_train.reshape(-1, 3) / 255
    assert data.mean == pytest.approx(fractions.mean(0))
    assert data.std == pytest.approx(fractions.std(0))
    x = data.normalize(data.x_train[:2])
    assert x.shape == (2, 3, 10, 9)
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=0.3)


def test_a_channel_of_one_value_stays_finite(tmp_path: Path) -> None:
    images = make_arrays()["x_train"]
    images[..., 1] = 40
    data = load_arrays(tmp_path, x_train=images)
    assert torch.isfinite(data.normalize(data.x_train)).all()


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("place", ["debian", "root", "variable"])
def test_fashion_mnist_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, suffix: str) -> None:
    local = tmp_path / "local"
    arrays = write_fashion(tmp_path / "debian" if place == "debian" else local / "FashionMNIST" / "raw", suffix)
    if place == "variable":
        monkeypatch.setenv(sets.DATA_VARIABLE, str(local))
    data = load("fashion-mnist", str(local) if place == "root" else "")
    assert np.array_equal(data.x_train[..., 0], arrays[0])
    assert np.array_equal(data.y_train, arrays[1])
    assert np.array_equal(data.x_test[..., 0], arrays[2])
    assert np.array_equal(data.y_test, arrays[3])
    assert (data.shape, data.classes, data.scale, data.augment) == ((1, 28, 28), 10, 255.0, "none")


def test_a_damaged_idx_file_is_named(tmp_path: Path) -> None:
    write_fashion(tmp_path / "debian", ".gz")
    damaged = tmp_path / "debian" / "t10k-images-idx3-ubyte.gz"
    whole = damaged.read_bytes()
    for content in (
        whole[:-100],
        gzip.compress(b"no idx file"),
        gzip.compress(gzip.decompress(whole)[:-1]),
        b"",
    ):
        damaged.write_bytes(content)
        with pytest.raises(TopologyError, match=r"t10k-images-idx3-ubyte\.gz is damaged"):
            load("fashion-mnist")


REAL_FASHION = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.skipif(
    not REAL_FASHION.is_dir(),
    reason="Debian's package dataset-fashion-mnist is not installed on this machine",
)
def test_the_real_fashion_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "DEBIAN_FASHION_MNIST", REAL_FASHION)
    data = load("fashion-mnist")
    assert (data.x_train.shape, data.x_test.shape) == ((60000, 28, 28, 1), (10000, 28, 28, 1))
    assert np.bincount(data.y_train).tolist() == [6000] * 10
    fractions = data.x_train / np.float32(255)
    assert data.mean[0] == pytest.approx(float(fractions.mean(dtype=np.float64)), abs=1e-4)
    assert data.std[0] == pytest.approx(float(fractions.std(dtype=np.float64)), abs=1e-4)


@pytest.fixture
def cifar_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small batches in the form of both CIFAR sets, whose checksums torchvision is told to accept."""
    from torchvision.datasets import CIFAR10, CIFAR100

    rng = np.random.default_rng(2)
    for kind, key, count in ((CIFAR10, "labels", 10), (CIFAR100, "fine_labels", 100)):
        folder = tmp_path / kind.base_folder
        folder.mkdir()
        for part in ("train_list", "test_list"):
            files = [name for name, _ in getattr(kind, part)]
            monkeypatch.setattr(kind, part, [[name, None] for name in files])
            for name in files:
                images = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
                (folder / name).write_bytes(pickle.dumps({"data": images, key: list(range(count))}))
        names = [f"class {label}" for label in range(count)]
        monkeypatch.setattr(kind, "meta", kind.meta | {"md5": None})
        (folder / kind.meta["filename"]).write_bytes(pickle.dumps({kind.meta["key"]: names}))
    return tmp_path


@pytest.mark.parametrize(("name", "classes", "train"), [("cifar10", 10, 50), ("cifar100", 100, 100)])
def test_cifar_through_torchvision(cifar_folder: Path, name: str, classes: int, train: int) -> None:
    data = load(name, str(cifar_folder))
    assert data.x_train.shape == (train, 32, 32, 3)
    assert data.x_train.flags.c_contiguous
    assert data.y_test.tolist() == list(range(classes))
    assert data.class_names[1] == "class 1"
    assert (data.shape, data.augment) == ((3, 32, 32), "crop-flip")
    folder = cifar_folder / ("cifar-10-batches-py" if name == "cifar10" else "cifar-100-python")
    raw = pickle.loads((folder / ("data_batch_1" if name == "cifar10" else "train")).read_bytes())["data"]
    assert data.x_train[0, 5, 6, 2] == raw[0, 2 * 1024 + 5 * 32 + 6]


def test_damaged_cifar_is_reported(cifar_folder: Path) -> None:
    (cifar_folder / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(TopologyError, match="incomplete or damaged"):
        load("cifar10", str(cifar_folder))


def test_the_layout_of_fashion_mnist_is_torchvisions(tmp_path: Path) -> None:
    from torchvision.datasets import FashionMNIST

    write_fashion(tmp_path / "FashionMNIST" / "raw")
    theirs, ours = FashionMNIST(tmp_path, train=True), load("fashion-mnist", str(tmp_path))
    assert np.array_equal(theirs.data.numpy(), ours.x_train[..., 0])
    assert np.array_equal(theirs.targets.numpy(), ours.y_train)
    assert tuple(theirs.classes) == ours.class_names


def test_pathmnist_is_padded_to_32(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    arrays = {}
    for part, count in (("train", 18), ("val", 9), ("test", 9)):
        arrays[f"{part}_images"] = rng.integers(0, 256, (count, 28, 28, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = np.arange(count, dtype=np.uint8)[:, None] % 9
    np.savez(tmp_path / "pathmnist.npz", **arrays)
    data = load("pathmnist", str(tmp_path))
    assert (data.shape, data.classes, data.augment) == ((3, 32, 32), 9, "flip")
    assert (len(data.y_train), len(data.y_test)) == (18, 9)
    x = data.normalize(data.x_train[:1])[0]
    black = [-mean / std for mean, std in zip(data.mean, data.std, strict=True)]
    for border in (x[:, :2], x[:, -2:], x[:, :, :2], x[:, :, -2:]):
        assert torch.allclose(border, torch.tensor(black).view(3, 1, 1).expand_as(border))
    expected = (data.x_train[0, 0, 27, 1] / 255 - data.mean[1]) / data.std[1]
    assert float(x[1, 2, 29]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("fashion-mnist", ["apt-get install dataset-fashion-mnist", "FashionMNIST/raw", "train-images-idx3"]),
        ("cifar10", ["https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "cifar-10-batches-py"]),
        ("cifar100", ["https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "cifar-100-python"]),
        ("pathmnist", ["https://zenodo.org/records/10519652/files/pathmnist.npz"]),
    ],
)
def test_missing_data_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wanted: list[str]
) -> None:
    def explain(root: str) -> str:
        with pytest.raises(TopologyError) as caught:
            load(name, root)
        message = str(caught.value)
        assert [phrase for phrase in wanted if phrase not in message] == []
        return message

    message = explain("")
    assert "data.root is empty and DISTILL_SWARM_DATA is not set" in message
    assert "set data.root (or the environment variable DISTILL_SWARM_DATA) to FOLDER" in message
    message = explain(str(tmp_path))
    assert f"data.root = {str(tmp_path)!r} has no" in message
    assert f"{tmp_path}/" in message
    monkeypatch.setenv(sets.DATA_VARIABLE, str(tmp_path))
    assert f"DISTILL_SWARM_DATA = {str(tmp_path)!r} has no" in explain("")


def test_unknown_sets_get_a_suggestion() -> None:
    with pytest.raises(TopologyError, match=r"data\.name = 'cifar-10'.*Did you mean cifar10.*npz:PATH"):
        load("cifar-10")


def test_own_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_arrays(tmp_path, class_names=np.array(["red", "green", "blue"]))
    assert data.class_names == ("red", "green", "blue")
    assert np.array_equal(data.x_train, make_arrays()["x_train"])
    assert load("npz:own.npz", str(tmp_path)).shape == (3, 10, 9)
    monkeypatch.chdir(tmp_path)
    assert load("npz:own.npz").classes == 3


def test_own_gray_images_without_names(tmp_path: Path) -> None:
    gray = make_arrays()["x_train"][..., 0]
    data = load_arrays(tmp_path, x_train=gray, x_test=gray[:6])
    assert data.shape == (1, 10, 9)
    assert data.class_names == ("0", "1", "2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": None}, "lacks x_train; it has y_train, x_test, y_test"),
        ({"x_train": np.zeros((12, 10, 9), np.float32)}, "x_train has dtype float32; images must be uint8"),
        ({"x_test": np.zeros((6, 7), np.uint8)}, r"x_test has shape \(6, 7\)"),
        ({"x_test": np.zeros((0, 10, 9, 3), np.uint8), "y_test": np.zeros(0, int)}, "none of them 0"),
        ({"x_test": np.zeros((6, 8, 8, 3), np.uint8)}, r"images of \(10, 9, 3\), x_test of \(8, 8, 3\)"),
        ({"y_train": np.zeros(11, int)}, r"y_train has shape \(11,\).*must be \(12,\)"),
        ({"y_train": np.zeros(12)}, "y_train has dtype float64; labels must be integers"),
        ({"y_test": np.array([0, 1, 2, -1, 0, 1])}, "y_test has the label -1"),
        ({"class_names": np.array(["a", "b"])}, "label 2 has no entry among the 2 class_names"),
        ({"class_names": np.array(["a", None, "c"])}, "class_names .* holds Python objects"),
        ({"y_train": np.zeros(12, int), "y_test": np.zeros(6, int)}, r"only one class \(C = 1\)"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        load_arrays(tmp_path, **changes)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(TopologyError) as caught:
        load_arrays(tmp_path, x_train=np.zeros((12, 10, 9, 3)), y_test=np.zeros(5, int))
    assert len(str(caught.value).splitlines()) == 2


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    with pytest.raises(TopologyError, match="there is no file"):
        load(f"npz:{path}")
    for content in (b"", b"text", b"PK\x03\x04 torn"):
        path.write_bytes(content)
        with pytest.raises(TopologyError, match=r"is not an \.npz archive"):
            load(f"npz:{path}")
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(TopologyError, match="a single array"):
        load(f"npz:{path}")


def test_a_damaged_array_is_named(tmp_path: Path) -> None:
    load_arrays(tmp_path)
    path = tmp_path / "own.npz"
    raw = bytearray(path.read_bytes())
    raw[400] ^= 1  # inside the pixels of x_train, which come first
    path.write_bytes(raw)
    with pytest.raises(TopologyError, match=r"x_train in .* is damaged"):
        load(f"npz:{path}")


def test_the_documentation_names_every_set_and_its_example_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "data-and-models.md").read_text()
    assert [name for name in (*sets.names(), "npz:PATH") if f"| `{name}` |" not in text] == []
    assert all(url in text for url in (sets.PATHMNIST_URL, sets.FASHION_URL, str(REAL_FASHION)))
    monkeypatch.chdir(tmp_path)
    exec(text.split("### Your own arrays\n\n```python\n")[1].split("```")[0], {})
    data = load("npz:own.npz")
    assert (data.shape, data.class_names) == ((3, 16, 16), ("oak", "elm", "ash", "yew"))
