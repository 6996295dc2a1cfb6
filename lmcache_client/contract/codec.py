"""Converts values to MessagePack and back, and checks every field against its type.

Incoming data cannot name anything to import, call or build: msgspec accepts the numbers, texts, bytes and
arrays of MessagePack only where they fit the types of the expected value.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgpack  # type: ignore[import-untyped]
import msgspec
from msgspec import Meta

MAX_MESSAGE_BYTES = 4 << 20
"""Enough for the keys of 131,072 chunks, or for a million block ids."""
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 64
"""On the wire: CURVE adds 33 bytes to a message."""
MAX_TEXT = 1 << 16
MAX_SHOWN = 1024
NUMBER_BYTES = 4

Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
pack = msgspec.msgpack.encode
"""Encodes plain values and Wire values as MessagePack."""


class Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value that crosses the wire as the array of its fields. The bounds in the field types are checked
    when the value is decoded, not when code constructs it."""


class ProtocolError(ValueError):
    """The bytes are not a valid message of this protocol."""


def decoder(kind: Any) -> Callable[[bytes | msgspec.Raw], Any]:
    """Decodes values of this type. Raises ProtocolError that says what is malformed or does not fit."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def decoded(data: bytes | msgspec.Raw) -> Any:
        try:
            return decode(data)
        except Exception as error:  # msgspec raises several types, which all mean the same here
            raise ProtocolError(str(error)) from error

    return decoded


def packed(numbers: Iterable[int]) -> bytes:
    """Numbers below 2**32, with NUMBER_BYTES for each, in the byte order of this machine."""
    return array("I", numbers).tobytes()


def unpacked(numbers: bytes) -> Sequence[int]:
    """Reverses `packed`."""
    return memoryview(numbers).cast("I")


def first_numbers(data: bytes, count: int) -> list[int]:
    """The first `count` values of the array in `data`, which may be cut. Raises ProtocolError."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    try:
        unpacker.read_array_header()
        return [msgspec.convert(unpacker.unpack(), Natural) for _ in range(count)]
    except Exception as error:  # msgpack raises many types, which all mean the same here
        raise ProtocolError(f"not MessagePack: {error}") from error


def shown(text: str) -> str:
    """What of a text from the other side may enter a log: one line, and not too long."""
    return "".join(each if each.isprintable() else " " for each in text[:MAX_SHOWN])
