"""Partitions are disjoint, complete, deterministic and of the sizes that their kind promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from peer.data import partition as rules
from peer.data.partition import (
    Indices,
    Kind,
    assign_classes,
    deal_alike,
    dirichlet,
    partition,
    pathological,
    public_split,
)
from topology.errors import TopologyError

GOLDEN = Path(__file__).parents[1] / "golden" / "fedcc_golden.json"
KINDS: tuple[Kind, ...] = ("dirichlet", "dirichlet-capped", "pathological", "quantity", "iid")


def balanced(classes: int, each: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(classes), each))


def deal(labels: NDArray[np.int64], peers: int, kind: Kind, seed: int = 0, **options: Any) -> list[Indices]:
    settled = {"alpha": 0.5, "classes_per_peer": 2, "min_samples": 1} | options
    return partition(labels, peers, int(labels.max()) + 1, kind, np.random.default_rng(seed), **settled)


def sizes(labels: NDArray[np.int64], shards: list[Indices]) -> NDArray[np.int64]:
    """Samples of each class a peer holds, (peers, classes)."""
    return np.array([np.bincount(labels[shard], minlength=int(labels.max()) + 1) for shard in shards])


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    peers=st.integers(1, 12),
    classes=st.integers(2, 12),
    alpha=st.sampled_from([0.3, 1.0, 100.0]),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_sample_has_exactly_one_peer(kind: Kind, peers: int, classes: int, alpha: float, seed: int) -> None:
    labels = balanced(classes, 60)
    options = {"alpha": alpha, "classes_per_peer": max(2, -(-classes // peers))}
    shards = deal(labels, peers, kind, seed, **options)
    assert len(shards) == peers
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(len(labels)))
    assert all(len(shard) >= 1 and shard.dtype == np.int64 for shard in shards)
    again = deal(labels, peers, kind, seed, **options)
    assert all(np.array_equal(one, other) for one, other in zip(shards, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_is_another_partition(kind: Kind) -> None:
    labels = balanced(10, 100)
    one, other = deal(labels, 10, kind, seed=1), deal(labels, 10, kind, seed=2)
    assert any(not np.array_equal(mine, yours) for mine, yours in zip(one, other, strict=True))


@given(samples=st.integers(10, 200), peers=st.integers(1, 10))
def test_iid_shards_differ_by_at_most_one(samples: int, peers: int) -> None:
    shards = deal(np.arange(samples) % 2, peers, "iid")
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 1


def test_dirichlet_follows_its_proportions() -> None:
    """With a huge alpha all shares are equal; with a small one most of a class is at few peers."""
    labels = balanced(10, 1000)
    even = sizes(labels, deal(labels, 10, "dirichlet", alpha=1e6))
    assert abs(even - 100).max() <= 2
    skewed = sizes(labels, deal(labels, 10, "dirichlet", alpha=0.05))
    assert (skewed.max(0) > 500).mean() > 0.5


def test_dirichlet_cuts_at_the_floor_of_the_cumulated_shares() -> None:
    labels = balanced(3, 101)
    shards = dirichlet(labels, 4, 3, np.random.default_rng(5), alpha=1.0, min_samples=1)
    shares = np.random.default_rng(5).dirichlet(np.ones(4), size=3)
    cuts = np.floor(np.cumsum(shares, axis=1)[:, :-1] * 101).astype(int)
    expected = np.array([np.diff([0, *row, 101]) for row in cuts]).T
    assert np.array_equal(sizes(labels, shards), expected)


def test_dirichlet_redraws_until_every_peer_has_the_minimum() -> None:
    labels = balanced(10, 100)
    seed = next(seed for seed in range(100) if min(map(len, deal(labels, 10, "dirichlet", seed, alpha=0.1))) < 30)
    shards = deal(labels, 10, "dirichlet", seed, alpha=0.1, min_samples=30)
    assert min(map(len, shards)) >= 30


@settings(deadline=None, max_examples=60)
@given(peers=st.integers(1, 20), classes=st.integers(2, 25), data=st.data())
def test_class_owners_are_as_even_as_can_be(peers: int, classes: int, data: st.DataObject) -> None:
    least = -(-classes // peers)
    per_peer = data.draw(st.integers(least, classes))
    owned = assign_classes(peers, classes, per_peer, np.random.default_rng(data.draw(st.integers(0, 99))))
    assert owned.sum(1).tolist() == [per_peer] * peers
    owners = owned.sum(0)
    assert owners.min() >= 1
    assert owners.max() - owners.min() <= (1 if peers * per_peer % classes else 0)


def test_class_owners_are_random() -> None:
    """Any two of ten peers with 2 of 10 classes share one or more of them as often as chance says."""
    shared = np.zeros((10, 10))
    for seed in range(300):
        owned = assign_classes(10, 10, 2, np.random.default_rng(seed)).astype(int)
        shared += owned @ owned.T > 0
    pairs = shared[~np.eye(10, dtype=bool)] / 300
    assert abs(pairs - pairs.mean()).max() < 0.12
    assert 0.15 < pairs.mean() < 0.25


def test_pathological_splits_a_class_equally_among_its_owners() -> None:
    labels = balanced(10, 101)
    held = sizes(labels, deal(labels, 10, "pathological", classes_per_peer=2))
    assert ((held > 0).sum(1) == 2).all()
    assert ((held > 0).sum(0) == 2).all()
    assert np.isin(held, [0, 50, 51]).all()


def test_quantity_pieces_are_uneven_and_owners_have_a_fifth_of_the_classes() -> None:
    labels = balanced(10, 500)
    held = sizes(labels, deal(labels, 20, "quantity", min_samples=10))
    assert ((held > 0).sum(1) == 2).all()
    assert ((held > 0).sum(0) == 4).all()
    for pieces in held.T:
        owned = np.sort(pieces[pieces > 0])
        assert (owned[:-1] <= 125).all()
        assert owned[-1] >= 125
        assert owned[0] >= 6  # a twentieth of the equal share
    assert len(np.unique(held[held > 0])) > 20


def test_fewer_samples_than_peers() -> None:
    for kind in KINDS:
        with pytest.raises(TopologyError, match=r"swarm\.peers = 7, but the training set has only 6 samples"):
            deal(balanced(2, 3), 7, kind)


@pytest.mark.parametrize(
    ("peers", "kind", "options", "message"),
    [
        (
            10,
            "dirichlet",
            {"min_samples": 101},
            "10 peers would need 1010 samples and the training set has 1000",
        ),
        (10, "iid", {"min_samples": 101}, r"data\.min_samples = 101 cannot be met"),
        (50, "dirichlet", {"alpha": 0.05, "min_samples": 15}, r"drawn 1000 times.*data\.alpha = 0\.05"),
        (50, "quantity", {"min_samples": 19}, "drawn 1000 times gives the smallest of 50 shards"),
        (10, "pathological", {"classes_per_peer": 11}, r"classes_per_peer = 11, .* only 10 classes"),
        (3, "pathological", {"classes_per_peer": 3}, "it must be at least 4, or use more peers"),
        (900, "pathological", {}, "class 0 has 100 training samples, fewer than its 180 owners"),
    ],
)
def test_what_cannot_be_met_is_explained(peers: int, kind: Kind, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        deal(balanced(10, 100), peers, kind, **options)


class NoChance:
    """A generator that draws the given proportions and shuffles nothing."""

    def __init__(self, proportions: list[list[float]]) -> None:
        self._proportions = np.array(proportions)

    def dirichlet(self, alpha: NDArray[np.float64], size: int) -> NDArray[np.float64]:
        assert self._proportions.shape == (size, len(alpha))
        return self._proportions

    def permutation(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        return values


def test_recorded_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against values recorded from a separate numpy program."""
    cases = json.loads(GOLDEN.read_text())["cases"]
    case = next(case for case in cases if case["id"] == "f12_partition")
    inputs, expected = case["inputs"], case["expected"]
    rng: Any = NoChance(inputs["proportions"])
    labels = np.repeat(np.arange(3), inputs["class_sizes"])
    held = sizes(labels, dirichlet(labels, 3, 3, rng, alpha=1.0, min_samples=1))
    assert held.T.tolist() == expected["dirichlet_counts_class_by_client"]

    owned = np.zeros((3, 3), bool)
    for label, owners in inputs["owners"].items():
        owned[owners, int(label)] = True
    monkeypatch.setattr(rules, "assign_classes", lambda *_: owned)
    labels = np.repeat(np.arange(3), inputs["owned_class_size"])
    held = sizes(labels, pathological(labels, 3, 3, rng, classes_per_peer=2))
    for label, owners in expected["pathological_sizes"].items():
        assert {str(peer): held[peer, int(label)] for peer in np.flatnonzero(held[:, int(label)])} == owners


@pytest.mark.parametrize(("classes", "per_peer", "owners"), [(10, 2, 2), (10, 1, 1), (100, 20, 2), (200, 20, 1)])
def test_every_class_has_as_many_owners_as_the_paper_gives_it(classes: int, per_peer: int, owners: int) -> None:
    held = sizes(labels := balanced(classes, 10), deal(labels, 10, "pathological", classes_per_peer=per_peer))
    assert ((held > 0).sum(0) == owners).all()
    assert (held[held > 0] == 10 // owners).all()


@settings(deadline=None, max_examples=60)
@given(samples=st.integers(2, 300), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**63 - 1))
def test_public_and_private_are_all_samples_and_none_twice(samples: int, fraction: float, seed: int) -> None:
    if not 0 < round(fraction * samples) < samples:
        with pytest.raises(TopologyError, match="at least one must be public and one private"):
            public_split(samples, fraction, np.random.default_rng(seed))
        return
    public, private = public_split(samples, fraction, np.random.default_rng(seed))
    assert np.array_equal(np.sort(np.concatenate([public, private])), np.arange(samples))
    assert all(np.array_equal(part, np.sort(part)) and part.dtype == np.int64 for part in (public, private))
    assert len(public) == round(fraction * samples)
    again = public_split(samples, fraction, np.random.default_rng(seed))
    assert np.array_equal(public, again[0])


def test_public_samples_are_drawn_uniformly_and_not_by_class() -> None:
    labels = balanced(10, 500)
    drawn = np.array([public_split(5000, 0.1, np.random.default_rng(seed))[0] for seed in range(200)])
    assert drawn.shape == (200, 500)
    each = np.bincount(drawn.ravel(), minlength=5000) / 200
    assert abs(each.mean() - 0.1) < 1e-12
    assert each.std() == pytest.approx((0.1 * 0.9 / 200) ** 0.5, rel=0.05)
    by_class = np.array([np.bincount(labels[public], minlength=10) for public in drawn])
    assert by_class.std() == pytest.approx((500 * 0.1 * 0.9 * 0.9) ** 0.5, rel=0.1)  # stratified would be 0


@pytest.mark.parametrize("fraction", [0.0, 1.0, 0.001, -0.1, 2.0])
def test_an_empty_side_of_the_public_split_is_refused(fraction: float) -> None:
    with pytest.raises(TopologyError, match=rf"public share of {fraction} of 100 training samples makes"):
        public_split(100, fraction, np.random.default_rng(0))


def test_a_capped_peer_gets_no_more_classes() -> None:
    """Once a peer holds its equal share it gets none of the next class, so shards are more even than without."""
    labels = np.repeat(np.arange(10), 200)
    largest = {}
    for kind in ("dirichlet", "dirichlet-capped"):
        sizes = []
        for seed in range(20):
            rng = np.random.default_rng(seed)
            parts = partition(labels, 5, 10, kind, rng, alpha=0.1, classes_per_peer=2, min_samples=1)
            assert sorted(np.concatenate(parts).tolist()) == list(range(2000))
            held = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
            if kind == "dirichlet-capped":
                before = np.cumsum(held, axis=1) - held
                # Rounding of the cuts moves a sample or two, never a share.
                full = before >= 400 + 10
                assert held[full].sum() <= 2 * full.sum()
            sizes.append(max(len(part) for part in parts))
        largest[kind] = np.mean(sizes)
    assert largest["dirichlet-capped"] < largest["dirichlet"]


def test_test_samples_are_dealt_in_the_proportions_of_what_is_held() -> None:
    held = np.array([[30, 10, 0], [0, 0, 7], [0, 0, 0]])
    labels = np.repeat([0, 1, 2], [40, 5, 3])
    parts = deal_alike(labels, held, np.random.default_rng(0))
    assert [np.bincount(labels[part], minlength=3).tolist() for part in parts] == [[30, 0, 0], [10, 0, 0], [0, 5, 0]]
    again = deal_alike(labels, held, np.random.default_rng(0))
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))
