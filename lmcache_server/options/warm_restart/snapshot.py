"""Turns the contents of a cache into plain values, these into bytes that outlive its process, and back.

A snapshot has the ready chunks that are not in use, and those that an option protects. One that is restored
may come from anywhere, so it is trusted only when every part of it agrees with the rest.
"""

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lmcache_client.contract import codec
from lmcache_client.contract.codec import Natural, Wire
from lmcache_client.contract.keys import TenantId
from lmcache_server.core.cache import Cache, Contents
from lmcache_server.core.index import Chunk, Index
from lmcache_server.core.lru import EvictionOrder
from lmcache_server.core.packed import CHECKSUM_BYTES, PackedObjects, StoredObject
from lmcache_server.core.pool import FramePool, Runs, count_frames

MAX_SECONDS = 1e12
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]


class Row(Wire, frozen=True):
    """A chunk: the position of its namespace, the seconds since its last use and since it was first stored,
    the bits of its ready objects as little-endian bytes, its tenant, and these objects as PackedObjects."""

    namespace: Natural
    key: bytes
    age_s: Seconds
    stored_age_s: Seconds
    ready: bytes
    tenant: TenantId
    objects: bytes


class SnapshotError(ValueError):
    """The values are not the snapshot of a cache."""


@dataclass(frozen=True)
class Snapshot:
    """The contents of a cache as plain values. `rows` has a Row for each chunk, in the order of eviction,
    with the protected ones last. It was taken `age_s` seconds ago."""

    total_frames: int
    namespaces: Sequence[bytes]
    rows: Sequence[Row]
    age_s: float = 0.0


Known = dict[bytes, dict[str, Any]]
"""Summaries of namespaces, for reports."""
Saved = dict[str, bytes]
"""What each option has saved, by its module."""
_Content = tuple[Seconds, Natural, list[bytes], list[str], list[Row], Saved]
"""Unix time, frames, namespaces, the summary of each namespace as JSON, rows, what options saved."""


def take(cache: Cache, now_s: float) -> Snapshot:
    """Returns, for `rebuild`, the chunks that nothing refers to, and then the protected ones."""
    chunks = [*cache.evictable, *cache.protected]
    numbers: dict[bytes, int] = {}
    rows = [
        Row(
            numbers.setdefault(chunk.namespace, len(numbers)),
            chunk.key,
            min(max(0.0, now_s - chunk.last_used_s), MAX_SECONDS),
            min(max(0.0, now_s - chunk.stored_s), MAX_SECONDS),
            chunk.ready.to_bytes((chunk.ready.bit_length() + 7) // 8, "little"),
            chunk.tenant,
            bytes(chunk.packed),  # msgspec encodes no subclass
        )
        for chunk in chunks
    ]
    return Snapshot(cache.total_frames, list(numbers), rows)


def rebuild(snapshot: Snapshot, cache: Cache, now_s: float) -> None:
    """Fills an empty cache from `snapshot`. Raises SnapshotError, and leaves it empty, unless every part of
    the snapshot agrees with the rest."""
    index, order, taken, stored_bytes = Index(), EvictionOrder(), list[Runs](), 0
    chunks, names, frame_bytes = list[Chunk](), dict[bytes, bytes](), cache.frame_bytes
    try:
        for row in snapshot.rows:
            # The chunks of a tenant share one name.
            tenant = names.setdefault(row.tenant, row.tenant)
            chunk = _chunk(snapshot.namespaces, tenant, row, now_s)
            for stored in _objects(chunk):
                frames = count_frames(stored.runs)
                if -(-stored.num_bytes // frame_bytes) != frames or not frames:
                    raise SnapshotError(f"an object of {stored.num_bytes} bytes has {frames} frames")
                if not stored.num_blocks or len(stored.checksums) % (CHECKSUM_BYTES * stored.num_blocks):
                    raise SnapshotError("an object has checksums for only some of its pages")
                taken.append(stored.runs)
                chunk.frames += frames
                stored_bytes += stored.num_bytes
            chunk.stored_s -= snapshot.age_s
            order.add(chunk)
            chunks.append(chunk)
        for chunk in sorted(chunks, key=operator.attrgetter("stored_s")):
            if index.get(chunk.namespace, chunk.key) is not None:
                raise SnapshotError("a chunk appears twice")
            index.add(chunk)
        pool = FramePool.around(snapshot.total_frames, taken)
    except (TypeError, ValueError, msgspec.DecodeError) as error:
        raise SnapshotError(str(error)) from error
    cache.adopt(Contents(pool, index, order, stored_bytes), now_s)


def _chunk(namespaces: Sequence[bytes], tenant: bytes, row: Row, now_s: float) -> Chunk:
    if row.namespace >= len(namespaces):
        raise SnapshotError("the namespace of a chunk does not exist")
    chunk = Chunk(namespaces[row.namespace], row.key, now_s - row.stored_age_s, tenant)
    chunk.ready = int.from_bytes(row.ready, "little")
    chunk.packed = PackedObjects(row.objects)
    chunk.last_used_s = now_s - row.age_s
    return chunk


def _objects(chunk: Chunk) -> list[StoredObject]:
    objects = chunk.packed.objects()
    if not chunk.ready or chunk.ready.bit_count() != len(objects):
        raise SnapshotError("the bits of a chunk do not match its objects")
    return objects


def encode(snapshot: Snapshot, known: Known, saved: Saved, unix_s: float) -> bytes:
    """Encodes a snapshot that is taken at this time, with the summaries of its namespaces."""
    summaries = [json.dumps(known.get(namespace)) for namespace in snapshot.namespaces]
    parts = [snapshot.total_frames, snapshot.namespaces, summaries, snapshot.rows, saved]
    return codec.pack([unix_s, *parts])


def decode(index: bytes, max_frames: int, unix_s: float) -> tuple[Snapshot, Known, Saved]:
    """Reverses `encode` at a later time. Raises SnapshotError."""
    known: Known = {}
    try:
        taken_s, total_frames, namespaces, summaries, rows, saved = msgspec.msgpack.decode(
            index, type=_Content
        )
        for namespace, summary in zip(namespaces, map(json.loads, summaries), strict=True):
            if isinstance(summary, dict):
                known[namespace] = summary
    except (TypeError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise SnapshotError(str(error)) from error
    if total_frames > max_frames:
        raise SnapshotError(f"{total_frames} frames in a file of {max_frames}")
    # Chunks grow older while no server runs. If the clock was set back, nobody knows by how much.
    return Snapshot(total_frames, namespaces, rows, max(unix_s - taken_s, 0.0)), known, saved
