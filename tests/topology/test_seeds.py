import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.seeds import stream, stream_seed

thorough = settings(max_examples=100, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**63 - 1)
names = st.lists(st.integers() | st.text(), max_size=4).map(tuple)


@thorough
@given(seeds, names)
def test_a_seed_has_63_bits_and_is_always_the_same(seed: int, purpose: tuple[int | str, ...]) -> None:
    assert stream_seed(seed, *purpose) == stream_seed(seed, *purpose)
    assert 0 <= stream_seed(seed, *purpose) < 2**63


@thorough
@given(st.lists(st.tuples(seeds, names), min_size=2, max_size=6, unique_by=repr))
def test_other_seeds_or_names_give_other_streams(purposes: list[tuple[int, tuple[int | str, ...]]]) -> None:
    assert len({stream_seed(seed, *purpose) for seed, purpose in purposes}) == len(purposes)


@pytest.mark.parametrize(("one", "other"), [((1,), ("1",)), (("ab",), ("a", "b")), (("a,b",), ("a", "b")), ((), ("",))])
def test_names_are_told_apart(one: tuple[int | str, ...], other: tuple[int | str, ...]) -> None:
    assert stream_seed(1024, *one) != stream_seed(1024, *other)


def test_what_looks_like_a_number_but_is_spelled_otherwise_is_refused() -> None:
    with pytest.raises(TypeError):
        stream_seed(1024, np.int64(3))  # type: ignore[arg-type]


def test_recorded_values_stay_as_they_are() -> None:
    """A change here silently changes every experiment ever run."""
    assert stream_seed(1024, "init", 3) == 5338473019880012645
    assert stream(1024, "partition").integers(0, 1000, 5).tolist() == [54, 495, 874, 704, 221]
