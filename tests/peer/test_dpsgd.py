"""The averaging step of D-PSGD."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.methods.dpsgd import mix

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def snapshot(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


SHAPES = {"linear.weight": (3, 2), "linear.bias": (3,), "scale": ()}


def test_weighted_average_by_hand() -> None:
    own, left, right = ({"w": torch.tensor([value])} for value in (1.0, 10.0, 100.0))
    mixed = mix(own, [(0.25, left), (0.25, right)], own_weight=0.5)
    assert mixed["w"].tolist() == [28.0]
    assert own["w"].tolist() == [1.0]


def test_weight_of_an_absent_neighbor_is_shared_among_those_present() -> None:
    own, left = ({"w": torch.tensor([value])} for value in (1.0, 10.0))
    mixed = mix(own, [(0.25, left)], own_weight=0.5)  # a third, weight 0.25, is missing
    assert mixed["w"].item() == pytest.approx((0.5 * 1 + 0.25 * 10) / 0.75)


@pytest.mark.parametrize("own_weight", [1.0, 0.5, 0.0])
def test_alone_a_peer_keeps_its_own(own_weight: float) -> None:
    own = snapshot(0)
    mixed = mix(own, [], own_weight=own_weight)
    assert all(mixed[name].equal(own[name]) for name in SHAPES)
    mixed["scale"] += 1
    assert not mixed["scale"].equal(own["scale"])


@quick
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=6), st.integers(0, 2**31))
def test_doubly_stochastic_mixing_keeps_the_mean_and_equal_models(weights: list[float], seed: int) -> None:
    peers = [snapshot(seed + number, torch.float64) for number in range(len(weights))]
    same = mix(peers[0], [(weight, peers[0]) for weight in weights], own_weight=0.3)
    for name in SHAPES:
        torch.testing.assert_close(same[name], peers[0][name], atol=1e-12, rtol=1e-12)
    ring = [  # a circulant matrix of these weights: its rows and columns have the same sum
        mix(
            peers[i],
            [(w, peers[(i + shift) % len(peers)]) for shift, w in enumerate(weights) if shift],
            own_weight=weights[0],
        )
        for i in range(len(peers))
    ]
    for name in SHAPES:
        before, after = (torch.stack([p[name] for p in group]).mean(0) for group in (peers, ring))
        torch.testing.assert_close(after, before, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_accumulates_in_float64_and_returns_the_dtype(dtype: torch.dtype) -> None:
    own, *others = (snapshot(seed, dtype) for seed in range(40))
    mixed = mix(own, [(1 / 40, other) for other in others], own_weight=1 / 40)
    for name in SHAPES:
        exact = torch.stack([p[name].double() for p in (own, *others)]).mean(0)
        assert mixed[name].dtype == dtype
        torch.testing.assert_close(mixed[name], exact.to(dtype), atol=0, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("own", "neighbor", "weight", "message"),
    [
        ({"w": torch.ones(2)}, {"w": torch.ones(3)}, 0.5, r"'w' is \(2,\) in model 0 and \(3,\) in model 1"),
        ({"w": torch.ones(2)}, {"v": torch.ones(2)}, 0.5, r"'w' is \(2,\) in model 0 and absent in model 1"),
        ({}, {"v": torch.ones(2)}, 0.5, r"'v' is absent in model 0 and \(2,\) in model 1"),
        ({"steps": torch.ones(1).long()}, {"steps": torch.ones(1).long()}, 0.5, "'steps' is torch.int64"),
        ({"w": torch.ones(2)}, {"w": torch.ones(2)}, -0.5, r"the models' weights are \[0.5, -0.5\]"),
        ({"w": torch.ones(2)}, {"w": torch.ones(2)}, float("nan"), "none may be below 0"),
    ],
)
def test_what_cannot_be_averaged_is_refused(
    own: dict[str, Tensor], neighbor: dict[str, Tensor], weight: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mix(own, [(weight, neighbor)], own_weight=0.5)
