"""The ready objects of one chunk as MessagePack, which takes a tenth of the memory that tuples take.

In a large index most objects are seldom read, so unpacking them costs little.
"""

from typing import NamedTuple

import msgspec

from lmcache_client.contract.codec import Natural

DIGEST_BYTES = 16


class StoredObject(NamedTuple):
    """A ready object: its blocks, its payload in bytes, its frames as Runs, and the digest of its payload
    (empty if it was not taken)."""

    num_blocks: Natural
    num_bytes: Natural
    runs: tuple[tuple[Natural, Natural], ...]
    digest: bytes


_DECODER = msgspec.msgpack.Decoder(list[StoredObject])


class PackedObjects(bytes):
    """Stored objects in the order of their bits. As a subclass of bytes it costs a chunk only one object."""

    __slots__ = ()

    def with_object(self, position: int, stored: StoredObject) -> "PackedObjects":
        """Returns these objects with one more at `position`."""
        objects = self.objects()
        objects.insert(position, stored)
        return PackedObjects(msgspec.msgpack.encode(objects))

    def objects(self) -> list[StoredObject]:
        """Raises msgspec.DecodeError if the bytes are malformed."""
        return _DECODER.decode(self)


NO_OBJECTS = PackedObjects(msgspec.msgpack.encode([]))
