"""The index: chunks by namespace and key."""

from collections.abc import Iterator, Mapping, Sized

from lmcache_server.core.packed import NO_OBJECTS, StoredObject


class Chunk:
    """One chunk and its objects. `ready` and `reserved` have one bit per object (see Layout.bit)."""

    __slots__ = (
        "frames",
        "key",
        "last_used_s",
        "namespace",
        "newer",
        "older",
        "once",
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
        """How many leases, reads and reservations hold this chunk."""
        self.frames = 0
        """The frames of its ready objects."""
        self.last_used_s = 0.0
        self.once = False
        """Whether all prompts that brought or ended with this chunk said that they will not come back."""
        self.packed = NO_OBJECTS
        """Its ready objects."""
        self.older: Chunk | None = None
        self.newer: Chunk | None = None

    def add(self, bit: int, stored: StoredObject, frames: int) -> None:
        assert not self.ready >> bit & 1, "an object is written once"
        self.packed = self.packed.with_object(self._position(bit), stored)
        self.ready |= 1 << bit
        self.frames += frames

    def get(self, bit: int) -> StoredObject | None:
        if not self.ready >> bit & 1:
            return None
        return self.packed.objects()[self._position(bit)]

    def clear(self) -> None:
        self.packed = NO_OBJECTS
        self.ready = self.frames = 0

    def _position(self, bit: int) -> int:
        return (self.ready & ((1 << bit) - 1)).bit_count()


class Index:
    """The chunks that lookups can find. A chunk that was forgotten while pinned is not in it any more."""

    def __init__(self) -> None:
        self._namespaces: dict[bytes, dict[bytes, Chunk]] = {}
        self._num_chunks = 0

    def __len__(self) -> int:
        return self._num_chunks

    def __iter__(self) -> Iterator[Chunk]:
        for chunks in self._namespaces.values():
            yield from chunks.values()

    def __contains__(self, chunk: Chunk) -> bool:
        return self.chunks(chunk.namespace).get(chunk.key) is chunk

    def chunks(self, namespace: bytes) -> dict[bytes, Chunk]:
        """The chunks of a namespace by key. The caller must not modify the dict."""
        return self._namespaces.get(namespace, {})

    def get(self, namespace: bytes, key: bytes) -> Chunk | None:
        return self.chunks(namespace).get(key)

    def add(self, chunk: Chunk) -> None:
        chunks = self._namespaces.setdefault(chunk.namespace, {})
        assert chunk.key not in chunks, "a chunk has one entry"
        chunks[chunk.key] = chunk
        self._num_chunks += 1

    def remove(self, chunk: Chunk) -> None:
        chunks = self._namespaces[chunk.namespace]
        del chunks[chunk.key]
        self._num_chunks -= 1
        if not chunks:
            del self._namespaces[chunk.namespace]

    def namespaces(self) -> Mapping[bytes, Sized]:
        """The chunks of each namespace, as they change. There may be thousands of namespaces."""
        return self._namespaces
