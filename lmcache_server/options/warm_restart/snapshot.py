"""Turns the contents of a cache into plain values, these into bytes that outlive its process, and back.

A snapshot has the ready chunks that are not in use, and those that an option protects. One that is restored
may come from anywhere, so it is trusted only when every part of it agrees with the rest.
"""

import json
import operator
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lmcache_client.contract.codec import Natural, Wire
from lmcache_client.contract.keys import TenantId
from lmcache_server.core.cache import Cache, Contents
from lmcache_server.core.eviction_order import EvictionOrder
from lmcache_server.core.index import Chunk, Index
from lmcache_server.core.packed import DIGEST_BYTES, PackedObjects, StoredObject
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


Known = dict[bytes, dict[str, Any]]
"""Summaries of namespaces, for reports."""
Saved = dict[str, bytes]
"""What each option has saved, by its module."""


class Snapshot(Wire, frozen=True):
    """What a cache held at `unix_s`. `summaries` has that of each namespace as JSON. `rows` has the chunks in
    the order of eviction, with the protected ones last."""

    unix_s: Seconds
    total_frames: Natural
    namespaces: list[bytes]
    summaries: list[str]
    rows: list[Row]
    saved: Saved


def take(cache: Cache, known: Known, saved: Saved, now_s: float, unix_s: float) -> Snapshot:
    """Returns, for `rebuild`, the chunks that nothing refers to, and then the protected ones."""
    chunks = [*cache.order, *cache.protected]
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
    summaries = [json.dumps(known.get(namespace)) for namespace in numbers]
    return Snapshot(unix_s, cache.total_frames, list(numbers), summaries, rows, saved)


def decode(index: bytes, max_frames: int) -> Snapshot:
    """Decodes what `codec.pack` made of a snapshot. Raises SnapshotError."""
    try:
        snapshot = msgspec.msgpack.decode(index, type=Snapshot)
    except (TypeError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise SnapshotError(str(error)) from error
    if snapshot.total_frames > max_frames:
        raise SnapshotError(f"{snapshot.total_frames} frames in a file of {max_frames}")
    return snapshot


def rebuild(snapshot: Snapshot, cache: Cache, now_s: float, unix_s: float) -> Known:
    """Fills an empty cache from `snapshot`, and returns the summaries of its namespaces. Raises
    SnapshotError, and leaves it empty, unless every part of the snapshot agrees with the rest."""
    index, order, taken, stored_bytes = Index(), EvictionOrder(), list[Runs](), 0
    chunks, names, frame_bytes = list[Chunk](), dict[bytes, bytes](), cache.frame_bytes
    # Chunks grow older while no server runs. If the clock was set back, nobody knows by how much.
    asleep_s = max(unix_s - snapshot.unix_s, 0.0)
    try:
        summaries = zip(snapshot.namespaces, map(json.loads, snapshot.summaries), strict=True)
        known = {namespace: summary for namespace, summary in summaries if isinstance(summary, dict)}
        for row in snapshot.rows:
            # The chunks of a tenant share one name.
            tenant = names.setdefault(row.tenant, row.tenant)
            chunk = _chunk(snapshot.namespaces, tenant, row, now_s)
            for stored in _objects(chunk):
                frames = count_frames(stored.runs)
                if -(-stored.num_bytes // frame_bytes) != frames or not frames:
                    raise SnapshotError(f"an object of {stored.num_bytes} bytes has {frames} frames")
                if not stored.num_blocks or len(stored.digest) not in (0, DIGEST_BYTES):
                    raise SnapshotError("an object has no blocks, or no whole digest")
                taken.append(stored.runs)
                chunk.frames += frames
                stored_bytes += stored.num_bytes
            chunk.stored_s -= asleep_s
            order.add(chunk)
            chunks.append(chunk)
        for chunk in sorted(chunks, key=operator.attrgetter("stored_s")):
            if index.get(chunk.namespace, chunk.key) is not None:
                raise SnapshotError("a chunk appears twice")
            index.add(chunk)
        pool = FramePool.around(snapshot.total_frames, taken)
    except (TypeError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise SnapshotError(str(error)) from error
    cache.adopt(Contents(pool, index, order, stored_bytes), now_s)
    return known


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
