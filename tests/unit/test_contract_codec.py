"""The codec: bounded, typed, and deaf to everything that is not plain data."""

from typing import Any

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


outer = codec.decoder(Outer)


def plain() -> list[Any]:
    """The fields of VALUE, as another library reads them."""
    fields: list[Any] = msgpack.unpackb(codec.pack(VALUE))
    return fields


def test_every_kind_of_field_survives_and_one_with_a_default_may_be_left_out():
    assert outer(codec.pack(VALUE)) == outer(msgpack.packb(plain())) == VALUE
    assert outer(codec.pack(plain()[:-1])).last is False


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
        (2, None, "Expected `array`, got `None`"),
        (3, [None], "Expected `array`"),
        (4, [[1]], "length 2"),
        (4, [[1, 2, 3]], "length 2"),
        (5, [[1], [7, -1]], "`int` >= 0"),
        (6, 1, "Expected `bool`"),
    ],
)
def test_a_field_of_another_type_is_refused(position, value, message):
    fields = plain()
    fields[position] = value
    with pytest.raises(ProtocolError, match=rf"{message}.* - at `\$\[{position}\]"):
        outer(codec.pack(fields))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        codec.pack(VALUE) + b"\1",
        msgpack.packb({"a": 1}),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb(msgpack.Timestamp(1)),
        b"\x97\x01\xc4\x00\x92\xa1\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x92\x01\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
    ],
    ids=["nothing", "reserved", "cut off", "more", "map", "extension", "timestamp", "not utf-8",
         "huge array", "huge blob", "deep"],
)  # fmt: skip
def test_what_is_no_plain_data_within_bounds_is_refused(data):
    with pytest.raises(ProtocolError):
        outer(data)
