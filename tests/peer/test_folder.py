"""Folders of images become a data set: classes by folder, decoded once, and a clear word where something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from peer.data.sets import load
from topology import TopologyError

MakeFolder = Callable[[], Path]
COLOURS = {"blue_bird": (0, 0, 255), "red_fox": (255, 0, 0)}


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISTILL_SWARM_CACHE", str(tmp_path / "cache"))
    for part, each in (("train", 3), ("test", 2)):
        for name, colour in COLOURS.items():
            folder = tmp_path / "animals" / part / name
            folder.mkdir(parents=True)
            for number in range(each):
                Image.new("RGB", (300, 240), colour).save(folder / f"{number}.png")
    return tmp_path / "animals"


def test_a_folder_is_a_class_and_its_name_is_the_classs(images: Path) -> None:
    data = load(f"folder:{images}")
    assert data.class_names == ("blue_bird", "red_fox")
    assert data.shape == (3, 224, 224)
    assert data.y_train.tolist() == [0, 0, 0, 1, 1, 1] and data.y_test.tolist() == [0, 0, 1, 1]
    assert (data.x_train[0] == (0, 0, 255)).all() and (data.x_train[5] == (255, 0, 0)).all()
    assert data.normalize(data.x_train[:1]).shape == (1, 3, 224, 224)


def test_the_middle_of_an_image_is_kept_and_its_shorter_side_is_224(images: Path) -> None:
    wide = np.zeros((100, 300, 3), np.uint8)
    wide[:, 100:200] = 200
    Image.fromarray(wide).save(images / "train" / "red_fox" / "9.png")
    kept = load(f"folder:{images}").x_train[-1]
    assert kept.shape == (224, 224, 3)
    assert (kept[:, 2:-2] > 190).all()


def test_images_are_decoded_once_and_again_when_a_file_changes(images: Path, tmp_path: Path) -> None:
    load(f"folder:{images}")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "images").iterdir()}
    assert len(kept) == 2
    load(f"folder:{images}")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    Image.new("RGB", (224, 224), (9, 9, 9)).save(images / "train" / "red_fox" / "0.png")
    assert (load(f"folder:{images}").x_train[3] == 9).all()


def test_what_is_wrong_with_a_folder_is_said(images: Path, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"there is no folder .*nowhere/train"):
        load(f"folder:{tmp_path / 'nowhere'}")
    (images / "test" / "green_frog").mkdir()
    with pytest.raises(TopologyError, match=r"green_frog is of a class that .*train has not"):
        load(f"folder:{images}")
    (images / "test" / "green_frog").rmdir()
    (images / "train" / "red_fox" / "0.png").write_bytes(b"no image")
    with pytest.raises(TopologyError, match=r"0\.png is no image that can be read"):
        load(f"folder:{images}")
    assert not list((tmp_path / "cache" / "images").glob("*.[0-9]*"))


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part / "empty").mkdir(parents=True)
    with pytest.raises(TopologyError, match="holds no image"):
        load(f"folder:{tmp_path}")
