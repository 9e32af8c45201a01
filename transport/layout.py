"""Named buffers laid out in one block of bytes, known to both ends before a byte moves.

A receiver allocates from the layout it expects, never from what a sender claims; only the layout's hash travels.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import xxhash
from numpy.typing import NDArray

# Fixed table: a type name from elsewhere must never reach numpy.dtype. bfloat16 travels as its bits.
DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint8": np.dtype("u1"),
}

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Field:
    """One named buffer of a layout."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return DTYPES[self.dtype].itemsize * prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """An ordered list of named buffers, contiguous from byte 0."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"a layout needs distinct names, got {sorted(names)}")
        for field in self.fields:
            if field.dtype not in DTYPES:
                raise ValueError(f"{field.name}: type {field.dtype!r} cannot travel, allowed: {', '.join(DTYPES)}")

    @cached_property
    def bytes(self) -> int:
        """Payload bytes of one message of this layout."""
        return sum(field.bytes for field in self.fields)

    @cached_property
    def hash(self) -> int:
        """64 bits that two equal layouts share."""
        text = "\n".join(f"{field.name!r} {field.dtype} {field.shape}" for field in self.fields)
        return xxhash.xxh3_64_intdigest(text.encode())

    def pieces(self, piece_bytes: int) -> int:
        """How many pieces a message of this layout travels in; an empty one still has one."""
        return max(1, -(-self.bytes // piece_bytes))

    def pack(self, buffers: Mapping[str, np.ndarray]) -> Bytes:
        """Copy named buffers into one block. Raises ValueError when they do not fit the layout."""
        names = {field.name for field in self.fields}
        if buffers.keys() != names:
            raise ValueError(f"the layout has {sorted(names)}, the buffers are {sorted(buffers)}")
        block = np.empty(self.bytes, dtype=np.uint8)
        for field, place in self._places(block):
            buffer = buffers[field.name]
            if buffer.dtype != DTYPES[field.dtype] or buffer.shape != field.shape:
                raise ValueError(
                    f"{field.name} is {buffer.dtype} {buffer.shape}, the layout has {field.dtype} {field.shape}"
                )
            place[...] = buffer
        return block

    def unpack(self, block: Bytes) -> dict[str, np.ndarray]:
        """The named buffers as views into a block."""
        return {field.name: place for field, place in self._places(block)}

    def _places(self, block: Bytes) -> Iterator[tuple[Field, np.ndarray]]:
        start = 0
        for field in self.fields:
            view = block[start : start + field.bytes].view(DTYPES[field.dtype]).reshape(field.shape)
            start += field.bytes
            yield field, view


LayoutOf = Callable[[int], Layout]
"""What one neighbor's message is laid out like in a round."""


def always(layout: Layout) -> LayoutOf:
    """The same in every round."""
    return lambda _: layout


@dataclass(frozen=True)
class Snapshot:
    """A block that will not change any more, with the checksum of each piece, ready for any number of neighbors."""

    layout: Layout
    block: Bytes
    piece_bytes: int
    checksums: tuple[int, ...]
    digest: int

    def piece(self, index: int) -> memoryview:
        start = index * self.piece_bytes
        return self.block.data[start : start + self.piece_bytes]


def seal(layout: Layout, block: Bytes, piece_bytes: int) -> Snapshot:
    """Checksum a block piece by piece and make it read-only."""
    block.setflags(write=False)
    view = block.data
    checksums = tuple(
        xxhash.xxh3_64_intdigest(view[index * piece_bytes : (index + 1) * piece_bytes])
        for index in range(layout.pieces(piece_bytes))
    )
    return Snapshot(layout, block, piece_bytes, checksums, digest_of(checksums))


def digest_of(checksums: tuple[int, ...]) -> int:
    """The digest of a whole snapshot: the hash of its pieces' hashes."""
    return xxhash.xxh3_64_intdigest(b"".join(checksum.to_bytes(8, "little") for checksum in checksums))
