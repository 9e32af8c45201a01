"""Buffers come out of a block as they went in, and what does not fit a layout is refused."""

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.layout import DTYPES, Field, Layout, digest_of, seal

thorough = settings(max_examples=100, deadline=None, derandomize=True, database=None)

layouts = st.lists(
    st.tuples(
        st.text(max_size=12),
        st.sampled_from(sorted(DTYPES)),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    max_size=6,
    unique_by=lambda field: field[0],
).map(lambda fields: Layout(tuple(Field(*field) for field in fields)))


def buffers_of(layout: Layout, seed: int) -> dict[str, np.ndarray]:
    """Any bits at all, so NaN and infinity too."""
    random = np.random.default_rng(seed)
    return {
        field.name: np.frombuffer(random.bytes(field.bytes), DTYPES[field.dtype]).reshape(field.shape)
        for field in layout.fields
    }


@thorough
@given(layouts, st.integers(0, 2**32))
def test_what_is_packed_is_unpacked(layout: Layout, seed: int) -> None:
    buffers = buffers_of(layout, seed)
    block = layout.pack(buffers)
    assert block.dtype == np.uint8 and block.shape == (layout.bytes,)
    found = layout.unpack(block)
    assert list(found) == [field.name for field in layout.fields]
    for field in layout.fields:
        assert found[field.name].dtype == DTYPES[field.dtype] and found[field.name].shape == field.shape
        assert found[field.name].tobytes() == buffers[field.name].tobytes()


@thorough
@given(layouts, st.integers(0, 2**32))
def test_fields_follow_each_other_without_a_gap(layout: Layout, seed: int) -> None:
    buffers = buffers_of(layout, seed)
    assert layout.pack(buffers).tobytes() == b"".join(buffers[field.name].tobytes() for field in layout.fields)


def test_unpacking_copies_nothing() -> None:
    layout = Layout((Field("a", "uint8", (3,)), Field("b", "float32", (2,))))
    block = layout.pack({"a": np.zeros(3, np.uint8), "b": np.zeros(2, np.float32)})
    layout.unpack(block)["b"][1] = 7.0
    assert layout.unpack(block)["b"].tolist() == [0.0, 7.0]


def test_packing_takes_what_is_not_contiguous() -> None:
    matrix = np.arange(6, dtype=np.int32).reshape(2, 3)
    layout = Layout((Field("m", "int32", (3, 2)),))
    assert layout.unpack(layout.pack({"m": matrix.T}))["m"].tolist() == matrix.T.tolist()


@pytest.mark.parametrize(
    ("buffers", "why"),
    [
        ({"w": np.zeros(3, np.float64)}, r"w is float64 \(3,\), the layout has float32 \(3,\)"),
        ({"w": np.zeros(4, np.float32)}, r"w is float32 \(4,\), the layout has float32 \(3,\)"),
        ({"w": np.zeros((3, 1), np.float32)}, r"w is float32 \(3, 1\)"),
        ({"w": np.zeros(3, ">f4")}, "w is >f4"),
        ({}, r"the layout has \['w'\], the buffers are \[\]"),
        ({"w": np.zeros(3, np.float32), "x": np.zeros(1, np.float32)}, r"the buffers are \['w', 'x'\]"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(buffers: dict[str, np.ndarray], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Layout((Field("w", "float32", (3,)),)).pack(buffers)


def test_only_listed_types_travel() -> None:
    for dtype in ("object", "O", "float64", "<U9999999", "V2147483647", ""):
        with pytest.raises(ValueError, match=r"w: type .* cannot travel, allowed: float32, "):
            Layout((Field("w", dtype, (3,)),))
    with pytest.raises(ValueError, match="distinct names"):
        Layout((Field("w", "uint8", (1,)), Field("w", "uint8", (2,))))


def test_the_hash_tells_layouts_apart() -> None:
    fields = (Field("a", "float32", (2, 3)), Field("b", "int64", ()))
    others = [
        (fields[1], fields[0]),
        fields[:1],
        (Field("a", "float32", (3, 2)), fields[1]),
        (Field("a", "int32", (2, 3)), fields[1]),
        (Field("A", "float32", (2, 3)), fields[1]),
        (Field("a' float32 (2, 3)\n'b", "int64", ()),),
        (Field("a float32 (2, 3)\nb", "int64", ()),),
    ]
    assert Layout(fields).hash == Layout(tuple(Field(f.name, f.dtype, f.shape) for f in fields)).hash
    assert len({Layout(some).hash for some in [fields, *others]}) == 1 + len(others)


@pytest.mark.parametrize(("size", "pieces"), [(0, 1), (1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_a_sealed_block_is_cut_into_pieces_and_will_not_change(size: int, pieces: int) -> None:
    layout = Layout((Field("x", "uint8", (size,)),))
    block = np.arange(size, dtype=np.uint8)
    snapshot = seal(layout, block, 10)
    cut = [bytes(snapshot.piece(index)) for index in range(pieces)]
    assert layout.pieces(10) == len(snapshot.checksums) == pieces
    assert b"".join(cut) == block.tobytes() and all(len(piece) == 10 for piece in cut[:-1])
    assert snapshot.checksums == tuple(xxhash.xxh3_64_intdigest(piece) for piece in cut)
    assert snapshot.digest == digest_of(snapshot.checksums)
    assert snapshot.piece(0).readonly
    with pytest.raises(ValueError, match="read-only"):
        block[...] = 0


def test_the_digest_is_of_the_bytes_and_their_order() -> None:
    layout = Layout((Field("x", "uint8", (30,)),))
    block = np.arange(30, dtype=np.uint8)
    digests = {seal(layout, some.copy(), 10).digest for some in (block, block[::-1], np.roll(block, 10), block)}
    assert len(digests) == 3
