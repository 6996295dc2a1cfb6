"""Converts values to MessagePack and back, and checks every field against its type.

Incoming data cannot name anything to import, call or build: MessagePack yields numbers, texts, bytes and
arrays, and msgspec accepts them only where they fit the types of the expected value.
"""

import itertools
from typing import Annotated, Any

import msgpack  # type: ignore[import-untyped]
import msgspec
from msgspec import Meta

MAX_MESSAGE_BYTES = 4 << 20
"""Enough for the keys of 131,072 chunks, or for more than half a million block ids."""
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 64
"""On the wire: CURVE adds 33 bytes to a message."""
MAX_ARRAYS = 1 << 17
"""The limit per message: an empty array takes one byte on the wire but 64 bytes in memory."""
MAX_TEXT = 1 << 16
MAX_SHOWN = 1024

Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value that crosses the wire as the array of its fields. The bounds in the field types are checked
    when `build` makes the value from incoming data, not when code constructs it."""


class ProtocolError(ValueError):
    """The bytes are not a valid message of this protocol."""


def pack(value: object) -> bytes:
    """Encodes plain values and Wire values as MessagePack."""
    return msgspec.msgpack.encode(value)


def unpack(data: bytes) -> Any:
    """Decodes the plain value in `data`. Raises ProtocolError if the data is malformed or exceeds a limit."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, not {len(data)}")
    arrays = itertools.count(1)

    def count(array: list[Any]) -> list[Any]:
        if next(arrays) > MAX_ARRAYS:
            raise ProtocolError(f"a message has at most {MAX_ARRAYS} arrays")
        return array

    try:
        return msgpack.unpackb(
            data,
            # An array takes at least one byte, so shorter data is spared the slow hook.
            list_hook=count if len(data) > MAX_ARRAYS else None,
            max_str_len=MAX_TEXT,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_array_len=MAX_MESSAGE_BYTES,
            max_map_len=0,
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises many types, which all mean the same here
        raise ProtocolError(f"not MessagePack: {error}") from error


def unpack_first(data: bytes, count: int) -> list[Any]:
    """Decodes the first `count` values of the array in `data`, which may be cut. Raises ProtocolError."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    try:
        unpacker.read_array_header()
        return [unpacker.unpack() for _ in range(count)]
    except Exception as error:
        raise ProtocolError(f"not MessagePack: {error}") from error


def build(kind: Any, plain: Any) -> Any:
    """Builds a value of type `kind` from plain values. Raises ProtocolError that says what does not fit."""
    try:
        return msgspec.convert(plain, type=kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


def shown(text: str) -> str:
    """What of a text from the other side may enter a log: one line, and not too long."""
    return "".join(each if each.isprintable() else " " for each in text[:MAX_SHOWN])


def opened(frame: bytes) -> list[Any]:
    """The parts of a request or reply, of which the first two are numbers. Raises ProtocolError."""
    envelope = unpack(frame)
    if not isinstance(envelope, list) or len(envelope) < 2:
        raise ProtocolError("not an lmcache-mp message")
    numbers(envelope[:2])
    return envelope


def numbers(values: list[Any]) -> list[int]:
    if any(type(number) is not int or not 0 <= number < 1 << 63 for number in values):
        raise ProtocolError("not an lmcache-mp message")
    return values


def exactly(count: int, rest: list[Any]) -> list[Any]:
    if len(rest) != count:
        raise ProtocolError(f"expected {count + 2} parts, got {len(rest) + 2}")
    return rest
