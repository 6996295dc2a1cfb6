"""The codec: bounded, typed, and deaf to everything that is not plain data."""

import tracemalloc
from dataclasses import dataclass

import msgpack
import pytest

from lmcache_client.contract import codec
from lmcache_client.contract.codec import MAX_ARRAYS, MAX_MESSAGE_BYTES, MAX_TEXT, ProtocolError


@dataclass(frozen=True)
class Inner:
    name: str
    flag: bool


@dataclass(frozen=True)
class Outer:
    number: int
    blob: bytes
    inner: Inner
    many: tuple[Inner, ...]
    pairs: tuple[tuple[int, int], ...]
    nested: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Floating:
    ratio: float


VALUE = Outer(
    2**63 - 1, b"\0\xff", Inner("é", True), (Inner("", False),) * 2, ((1, 2), (3, 4)), ((), (5,), ())
)


def test_every_kind_of_field_survives():
    assert codec.from_fields(Outer, codec.unpack(codec.pack(codec.to_fields(VALUE)))) == VALUE


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, -1, "from 0 to"),
        (0, 2**63, "from 0 to"),
        (0, False, "from 0 to"),
        (0, "1", "from 0 to"),
        (1, "text", "expected bytes, got str"),
        (2, ["n"], "expected 2 fields"),
        (2, ["n", 1], "expected bool, got int"),
        (2, None, "expected 2 fields"),
        (3, b"ab", "expected an array"),
        (3, [None], "expected 2 fields"),
        (4, [[1]], "expected an array of 2"),
        (4, [[1, 2, 3]], "expected an array of 2"),
        (5, [[1, None]], "from 0 to"),
        (5, [[1], [7, -1]], "from 0 to"),
        (5, [[2**63]], "from 0 to"),
        (5, [[True]], "from 0 to"),
        (5, [7], "expected an array"),
    ],
)
def test_a_field_of_another_type_is_refused(position, value, message):
    fields = codec.unpack(codec.pack(codec.to_fields(VALUE)))
    fields[position] = value
    with pytest.raises(ProtocolError, match=f"Outer: .*{message}"):
        codec.from_fields(Outer, fields)


def test_a_type_that_the_codec_does_not_know_is_a_mistake_of_ours():
    with pytest.raises(TypeError, match="no decoder"):
        codec.from_fields(Floating, [1.0])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\x01\x01",
        msgpack.packb({"a": 1}),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb(msgpack.Timestamp(1)),
        msgpack.packb("x" * (MAX_TEXT + 1)),
        b"\xa1\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
        bytes(MAX_MESSAGE_BYTES + 1),
        msgpack.packb([[]] * MAX_ARRAYS),
    ],
    ids=["nothing", "reserved", "cut off", "more", "map", "extension", "timestamp", "long text", "not utf-8",
         "huge array", "huge blob", "deep", "long", "many arrays"],
)  # fmt: skip
def test_what_is_no_plain_data_within_bounds_is_refused(data):
    with pytest.raises(ProtocolError):
        codec.unpack(data)


def test_a_message_takes_little_more_memory_than_its_bound():
    """The worst that fits: arrays that are empty, numbers that are objects, texts of two characters."""
    for worst in ([[]] * (MAX_ARRAYS - 1), [1 << 15] * (MAX_MESSAGE_BYTES // 3 - 9), ["ab"] * 1_390_000):
        frame = msgpack.packb(worst)
        assert len(frame) <= MAX_MESSAGE_BYTES
        tracemalloc.start()
        codec.unpack(frame)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 120 << 20
