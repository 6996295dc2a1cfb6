"""Plans which bytes go where: the pieces of a copy between objects in L1 and blocks of an engine.

The bytes inside an object have a fixed order: region after region and, within a region, block after block. So
in region r the page of the k-th block of an object starts at
`num_blocks * (page bytes of the regions before r) + k * (page bytes of r)`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache_client.contract.geometry import Region
from lmcache_server.core.pool import Runs, count_frames

U64 = NDArray[np.uint64]


class Pieces(NamedTuple):
    """Arrays of equal length: addresses in L1, addresses in the engine's memory, and lengths in bytes."""

    local: U64
    remote: U64
    length: U64

    @property
    def num_bytes(self) -> int:
        return int(self.length.sum())


class ObjectCopy(NamedTuple):
    """Blocks of one object to copy: it has `num_blocks`, and those from number `first_page` on belong to the
    engine's blocks in `block_ids`."""

    runs: Runs
    num_blocks: int
    first_page: int
    block_ids: Sequence[int]


def payload(runs: Runs, num_bytes: int, l1_address: int, frame_bytes: int) -> list[tuple[int, int]]:
    """Where the bytes of an object lie in L1: (address, bytes) of each of its runs."""
    parts = []
    for first, count in runs:
        parts.append((l1_address + first * frame_bytes, min(count * frame_bytes, num_bytes)))
        num_bytes -= parts[-1][1]
    return parts


def pieces(
    page: ObjectCopy, regions: Sequence[Region], bases: Sequence[int], l1_address: int, frame_bytes: int
) -> Pieces:
    """The pieces of `page`, cut where the frames of its object are not contiguous.

    `bases` are the addresses of the engine's buffers; `Region.buffer` indexes them.
    """
    inside, remote, length = _pages([page], regions, bases, frame_bytes)
    starts, counts = np.array(page.runs, dtype=np.uint64).reshape(-1, 2).T
    # How many of the object's frames come before each of its runs, which are contiguous.
    before: U64 = np.cumsum(counts) - counts
    boundaries = before[1:] * np.uint64(frame_bytes)
    inside, remote, length = cut(inside.ravel(), remote.ravel(), length.ravel(), boundaries)
    frame, rest = np.divmod(inside, np.uint64(frame_bytes))
    run = np.searchsorted(before, frame, side="right") - 1
    local: U64 = np.uint64(l1_address) + (starts[run] + frame - before[run]) * np.uint64(frame_bytes) + rest
    return Pieces(local, remote, length)


def pieces_of_all(
    objects: Iterable[tuple[int, ObjectCopy]],
    regions: Sequence[Sequence[Region]],
    bases: Sequence[int],
    l1_address: int,
    frame_bytes: int,
) -> Pieces:
    """The pieces of several objects, each with its group, in no particular order. `regions` are those of each
    group. Most objects lie in a single run of frames. These are planned together instead of one by one."""
    alike: dict[tuple[int, int, int, int], list[ObjectCopy]] = {}
    parts = []
    for group, page in objects:
        if len(page.runs) == 1:
            alike.setdefault((group, page.num_blocks, page.first_page, len(page.block_ids)), []).append(page)
        else:
            parts.append(pieces(page, regions[group], bases, l1_address, frame_bytes))
    for (group, *_), same in alike.items():
        inside, remote, length = _pages(same, regions[group], bases, frame_bytes)
        starts = np.array([page.runs[0][0] for page in same], dtype=np.uint64)
        begins = np.uint64(l1_address) + starts * np.uint64(frame_bytes)
        local = begins[:, None, None] + inside
        parts.append(Pieces(local.ravel(), remote.ravel(), length.ravel()))
    return join(parts)


def _pages(
    alike: Sequence[ObjectCopy], regions: Sequence[Region], bases: Sequence[int], frame_bytes: int
) -> tuple[U64, U64, U64]:
    """For each object, region and block: the page's position in its object (equal for all objects), its
    address in the engine's memory, and its bytes. The objects differ only in frames and block ids."""
    page = alike[0]
    end_page = page.first_page + len(page.block_ids)
    object_bytes = page.num_blocks * sum(region.page_bytes for region in regions)
    # A page outside the object's own frames would overwrite other objects.
    assert page.first_page >= 0
    assert end_page <= page.num_blocks
    assert object_bytes <= frame_bytes * min(count_frames(same.runs) for same in alike)
    sizes = np.array([region.page_bytes for region in regions], dtype=np.uint64)
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.uint64) * np.uint64(page.num_blocks)
    positions = np.arange(page.first_page, end_page, dtype=np.uint64)
    blocks = np.array([same.block_ids for same in alike], dtype=np.uint64)
    origins = np.array([bases[region.buffer] + region.offset for region in regions], dtype=np.uint64)
    strides = np.array([region.stride_bytes for region in regions], dtype=np.uint64)
    inside: U64 = starts[:, None] + positions * sizes[:, None]
    remote: U64 = blocks[:, None, :] * strides[:, None]
    remote += origins[:, None]
    return inside, remote, np.broadcast_to(sizes[:, None], remote.shape)


def cut(inside: U64, remote: U64, length: U64, boundaries: U64) -> tuple[U64, U64, U64]:
    """Cuts pages at `boundaries`, which are positions like `inside`. Most pages cross none.

    With boundaries at 16 and 24, a page of 20 bytes at 10 becomes three pieces: 10 to 16, 16 to 24 and 24 to
    30, each with its own address in the engine's memory.
    """
    if not len(boundaries):
        return inside, remote, length
    first = np.searchsorted(boundaries, inside, side="right")
    last = np.searchsorted(boundaries, inside + length, side="left")
    cuts = last - first
    if not cuts.any():
        return inside, remote, length
    index = np.repeat(np.arange(len(inside)), cuts + 1)
    k = np.arange(len(index)) - np.repeat(np.cumsum(cuts + 1) - (cuts + 1), cuts + 1)
    bounds = np.concatenate((boundaries, [np.iinfo(np.uint64).max])).astype(np.uint64)
    start = np.where(k == 0, inside[index], bounds[np.maximum(first[index] + k - 1, 0)])
    stop = np.minimum(bounds[np.minimum(first[index] + k, len(bounds) - 1)], (inside + length)[index])
    from_byte: U64 = start.astype(np.uint64)
    to_byte: U64 = stop.astype(np.uint64)
    skipped: U64 = from_byte - inside[index]
    return from_byte, remote[index] + skipped, to_byte - from_byte


def join(parts: Sequence[Pieces]) -> Pieces:
    """The pieces of several objects, one object after the other."""
    if len(parts) == 1:
        return parts[0]
    return Pieces(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def first_of_later_slices(ends: U64, slice_bytes: int) -> NDArray[np.intp]:
    """The first piece of each slice but the first. A piece belongs to the slice in which its first byte lies.
    `ends`, which is not empty, has for each piece the bytes up to its end."""
    borders = np.arange(slice_bytes, int(ends[-1]), slice_bytes, dtype=np.uint64)
    found = np.searchsorted(ends, borders) + 1
    is_new = np.diff(found, prepend=0) > 0
    return found[is_new & (found < len(ends))]


def slices(length: U64, slice_bytes: int) -> list[tuple[int, int, int]]:
    """Splits pieces of these lengths into slices of about `slice_bytes`: of each, its first piece, the one
    behind its last, and its bytes. No piece is cut."""
    if not len(length):
        return []
    ends = np.cumsum(length)
    stops = np.append(first_of_later_slices(ends, slice_bytes), len(length))
    sizes = np.diff(ends[stops - 1], prepend=np.uint64(0)).tolist()
    return list(zip([0, *stops[:-1].tolist()], stops.tolist(), sizes, strict=True))


def adjacent(address: U64, length: U64) -> NDArray[np.bool_]:
    """Of each piece but the first, whether it begins where the one before ends."""
    goes_on: NDArray[np.bool_] = address[1:] - address[:-1] == length[:-1]
    return goes_on


def merged(goes_on: NDArray[np.bool_], length: U64, *addresses: U64) -> tuple[U64, ...]:
    """(lengths, addresses ...) with each piece that `goes_on` (see `adjacent`) joined to the one before."""
    if not goes_on.any():
        return length, *addresses
    first = np.flatnonzero(np.append(True, ~goes_on))
    return np.add.reduceat(length, first), *(address[first] for address in addresses)
