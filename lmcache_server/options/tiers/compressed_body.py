"""An object's bytes, compressed: shuffled by the size of an element, then by zstd or LZ4, with C-Blosc.

A compressed body is a header, the size of each segment as a uint32, and the segments. The header has the
method, the size of an element, the number of segments, the bytes of the body and those of the object. Each
segment has SEGMENT_BYTES of the object, the last one the rest. Blosc computes in the thread that calls it,
without the interpreter's lock.
"""

import ctypes
import functools
import importlib.util
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from lmcache_server.options.tiers.base import TierError
from lmcache_server.options.tiers.pieces import gather, size, spread

INSTALL = "run pip install '.[compress]' in this project's directory"
OFF, AUTO, ZSTD, LZ4 = "off", "auto", "zstd", "lz4"
METHODS = {ZSTD: (1, 1, 4), LZ4: (2, 2, 1)}
"""Their number in a header, Blosc's kind of shuffling (bytes or bits), and Blosc's number of the format."""
SEGMENT_BYTES = 1 << 20
MAX_ELEMENT_BYTES = 8
_BLOCK_BYTES = 512 << 10  # zstd looks at 128 KiB at a time: they should be one kind of bytes of the elements
_HEADER = struct.Struct("<BBHIQQ")
_BLOSC_HEADER = struct.Struct("<BBBBIII")


def is_installed() -> bool:
    return importlib.util.find_spec("blosc") is not None


@functools.cache
def _blosc() -> Any:
    try:
        import blosc
    except ImportError as error:
        raise TierError(f"its records are compressed: {INSTALL}") from error
    blosc.set_nthreads(1)
    blosc.set_releasegil(True)
    blosc.set_blocksize(_BLOCK_BYTES)
    return blosc


def compress(views: Sequence[memoryview], method: str, element_bytes: int) -> list[memoryview]:
    """The body for an object of these bytes, in parts. It may be larger than they are."""
    number, shuffle, _ = METHODS[method]
    compressed = [
        memoryview(_blosc().compress(_whole(parts), element_bytes, 1, shuffle, method))
        for parts in _segments(views)
    ]
    sizes = struct.pack(f"<{len(compressed)}I", *map(len, compressed))
    body_bytes = _HEADER.size + len(sizes) + size(compressed)
    header = _HEADER.pack(number, element_bytes, 0, len(compressed), body_bytes, size(views))
    return [memoryview(header + sizes), *compressed]


def expand(body: memoryview, views: Sequence[memoryview]) -> None:
    """Fills the views with the object. Raises ValueError if that is not exactly what the body has, before
    anything of another size is made; TierError without the package."""
    if body.nbytes < _HEADER.size:
        raise ValueError("no header")
    number, element_bytes, zero, count, body_bytes, plain_bytes = _HEADER.unpack_from(body)
    formats = [blosc_format for known, _, blosc_format in METHODS.values() if known == number]
    start = _HEADER.size + 4 * count
    if not formats or zero or not 0 < element_bytes <= MAX_ELEMENT_BYTES or start > body.nbytes:
        raise ValueError("no valid header")
    if plain_bytes != size(views) or count != -(-plain_bytes // SEGMENT_BYTES):
        raise ValueError(f"the header says {plain_bytes} bytes in {count} segments")
    sizes = struct.unpack_from(f"<{count}I", body, _HEADER.size)
    if body_bytes != start + sum(sizes) or body_bytes > body.nbytes:
        raise ValueError(f"the header says that {body_bytes} bytes are compressed")
    for length, parts in zip(sizes, _segments(views), strict=True):
        segment, start = body[start : start + length], start + length
        whole = parts[0] if len(parts) == 1 else memoryview(bytearray(size(parts)))
        _expand(segment, whole, formats[0], element_bytes)
        if len(parts) > 1:
            spread(whole, parts)


def _expand(segment: memoryview, into: memoryview, blosc_format: int, element_bytes: int) -> None:
    """Blosc makes as many bytes as the segment's own header says, and believes its block size."""
    blosc, num_bytes = _blosc(), into.nbytes
    if segment.nbytes < _BLOSC_HEADER.size:
        raise ValueError("a segment without a header")
    _, _, flags, typesize, plain, block, compressed = _BLOSC_HEADER.unpack_from(segment)
    if (plain, compressed, typesize) != (num_bytes, segment.nbytes, element_bytes) or not 0 < block <= plain:
        raise ValueError("a segment of another size")
    if flags >> 5 != blosc_format or not blosc.cbuffer_validate(segment):
        raise ValueError("a segment of another format")
    try:
        made = blosc.decompress_ptr(segment, ctypes.addressof(ctypes.c_char.from_buffer(into)))
    except Exception as error:  # its own, which is no ValueError
        raise ValueError(str(error)) from error
    if made != num_bytes:
        raise ValueError("a segment of another size")


def _segments(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    parts, room = list[memoryview](), SEGMENT_BYTES
    for view in views:
        start = 0
        while start < view.nbytes:
            parts.append(view[start : start + room])
            start, room = start + parts[-1].nbytes, room - parts[-1].nbytes
            if not room:
                yield parts
                parts, room = [], SEGMENT_BYTES
    if parts:
        yield parts


def _whole(parts: Sequence[memoryview]) -> memoryview:
    if len(parts) == 1:
        return parts[0]
    whole = memoryview(bytearray(size(parts)))
    gather(parts, whole)
    return whole
