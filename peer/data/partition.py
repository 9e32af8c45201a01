"""Deals training samples to peers: none twice, the same for the same generator, no shard below its minimum.

Indices come back as sorted arrays: one a peer for labels (N,), and two for the split into public and private.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from topology.errors import TopologyError

Indices = NDArray[np.int64]
Kind = Literal["dirichlet", "dirichlet-capped", "pathological", "quantity", "iid"]
DRAWS = 1000


def partition(
    labels: NDArray[np.integer[Any]],
    peers: int,
    classes: int,
    kind: Kind,
    rng: Generator,
    *,
    alpha: float,
    classes_per_peer: int,
    min_samples: int,
) -> list[Indices]:
    """Deal the samples of `labels` to `peers` shards of at least `min_samples` (and never 0) each."""
    if len(labels) < peers:
        raise TopologyError(
            f"swarm.peers = {peers}, but the training set has only {len(labels)} samples, fewer than one "
            "a peer. Use fewer peers or a larger data set (data.name)."
        )
    minimum = max(1, min_samples)
    if kind in ("dirichlet", "dirichlet-capped"):
        capped = kind == "dirichlet-capped"
        shards = dirichlet(labels, peers, classes, rng, alpha=alpha, min_samples=minimum, capped=capped)
    elif kind == "pathological":
        shards = pathological(labels, peers, classes, rng, classes_per_peer=classes_per_peer)
    elif kind == "quantity":
        shards = quantity(labels, peers, classes, rng, min_samples=minimum)
    else:
        shards = iid(labels, peers, rng)
    smallest = min(len(shard) for shard in shards)
    if smallest < minimum:
        raise _too_small(f"data.partition = {kind!r}", peers, len(labels), minimum, smallest, "")
    return shards


def public_split(samples: int, fraction: float, rng: Generator) -> tuple[Indices, Indices]:
    """Draw `fraction` of `samples` uniformly at random, rounded, as public; returns those and the private rest.

    Both are sorted. Labels play no part in the draw, so classes are not equally many.
    """
    public = round(fraction * samples)
    if not 0 < public < samples:
        raise TopologyError(
            f"a public share of {fraction} of {samples} training samples makes {public} of them public; at least one "
            "must be public and one private"
        )
    order = rng.permutation(samples)
    return np.sort(order[:public]), np.sort(order[public:])


def iid(labels: NDArray[np.integer[Any]], peers: int, rng: Generator) -> list[Indices]:
    """Equal shards at random; their sizes differ by at most 1."""
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), peers)]


def dirichlet(
    labels: NDArray[np.integer[Any]],
    peers: int,
    classes: int,
    rng: Generator,
    *,
    alpha: float,
    min_samples: int,
    capped: bool = False,
) -> list[Indices]:
    """Split each class in proportions drawn from a symmetric Dirichlet(alpha) over the peers.

    The whole draw is repeated until every peer has `min_samples`; moving samples from full peers
    would change the distribution. `capped`, as CoPL's code has it: class by class, a peer that already holds its
    equal share of all samples gets none of the next, unless all do.
    """
    counts = np.bincount(labels, minlength=classes)

    def draw() -> NDArray[np.int64]:
        proportions = rng.dirichlet(np.full(peers, alpha), size=classes)
        if capped:
            held = np.zeros(peers)
            for label, drawn in enumerate(proportions):
                open_to = np.where(held < len(labels) / peers, drawn, 0.0)
                proportions[label] = open_to / open_to.sum() if open_to.sum() > 0 else drawn
                held += proportions[label] * counts[label]
        cuts = np.floor(np.cumsum(proportions, axis=1) * counts[:, None]).astype(np.int64)
        cuts[:, -1] = counts  # the last peer takes what rounding left
        return np.diff(cuts, axis=1, prepend=0)

    advice = f"data.alpha = {alpha} (a larger one makes shards more even), "
    sizes = _draw_until(draw, min_samples, "dirichlet", peers, len(labels), advice)
    return _deal(labels, sizes, rng)


def pathological(
    labels: NDArray[np.integer[Any]], peers: int, classes: int, rng: Generator, *, classes_per_peer: int
) -> list[Indices]:
    """Give every peer exactly `classes_per_peer` classes, and split each class equally among its owners.

    Every class has peers * classes_per_peer / classes owners, where that is no integer one more or one less.
    """
    if classes_per_peer > classes:
        raise TopologyError(f"data.classes_per_peer = {classes_per_peer}, but the data set has only {classes} classes.")
    if peers * classes_per_peer < classes:
        raise TopologyError(
            f"data.classes_per_peer = {classes_per_peer} with swarm.peers = {peers} leaves some of "
            f"the {classes} classes without an owner; it must be at least "
            f"{-(-classes // peers)}, or use more peers."
        )
    owned = assign_classes(peers, classes, classes_per_peer, rng)
    counts = _count_for_owners(labels, owned, "pathological")
    sizes = np.zeros((classes, peers), np.int64)
    for label, count in enumerate(counts):
        owners = rng.permutation(np.flatnonzero(owned[:, label]))
        sizes[label, owners] = count // len(owners)
        sizes[label, owners[: count % len(owners)]] += 1
    return _deal(labels, sizes, rng)


def quantity(
    labels: NDArray[np.integer[Any]], peers: int, classes: int, rng: Generator, *, min_samples: int
) -> list[Indices]:
    """Give every peer a fifth of the classes, and split each class among its owners in random uneven pieces.

    All owners of a class but one draw a size from a K-th of the equal share (or min_samples / classes, if
    that is more) up to the equal share, K the number of peers; the last one, at random, takes the rest.
    """
    classes_per_peer = max(1, round(0.2 * classes), -(-classes // peers))
    owned = assign_classes(peers, classes, classes_per_peer, rng)
    counts = _count_for_owners(labels, owned, "quantity")

    def draw() -> NDArray[np.int64]:
        sizes = np.zeros((classes, peers), np.int64)
        for label, count in enumerate(counts):
            *drawn, last = rng.permutation(np.flatnonzero(owned[:, label]))
            share = count // (len(drawn) + 1)
            least = min(share, max(1, share // peers, min_samples // classes))
            sizes[label, drawn] = rng.integers(least, share, size=len(drawn), endpoint=True)
            sizes[label, last] = count - sizes[label].sum()
        return sizes

    return _deal(labels, _draw_until(draw, min_samples, "quantity", peers, len(labels), ""), rng)


def assign_classes(peers: int, classes: int, classes_per_peer: int, rng: Generator) -> NDArray[np.bool_]:
    """Choose at random which classes each peer owns, as a table (peers, classes).

    Each peer owns `classes_per_peer` classes, and the numbers of owners of two classes differ by at most 1.
    """
    owned = np.zeros((peers, classes), bool)
    for peer in range(peers):  # the classes with fewest owners first: that alone keeps the counts even
        order = rng.permutation(classes)
        owned[peer, order[np.argsort(owned.sum(0)[order], kind="stable")][:classes_per_peer]] = True
    for _ in range(10 * peers if peers > 1 else 0):  # trades between two peers keep all counts and forget the order
        one, other = rng.choice(peers, 2, replace=False)
        differing = rng.permutation(np.flatnonzero(owned[one] != owned[other]))
        share = owned[one, differing].sum()
        owned[one, differing] = np.arange(len(differing)) < share
        owned[other, differing] = np.arange(len(differing)) >= share
    return owned


def _count_for_owners(labels: NDArray[np.integer[Any]], owned: NDArray[np.bool_], kind: str) -> NDArray[np.int64]:
    counts = np.bincount(labels, minlength=owned.shape[1])
    owners = owned.sum(0)
    short = np.flatnonzero(counts < owners)
    if len(short):
        label = short[0]
        raise TopologyError(
            f"data.partition = {kind!r}: class {label} has {counts[label]} training samples, fewer than its "
            f"{owners[label]} owners. Use fewer peers (swarm.peers) or another partition."
        )
    return counts


def _draw_until(
    draw: Callable[[], NDArray[np.int64]], min_samples: int, kind: str, peers: int, samples: int, advice: str
) -> NDArray[np.int64]:
    largest = 0  # of the smallest shards seen
    for _ in range(DRAWS if peers * min_samples <= samples else 0):
        sizes = draw()
        smallest = int(sizes.sum(0).min())
        if smallest >= min_samples:
            return sizes
        largest = max(largest, smallest)
    described = f"data.partition = {kind!r} drawn {DRAWS} times"
    raise _too_small(described, peers, samples, min_samples, largest, advice)


def _too_small(described: str, peers: int, samples: int, min_samples: int, smallest: int, advice: str) -> TopologyError:
    if peers * min_samples > samples:
        reason = f"{peers} peers would need {peers * min_samples} samples and the training set has {samples}"
    else:
        reason = f"{described} gives the smallest of {peers} shards {smallest} of {samples} samples at best"
    return TopologyError(
        f"data.min_samples = {min_samples} cannot be met: {reason}. Change {advice}data.min_samples or swarm.peers."
    )


def deal_alike(labels: NDArray[np.integer[Any]], held: NDArray[np.int64], rng: Generator) -> list[Indices]:
    """Deal samples so that each class goes to the peers in the proportions of `held` (classes, peers), say of test
    images after the training images were dealt. Nobody gets what nobody holds."""
    counts = np.bincount(labels, minlength=len(held))
    shares = np.cumsum(held, axis=1) / np.maximum(held.sum(axis=1, keepdims=True), 1)
    cuts = np.floor(shares * counts[:, None] + 1e-9).astype(np.int64)
    return _deal(labels, np.diff(cuts, axis=1, prepend=0), rng)


def _deal(labels: NDArray[np.integer[Any]], sizes: NDArray[np.int64], rng: Generator) -> list[Indices]:
    """Hand out each class, shuffled, in pieces of `sizes` (classes, peers)."""
    hands: list[list[Indices]] = [[] for _ in range(sizes.shape[1])]
    for label, pieces in enumerate(sizes):
        shuffled = rng.permutation(np.flatnonzero(labels == label))
        for hand, piece in zip(hands, np.split(shuffled[: pieces.sum()], np.cumsum(pieces)[:-1]), strict=True):
            hand.append(piece)
    return [np.sort(np.concatenate(hand)) for hand in hands]
