"""A shard is split evenly class by class, and a batch drawn again is the same to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.data.sets import DataSet, load
from peer.data.shard import CROP_PAD, Batches, crop, evaluation_batches, split_shard


@pytest.fixture(scope="module")
def digits() -> DataSet:
    return load("digits")


def draw(data: DataSet, count: int = 100, **changes: object) -> Batches:
    options = {
        "batch_size": 32,
        "seed": 7,
        "peer": 3,
        "round": 5,
        "epoch": 0,
        "augment": "crop-flip",
    } | changes
    return Batches(data, np.arange(200, 200 + count), **options)  # type: ignore[arg-type]


def same(one: Batches, other: Batches) -> bool:
    return len(one) == len(other) and all(
        torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(one, other, strict=True)
    )


@given(
    counts=st.lists(st.integers(0, 60), min_size=2, max_size=8).filter(any),
    held_out=st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.9]),
    seed=st.integers(0, 99),
)
def test_split_is_even_in_every_class(counts: list[int], held_out: float, seed: int) -> None:
    labels = np.concatenate([np.repeat(np.arange(len(counts)), counts), np.zeros(50, int)])
    indices = np.arange(sum(counts))
    shard = split_shard(labels, indices, np.random.default_rng(seed), held_out)
    parts = (shard.train, shard.validation, shard.test)
    assert np.array_equal(np.sort(np.concatenate(parts)), indices)
    assert all(part.dtype == np.int64 for part in parts)
    for label, count in enumerate(counts):
        train, validation, test = ((labels[part] == label).sum() for part in parts)
        assert abs(validation + test - held_out * count) <= 0.5 + 1e-9 or train == 1
        assert 0 <= validation - test <= 1
        assert train >= min(count, 1)


def test_a_fifth_is_rounded() -> None:
    for count, held in ((1, 0), (2, 0), (3, 1), (7, 1), (8, 2), (12, 2), (13, 3)):
        shard = split_shard(np.zeros(count, int), np.arange(count), np.random.default_rng(0))
        assert len(shard.validation) + len(shard.test) == held


def test_split_depends_on_its_generator_alone(digits: DataSet) -> None:
    indices = np.arange(300, 500)
    one, again, other = (split_shard(digits.y_train, indices, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(one.train, again.train)
    assert not np.array_equal(one.train, other.train)


def test_batches_cover_the_shard_once(digits: DataSet) -> None:
    batches = draw(digits, augment="none")
    assert [len(y) for _, y in batches] == [32, 32, 32, 4]
    x = torch.cat([x for x, _ in batches])
    assert (x.dtype, x.shape) == (torch.float32, (100, 1, 8, 8))
    expected = digits.normalize(digits.x_train[200:300])
    assert sorted(map(tuple, x.flatten(1).tolist())) == sorted(map(tuple, expected.flatten(1).tolist()))


def test_labels_stay_with_their_images(digits: DataSet) -> None:
    known = {image.tobytes(): label for image, label in zip(digits.x_train, digits.y_train, strict=True)}
    for x, y in draw(digits, augment="none"):
        raw = ((x * digits.std[0] + digits.mean[0]) * 16).round().to(torch.uint8)
        assert [known[image.permute(1, 2, 0).numpy().tobytes()] for image in raw] == y.tolist()


def test_a_batch_drawn_again_is_identical(digits: DataSet) -> None:
    batches = draw(digits)
    first = [batches[k] for k in range(len(batches))]
    for k in (2, 0, 3, 1, 1):
        assert torch.equal(batches[k][0], first[k][0])
        assert torch.equal(batches[k][1], first[k][1])
    assert same(batches, draw(digits))
    with pytest.raises(IndexError):
        batches[4]


@pytest.mark.parametrize("change", [{"seed": 8}, {"peer": 4}, {"round": 6}, {"epoch": 1}])
def test_every_name_changes_the_draw(digits: DataSet, change: dict[str, int]) -> None:
    for augment in ("none", "crop-flip"):
        assert not same(draw(digits, augment=augment), draw(digits, augment=augment, **change))


def test_augmentation_leaves_the_order_alone(digits: DataSet) -> None:
    plain, flipped, cropped = (draw(digits, augment=augment) for augment in ("none", "flip", "crop-flip"))
    for one, two, three in zip(plain, flipped, cropped, strict=True):
        assert torch.equal(one[1], two[1])
        assert torch.equal(one[1], three[1])


def test_about_half_are_flipped(digits: DataSet) -> None:
    flipped = 0
    for (x, _), (u, _) in zip(draw(digits, 1000, augment="none"), draw(digits, 1000, augment="flip"), strict=True):
        for plain, augmented in zip(x, u, strict=True):
            mirrored = torch.equal(augmented, plain.flip(-1))
            assert mirrored or torch.equal(augmented, plain)
            flipped += mirrored
    assert 430 < flipped < 570


def test_crops_are_windows_of_the_padded_image(digits: DataSet) -> None:
    corners = np.array([[0, 0], [4, 4], [8, 1], [3, 8]])
    images = digits.x_train[:4]
    cropped = crop(images, corners)
    padded = np.pad(images, ((0, 0), (CROP_PAD,) * 2, (CROP_PAD,) * 2, (0, 0)))
    for image, window, (top, left) in zip(padded, cropped, corners, strict=True):
        assert np.array_equal(window, image[top : top + 8, left : left + 8])
    assert np.array_equal(cropped[1], images[1])


def test_auto_is_what_the_set_recommends(digits: DataSet) -> None:
    assert same(draw(digits, augment="auto"), draw(digits, augment=digits.augment))


@pytest.mark.parametrize(
    ("samples", "batch_size", "lengths"),
    [
        (64, 32, [32, 32]),
        (65, 32, [32, 32]),  # one left over is dropped
        (66, 32, [32, 32, 2]),
        (5, 32, [5]),
        (2, 32, [2]),
        (1, 32, [2]),  # the only sample, twice
        (3, 1, [1, 1, 1]),
    ],
)
def test_lengths_of_batches(digits: DataSet, samples: int, batch_size: int, lengths: list[int]) -> None:
    batches = draw(digits, samples, batch_size=batch_size)
    assert [len(y) for _, y in batches] == lengths
    assert len(batches) == len(lengths)


def test_no_samples_are_refused(digits: DataSet) -> None:
    with pytest.raises(ValueError, match="peer 3, round 5: there are no samples"):
        draw(digits, 0)


def test_evaluation_goes_through_everything_in_order(digits: DataSet) -> None:
    batches = list(evaluation_batches(digits, "test", batch_size=100))
    assert [len(y) for _, y in batches] == [100, 100, 97]
    assert torch.equal(torch.cat([x for x, _ in batches]), digits.normalize(digits.x_test))
    assert torch.cat([y for _, y in batches]).tolist() == digits.y_test.tolist()
    indices = np.array([5, 900, 17])
    ((x, y),) = evaluation_batches(digits, "train", indices)
    assert torch.equal(x, digits.normalize(digits.x_train[indices]))
    assert y.tolist() == digits.y_train[indices].tolist()
    assert list(evaluation_batches(digits, "train", np.array([], np.int64))) == []


def test_the_shared_arrays_cannot_be_written_through_a_batch(digits: DataSet) -> None:
    before = digits.x_train.copy(), digits.y_train.copy()
    for x, y in (*draw(digits), *evaluation_batches(digits, "train")):
        x.zero_()
        y.zero_()
    assert np.array_equal(digits.x_train, before[0])
    assert np.array_equal(digits.y_train, before[1])
