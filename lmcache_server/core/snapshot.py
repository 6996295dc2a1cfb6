"""What a cache holds, as plain values that outlive its process, and back.

Only what is ready and not in use is taken. What comes back may come from anywhere: it is believed only
when all of it fits together.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from lmcache_client.contract import codec
from lmcache_client.contract.codec import Natural
from lmcache_server.core.index import Chunk, Index
from lmcache_server.core.lru import EvictionOrder
from lmcache_server.core.packed import CHECKSUM_BYTES, PackedObjects, StoredObject
from lmcache_server.core.pool import FramePool, Runs

Row = tuple[Natural, bytes, Annotated[float, Meta(ge=0, le=sys.float_info.max)], bytes, bytes]
"""A chunk: position of its namespace, key, seconds since its last use, bits of its ready objects as
little-endian bytes, these objects as PackedObjects."""


class SnapshotError(ValueError):
    """Values that are no snapshot of a cache."""


@dataclass(frozen=True)
class Snapshot:
    """`rows` has a Row for each chunk, the first to be evicted first."""

    total_frames: int
    namespaces: Sequence[bytes]
    rows: Sequence[Any]


@dataclass(frozen=True)
class Contents:
    """What a cache is made of. `stored_bytes` is the payload of all objects."""

    pool: FramePool
    index: Index
    order: EvictionOrder
    stored_bytes: int


def take(total_frames: int, order: Iterable[Chunk], now_s: float) -> Snapshot:
    """A snapshot of the chunks in `order`, of a cache of `total_frames` frames."""
    numbers: dict[bytes, int] = {}
    rows = [
        (
            numbers.setdefault(chunk.namespace, len(numbers)),
            chunk.key,
            max(0.0, now_s - chunk.last_used_s),
            chunk.ready.to_bytes((chunk.ready.bit_length() + 7) // 8, "little"),
            chunk.packed,
        )
        for chunk in order
    ]
    return Snapshot(total_frames, list(numbers), rows)


def rebuild(snapshot: Snapshot, frame_bytes: int, now_s: float) -> Contents:
    """The contents of a cache that holds what `snapshot` says. Raises SnapshotError on any doubt."""
    index, order, taken, stored_bytes = Index(), EvictionOrder(), list[Runs](), 0
    try:
        for row in snapshot.rows:
            chunk = _chunk(snapshot.namespaces, row, now_s)
            for stored in _objects(chunk):
                frames = sum([count for _, count in stored.runs])
                if -(-stored.num_bytes // frame_bytes) != frames or not frames:
                    raise SnapshotError(f"an object of {stored.num_bytes} bytes has {frames} frames")
                if not stored.num_blocks or len(stored.checksums) % (CHECKSUM_BYTES * stored.num_blocks):
                    raise SnapshotError("an object has checksums for a part of its pages")
                taken.append(stored.runs)
                chunk.frames += frames
                stored_bytes += stored.num_bytes
            if index.get(chunk.namespace, chunk.key) is not None:
                raise SnapshotError("a chunk is there twice")
            index.add(chunk)
            order.add(chunk)
        pool = FramePool.around(snapshot.total_frames, taken)
    except (TypeError, ValueError) as error:
        raise SnapshotError(str(error)) from error
    return Contents(pool, index, order, stored_bytes)


def _chunk(namespaces: Sequence[bytes], row: Any, now_s: float) -> Chunk:
    number, key, age_s, ready, objects = codec.build(Row, row)
    if number >= len(namespaces):
        raise SnapshotError("a chunk is of no namespace")
    chunk = Chunk(namespaces[number], key)
    chunk.ready = int.from_bytes(ready, "little")
    chunk.packed = PackedObjects(objects)
    chunk.last_used_s = now_s - age_s
    return chunk


def _objects(chunk: Chunk) -> list[StoredObject]:
    chunk.packed.check()
    objects = chunk.packed.objects()
    if not chunk.ready or chunk.ready.bit_count() != len(objects):
        raise SnapshotError("the bits and the objects of a chunk do not agree")
    return objects
