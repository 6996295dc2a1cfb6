"""Chunk entries, found by namespace and key."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]

from lmcache_server.core.pool import Runs

CHECKSUM_BYTES = 4
"""Of each page of an object that has any."""

_NO_OBJECTS: bytes = msgpack.packb([])


class StoredObject(NamedTuple):
    """A ready object: how many blocks it holds, its payload in bytes, where it is, and the checksums of
    its pages, which nobody looks at here (empty: none were taken)."""

    num_blocks: int
    num_bytes: int
    runs: Runs
    checksums: bytes = b""


class Chunk:
    """What is stored of one chunk. `ready` and `reserved` have a bit per object (see Layout.bit)."""

    __slots__ = (
        "frames",
        "key",
        "last_used_s",
        "namespace",
        "newer",
        "older",
        "packed",
        "pins",
        "ready",
        "reserved",
    )

    def __init__(self, namespace: bytes, key: bytes) -> None:
        self.namespace = namespace
        self.key = key
        self.ready = 0
        self.reserved = 0
        self.pins = 0
        """Leases, reads and reservations that hold this chunk."""
        self.frames = 0
        """Frames of its ready objects."""
        self.last_used_s = 0.0
        self.packed = _NO_OBJECTS
        """Its ready objects in the order of their bits, as MessagePack: most of the memory of an index is
        what the chunks that nobody asks for take, and this is a tenth of the tuples."""
        self.older: Chunk | None = None
        self.newer: Chunk | None = None

    def add(self, bit: int, stored: StoredObject, frames: int) -> None:
        assert not self.ready >> bit & 1, "an object is written once"
        objects = self.objects()
        objects.insert(self._position(bit), stored)
        self.packed = msgpack.packb(objects)
        self.ready |= 1 << bit
        self.frames += frames

    def get(self, bit: int) -> StoredObject | None:
        if not self.ready >> bit & 1:
            return None
        return self.objects()[self._position(bit)]

    def objects(self) -> list[StoredObject]:
        """The ready objects in the order of their bits. ValueError or TypeError if `packed` is none of it."""
        fields: Any = msgpack.unpackb(self.packed, use_list=False)
        return list(map(StoredObject._make, fields))

    def clear(self) -> None:
        self.packed = _NO_OBJECTS
        self.ready = self.frames = 0

    def _position(self, bit: int) -> int:
        return (self.ready & ((1 << bit) - 1)).bit_count()


class Index:
    """Which chunks are known. A chunk that `clear` forgot while it was pinned is in no index any more."""

    def __init__(self) -> None:
        self._namespaces: dict[bytes, dict[bytes, Chunk]] = {}
        self.num_chunks = 0

    def __iter__(self) -> Iterator[Chunk]:
        for chunks in self._namespaces.values():
            yield from chunks.values()

    def __contains__(self, chunk: Chunk) -> bool:
        return self.chunks(chunk.namespace).get(chunk.key) is chunk

    def chunks(self, namespace: bytes) -> dict[bytes, Chunk]:
        """The chunks of a namespace by key; not to be modified."""
        return self._namespaces.get(namespace, {})

    def get(self, namespace: bytes, key: bytes) -> Chunk | None:
        return self.chunks(namespace).get(key)

    def add(self, chunk: Chunk) -> None:
        chunks = self._namespaces.setdefault(chunk.namespace, {})
        assert chunk.key not in chunks, "a chunk has one entry"
        chunks[chunk.key] = chunk
        self.num_chunks += 1

    def remove(self, chunk: Chunk) -> None:
        chunks = self._namespaces[chunk.namespace]
        del chunks[chunk.key]
        self.num_chunks -= 1
        if not chunks:
            del self._namespaces[chunk.namespace]

    def namespaces(self) -> dict[bytes, int]:
        """How many chunks each namespace has."""
        return {namespace: len(chunks) for namespace, chunks in self._namespaces.items()}
