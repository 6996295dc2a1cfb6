"""Dataclasses to MessagePack arrays and back, checked against the type of every field.

A message is the array of its fields in order. Decoding accepts exactly the annotated types: int (not
negative, below 2**63), str, bytes, bool, tuple[X, ...], tuple[X, Y] and nested dataclasses. Anything
else raises ProtocolError; nothing is imported, called or built by a name that came in.
"""

import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]

MAX_MESSAGE_BYTES = 4 << 20
"""Room for the keys of twice 65,536 chunks, or for half a million block ids and more."""
MAX_ARRAYS = 1 << 17
"""In one message: an empty one takes a byte on the wire and 64 in memory."""
MAX_TEXT = 1 << 16

Decoder = Callable[[Any], Any]


class ProtocolError(ValueError):
    """Bytes that are no message of this protocol."""


def pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


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


def to_fields(message: object) -> list[object]:
    """A dataclass as the plain values that `pack` takes."""
    return [_plain(getattr(message, name)) for name in _names(type(message))]  # type: ignore[arg-type]


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        if value and isinstance(value[0], (int, str, bytes)):
            return value
        return [_plain(item) for item in value]
    return to_fields(value) if dataclasses.is_dataclass(value) else value


@functools.cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def from_fields(cls: type, values: Any) -> Any:
    """The dataclass `cls` from plain values; raises ProtocolError when one does not fit its field."""
    try:
        return _dataclass_decoder(cls)(values)
    except ProtocolError as error:
        raise ProtocolError(f"{cls.__name__}: {error}") from None
    except (ValueError, OverflowError) as error:  # a dataclass that refused its own values
        raise ProtocolError(f"{cls.__name__}: {error}") from error


@functools.cache
def _dataclass_decoder(cls: type) -> Decoder:
    hints = typing.get_type_hints(cls)
    decoders = tuple(_decoder(hints[name]) for name in _names(cls))

    def decode(values: Any) -> Any:
        if not isinstance(values, list) or len(values) != len(decoders):
            raise ProtocolError(f"expected {len(decoders)} fields")
        return cls(*[decoder(value) for decoder, value in zip(decoders, values, strict=True)])

    return decode


def _decoder(hint: Any) -> Decoder:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_decoder(hint)
    if hint in (str, bytes, bool):
        return functools.partial(_exact, hint)
    if hint is int:
        return _natural
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        if items == (int, Ellipsis):
            return _naturals
        if items == (bytes, Ellipsis):
            return _byte_strings
        if len(items) == 2 and items[1] is Ellipsis:
            return functools.partial(_many, _decoder(items[0]))
        return functools.partial(_fixed, tuple(map(_decoder, items)))
    raise TypeError(f"no decoder for {hint}")


def _exact(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ProtocolError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ProtocolError("expected an integer from 0 to 2**63-1")
    return value


def _naturals(value: Any) -> tuple[int, ...]:
    """Checked without a step of Python per number: block ids come by the hundred thousand."""
    if not isinstance(value, list):
        raise ProtocolError("expected an array")
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 1 << 63):
        raise ProtocolError("expected integers from 0 to 2**63-1")
    return tuple(value)


def _byte_strings(value: Any) -> tuple[bytes, ...]:
    """Likewise: a lookup has a key for every chunk of a prompt."""
    if not isinstance(value, list) or (value and set(map(type, value)) != {bytes}):
        raise ProtocolError("expected an array of byte strings")
    return tuple(value)


def _many(item: Decoder, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ProtocolError("expected an array")
    return tuple(map(item, value))


def _fixed(items: tuple[Decoder, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != len(items):
        raise ProtocolError(f"expected an array of {len(items)}")
    return tuple(decode(one) for decode, one in zip(items, value, strict=True))
