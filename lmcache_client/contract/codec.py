"""Values to MessagePack and back, checked against the type of every field.

Nothing is imported, called or built by a name that came in: MessagePack gives numbers, texts, bytes and
arrays, and msgspec accepts them only where they fit the types of the value that is expected.
"""

import itertools
from typing import Annotated, Any

import msgpack  # type: ignore[import-untyped]
import msgspec
from msgspec import Meta

MAX_MESSAGE_BYTES = 4 << 20
"""Room for the keys of twice 65,536 chunks, or for half a million block ids and more."""
MAX_ARRAYS = 1 << 17
"""In one message: an empty one takes a byte on the wire and 64 in memory."""
MAX_TEXT = 1 << 16

Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value that crosses the wire as the array of its fields. Bounds in the types of the fields are checked
    when it is built from what came in, not when it is constructed."""


class ProtocolError(ValueError):
    """Bytes that are no message of this protocol."""


def pack(value: object) -> bytes:
    """MessagePack of plain values and of Wire values."""
    packed: bytes = msgpack.packb(value, use_bin_type=True, default=_plain)
    return packed


def _plain(value: object) -> Any:
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def unpack(data: bytes) -> Any:
    """The plain value in `data`; raises ProtocolError on garbage and on anything over the bounds."""
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
            raw=False,
            use_list=True,
            # As many arrays take as many bytes; and the hook is a step of Python for each.
            list_hook=count if len(data) > MAX_ARRAYS else None,
            strict_map_key=True,
            max_str_len=MAX_TEXT,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_array_len=MAX_MESSAGE_BYTES,
            max_map_len=0,
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises a dozen types, all of which mean the same here
        raise ProtocolError(f"not MessagePack: {error}") from error


def build(kind: Any, plain: Any) -> Any:
    """The value of type `kind` from plain values; raises ProtocolError, which says where one does not fit."""
    try:
        return msgspec.convert(plain, type=kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(str(error)) from error
