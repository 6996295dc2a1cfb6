"""Records between the pieces of their frames and one buffer, for clients that know only that."""

from collections.abc import Sequence

import numpy as np

PAGE_BYTES = 4096


def size(pieces: Sequence[memoryview]) -> int:
    """The bytes of all together."""
    return sum(piece.nbytes for piece in pieces)


def fits(num_bytes: int, pieces: Sequence[memoryview]) -> bool:
    """Whether a record of so many bytes may be read into the pieces: it has whole pages."""
    return 0 < num_bytes <= size(pieces) and num_bytes % PAGE_BYTES == 0


def first(pieces: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What has the first bytes of all together."""
    cut = []
    for piece in pieces:
        cut.append(piece[:num_bytes])
        num_bytes -= cut[-1].nbytes
    return list(filter(len, cut))


def gather(pieces: Sequence[memoryview], buffer: memoryview) -> None:
    """Copy the pieces, one after the other, to the start of the buffer."""
    _copy(pieces, buffer, False)


def spread(buffer: memoryview, pieces: Sequence[memoryview]) -> None:
    """Copy the start of the buffer to the pieces, one after the other."""
    _copy(pieces, buffer, True)


def _copy(pieces: Sequence[memoryview], buffer: memoryview, to_pieces: bool) -> None:
    # NumPy copies without holding up other threads; a memoryview does not.
    whole, start = np.frombuffer(buffer, np.uint8), 0
    for piece in pieces:
        part, own = whole[start : start + piece.nbytes], np.frombuffer(piece, np.uint8)
        np.copyto(own, part) if to_pieces else np.copyto(part, own)
        start += piece.nbytes
