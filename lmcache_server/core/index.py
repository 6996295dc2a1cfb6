"""The index: chunks by namespace and key."""

from collections.abc import Iterator

from lmcache_server.core.packed import NO_OBJECTS, StoredObject


class Chunk:
    """One chunk and its objects. `ready` and `reserved` have one bit per object (see Layout.bit)."""

    __slots__ = (
        "frames", "in_tiers", "key", "last_used_s", "namespace", "newer", "older", "once", "packed", "ready",
        "ref_cnt", "reserved", "stored_s", "tenant", "tenant_newer", "tenant_older",
    )  # fmt: skip

    def __init__(self, namespace: bytes, key: bytes, stored_s: float = 0.0, tenant: bytes = b"") -> None:
        self.namespace = namespace
        self.key = key
        self.stored_s = stored_s
        """When its first object was reserved."""
        self.tenant = tenant
        """Whose salt the request had that brought it first; empty if it had none."""
        self.ready = 0
        self.reserved = 0
        self.ref_cnt = 0
        """How many leases, reads and reservations hold this chunk, and one more if it is protected."""
        self.frames = 0
        """The frames of its ready objects."""
        self.in_tiers = 0
        """Which objects were written to which tiers since the chunk was last used: see TierState.mark."""
        self.last_used_s = 0.0
        self.once = False
        """Whether it came only with answers, or with prompts that will not come back, and no other prompt has
        read or extended it."""
        self.packed = NO_OBJECTS
        """Its ready objects."""
        self.older: Chunk | None = None
        self.newer: Chunk | None = None
        self.tenant_older: Chunk | None = None
        self.tenant_newer: Chunk | None = None
        """Its neighbours in the order of its tenant's chunks, which an option keeps."""

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
        self.ready = self.frames = self.in_tiers = 0

    def _position(self, bit: int) -> int:
        return (self.ready & ((1 << bit) - 1)).bit_count()


class Index:
    """The chunks that lookups can find. A chunk that was forgotten while in use is not in it any more."""

    def __init__(self) -> None:
        self.namespaces: dict[bytes, dict[bytes, Chunk]] = {}
        """The chunks of each namespace, as they change; only to be read. There may be thousands of them."""
        self._num_chunks = 0

    def __len__(self) -> int:
        return self._num_chunks

    def __iter__(self) -> Iterator[Chunk]:
        for chunks in self.namespaces.values():
            yield from chunks.values()

    def __contains__(self, chunk: Chunk) -> bool:
        return self.chunks(chunk.namespace).get(chunk.key) is chunk

    def chunks(self, namespace: bytes) -> dict[bytes, Chunk]:
        """The chunks of a namespace by key, the oldest first. The caller must not modify the dict."""
        return self.namespaces.get(namespace, {})

    def get(self, namespace: bytes, key: bytes) -> Chunk | None:
        return self.chunks(namespace).get(key)

    def add(self, chunk: Chunk) -> None:
        chunks = self.namespaces.setdefault(chunk.namespace, {})
        assert chunk.key not in chunks, "a chunk has one entry"
        chunks[chunk.key] = chunk
        self._num_chunks += 1

    def remove(self, chunk: Chunk) -> None:
        chunks = self.namespaces[chunk.namespace]
        del chunks[chunk.key]
        self._num_chunks -= 1
        if not chunks:
            del self.namespaces[chunk.namespace]
