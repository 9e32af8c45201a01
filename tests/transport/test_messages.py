"""What peers say survives the wire unchanged, and a stranger's bytes are refused with one kind of error."""

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.messages import (
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    Ack,
    BadMessage,
    Beat,
    Credit,
    Decline,
    Envelope,
    Leave,
    Message,
    Offer,
    Piece,
    Resend,
    decode,
    encode,
)

thorough = settings(max_examples=300, deadline=None, derandomize=True, database=None)

counts = st.integers(0, 2**48 - 1)
hashes = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 2**40, exclude_max=True)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Beat, counts, counts, seconds),
    st.builds(Offer, counts, counts, hashes, counts, counts, hashes, seconds, counts),
    st.builds(Credit, counts, counts),
    st.builds(Piece, counts, counts, hashes, seconds),
    st.builds(Resend, counts, st.lists(counts, max_size=64)),
    st.builds(Ack, counts),
    st.builds(Decline, counts, st.text(max_size=200)),
    st.builds(Leave),
)
envelopes = st.builds(
    Envelope, st.just(PROTOCOL_VERSION), st.binary(min_size=16, max_size=16), counts, counts, messages
)


def said(message: Message) -> Envelope:
    return Envelope(PROTOCOL_VERSION, bytes(16), 1, 0, message)


@thorough
@given(envelopes)
def test_a_message_comes_back_as_it_was(envelope: Envelope) -> None:
    frame = encode(envelope)
    assert decode(frame) == envelope
    assert decode(memoryview(frame)) == envelope


def test_the_longest_message_fits_into_a_header() -> None:
    most = 2**48 - 1
    for message in (Resend(most, [most] * 64), Decline(most, "\N{SNOWMAN}" * 200)):
        frame = encode(Envelope(PROTOCOL_VERSION, bytes(16), most, most, message))
        assert decode(frame).message == message


@thorough
@given(st.one_of(st.binary(max_size=4096), st.builds(bytes.__add__, st.builds(encode, envelopes), st.binary())))
def test_any_bytes_are_a_message_or_refused(frame: bytes) -> None:
    try:
        envelope = decode(frame)
    except BadMessage as error:
        assert str(error)
    else:
        assert envelope.version == PROTOCOL_VERSION and len(envelope.run) == 16


@thorough
@given(envelopes, st.data())
def test_a_flipped_bit_is_a_message_or_refused(envelope: Envelope, data: st.DataObject) -> None:
    frame = bytearray(encode(envelope))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decoded = decode(bytes(frame))
    except BadMessage:
        return
    assert decode(encode(decoded)) == decoded


@thorough
@given(st.binary(min_size=1, max_size=4096), st.data())
def test_a_flipped_bit_of_a_body_shows_in_the_checksum(body: bytes, data: st.DataObject) -> None:
    damaged = bytearray(body)
    damaged[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert xxhash.xxh3_64_intdigest(bytes(damaged)) != xxhash.xxh3_64_intdigest(body)


def plain(*fields: object) -> bytes:
    """An envelope written field by field."""
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "not a message"),
        (plain(PROTOCOL_VERSION + 1, bytes(16), 1, 0, (8,)), f"version {PROTOCOL_VERSION + 1}"),
        (encode(said(Leave())) + b"\0", "trailing"),
        (plain(PROTOCOL_VERSION, bytes(16), 1, 0, (8,), 7), "at most length 5, got 6"),
        (plain(PROTOCOL_VERSION, bytes(16), 1, 0, (6, 1, 1)), "at most length 1, got 2"),
        (plain(PROTOCOL_VERSION, bytes(16), 1, 0), "at least length 5, got 4"),
        (plain(PROTOCOL_VERSION, bytes(16), 1, 0, (99,)), "Invalid value 99"),
        (plain(PROTOCOL_VERSION, bytes(15), 1, 0, (8,)), "length >= 16"),
        (plain(PROTOCOL_VERSION, bytes(16), -1, 0, (8,)), ">= 0"),
        (plain(PROTOCOL_VERSION, bytes(16), 1, 0, (6, 2**48)), "<= 281474976710655"),
        (plain(PROTOCOL_VERSION, bytes(16), 1, 0, (6, 1.5)), "Expected `int`"),
        (plain(PROTOCOL_VERSION, bytes(16), 1, 0, (1, 1, 1, float("nan"))), ">= 0"),
        (plain(PROTOCOL_VERSION, bytes(16), 1, 0, (1, 1, 1, float("inf"))), "< 1099511627776"),
        (plain(PROTOCOL_VERSION, bytes(16), 1, 0, (5, 1, [0] * 65)), "length <= 64"),
        (plain(PROTOCOL_VERSION, bytes(16), 1, 0, (7, 1, "x" * 201)), "length <= 200"),
        (b"\x91" * 1000, "not a message"),
        (b"\xdd\xff\xff\xff\xff", "not a message"),
        (b"\xc6\xff\xff\xff\xff", "not a message"),
        (bytes(MAX_HEADER_BYTES + 1), f"at most {MAX_HEADER_BYTES}"),
    ],
)
def test_what_is_no_message_is_refused_with_the_reason(frame: bytes, why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        decode(frame)
