"""The codec: bounded, typed, and deaf to everything that is not plain data."""

import tracemalloc

import msgpack
import pytest

from lmcache_client.contract import codec
from lmcache_client.contract.codec import Natural, ProtocolError, Wire


class Inner(Wire, frozen=True):
    name: str
    flag: bool


class Outer(Wire, frozen=True):
    number: Natural
    blob: bytes
    inner: Inner
    many: tuple[Inner, ...]
    pairs: tuple[tuple[Natural, Natural], ...]
    nested: tuple[tuple[Natural, ...], ...]
    last: bool = False


VALUE = Outer(
    2**63 - 1, b"\0\xff", Inner("é", True), (Inner("", False),) * 2, ((1, 2), (3, 4)), ((), (5,), ()), True
)


def test_every_kind_of_field_survives_and_one_with_a_default_may_be_left_out():
    fields = codec.unpack(codec.pack(VALUE))
    assert codec.build(Outer, fields) == VALUE
    assert codec.build(Outer, fields[:-1]).last is False


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, -1, "`int` >= 0"),
        (0, 2**63, "`int` <= 9223372036854775807"),
        (0, False, "got `bool`"),
        (0, 1.0, "got `float`"),
        (0, "1", "got `str`"),
        (1, "text", "Expected `bytes`, got `str`"),
        (2, ["n"], "at least length 2"),
        (2, ["n", True, 1], "at most length 2"),
        (2, None, "Expected `array`, got `null`"),
        (3, [None], "Expected `array`"),
        (4, [[1]], "length 2"),
        (4, [[1, 2, 3]], "length 2"),
        (5, [[1], [7, -1]], "`int` >= 0"),
        (6, 1, "Expected `bool`"),
    ],
)
def test_a_field_of_another_type_is_refused(position, value, message):
    fields = codec.unpack(codec.pack(VALUE))
    fields[position] = value
    with pytest.raises(ProtocolError, match=rf"{message}.* - at `\$\[{position}\]"):
        codec.build(Outer, fields)


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
        msgpack.packb("x" * (codec.MAX_TEXT + 1)),
        b"\xa1\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
        bytes(codec.MAX_MESSAGE_BYTES + 1),
        msgpack.packb([[]] * codec.MAX_ARRAYS),
    ],
    ids=["nothing", "reserved", "cut off", "more", "map", "extension", "timestamp", "long text", "not utf-8",
         "huge array", "huge blob", "deep", "long", "many arrays"],
)  # fmt: skip
def test_what_is_no_plain_data_within_bounds_is_refused(data):
    with pytest.raises(ProtocolError):
        codec.unpack(data)


def test_a_message_takes_little_more_memory_than_its_bound():
    """The worst that fits: arrays that are empty, numbers that are objects, texts of two characters."""
    for worst in (
        [[]] * (codec.MAX_ARRAYS - 1),
        [1 << 15] * (codec.MAX_MESSAGE_BYTES // 3 - 9),
        ["ab"] * 1_390_000,
    ):
        frame = msgpack.packb(worst)
        assert len(frame) <= codec.MAX_MESSAGE_BYTES
        tracemalloc.start()
        codec.unpack(frame)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 120 << 20
