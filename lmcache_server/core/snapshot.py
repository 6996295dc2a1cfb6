"""Turns the contents of a cache into plain values that outlive its process, and back.

A snapshot has only the chunks that are ready and not in use. One that is restored may come from anywhere, so
it is trusted only when every part of it agrees with the rest.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from lmcache_client.contract import codec
from lmcache_client.contract.codec import Natural, Wire
from lmcache_server.core.index import Chunk, Index
from lmcache_server.core.lru import EvictionOrder
from lmcache_server.core.packed import CHECKSUM_BYTES, PackedObjects, StoredObject
from lmcache_server.core.pool import FramePool, Runs, count_frames


class Row(Wire, frozen=True):
    """A chunk: the position of its namespace, the bits of its ready objects as little-endian bytes, and these
    objects as PackedObjects."""

    namespace: Natural
    key: bytes
    age_s: Annotated[float, Meta(ge=0, le=sys.float_info.max)]
    ready: bytes
    objects: bytes


class SnapshotError(ValueError):
    """The values are not the snapshot of a cache."""


@dataclass(frozen=True)
class Snapshot:
    """The contents of a cache as plain values. `rows` has a Row for each chunk, in the order of eviction."""

    total_frames: int
    namespaces: Sequence[bytes]
    rows: Sequence[Any]


@dataclass(frozen=True)
class Contents:
    """The parts of a cache. `stored_bytes` is the payload of all objects."""

    pool: FramePool
    index: Index
    order: EvictionOrder
    stored_bytes: int


def take(total_frames: int, order: Iterable[Chunk], now_s: float) -> Snapshot:
    """Takes a snapshot of the chunks in `order` from a cache of `total_frames` frames."""
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
    """Builds the parts of a cache from `snapshot`. Raises SnapshotError on any doubt."""
    index, order, taken, stored_bytes = Index(), EvictionOrder(), list[Runs](), 0
    try:
        for row in snapshot.rows:
            chunk = _chunk(snapshot.namespaces, codec.build(Row, row), now_s)
            for stored in _objects(chunk):
                frames = count_frames(stored.runs)
                if -(-stored.num_bytes // frame_bytes) != frames or not frames:
                    raise SnapshotError(f"an object of {stored.num_bytes} bytes has {frames} frames")
                if not stored.num_blocks or len(stored.checksums) % (CHECKSUM_BYTES * stored.num_blocks):
                    raise SnapshotError("an object has checksums for only some of its pages")
                taken.append(stored.runs)
                chunk.frames += frames
                stored_bytes += stored.num_bytes
            if index.get(chunk.namespace, chunk.key) is not None:
                raise SnapshotError("a chunk appears twice")
            index.add(chunk)
            order.add(chunk)
        pool = FramePool.around(snapshot.total_frames, taken)
    except (TypeError, ValueError) as error:
        raise SnapshotError(str(error)) from error
    return Contents(pool, index, order, stored_bytes)


def _chunk(namespaces: Sequence[bytes], row: Row, now_s: float) -> Chunk:
    if row.namespace >= len(namespaces):
        raise SnapshotError("the namespace of a chunk does not exist")
    chunk = Chunk(namespaces[row.namespace], row.key)
    chunk.ready = int.from_bytes(row.ready, "little")
    chunk.packed = PackedObjects(row.objects)
    chunk.last_used_s = now_s - row.age_s
    return chunk


def _objects(chunk: Chunk) -> list[StoredObject]:
    objects = chunk.packed.checked_objects()
    if not chunk.ready or chunk.ready.bit_count() != len(objects):
        raise SnapshotError("the bits of a chunk do not match its objects")
    return objects
