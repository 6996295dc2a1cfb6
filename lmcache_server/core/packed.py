"""The ready objects of one chunk, packed: most of the memory of a large index is in chunks that nobody asks
for, and MessagePack takes a tenth of what tuples take."""

from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]

from lmcache_client.contract import codec
from lmcache_client.contract.codec import Natural
from lmcache_server.core.pool import Runs

CHECKSUM_BYTES = 4
"""The size of the checksum of a page."""


class StoredObject(NamedTuple):
    """A ready object: how many blocks it holds, its payload in bytes, where it is, and the checksums of
    its pages, which nobody looks at here (empty: none were taken)."""

    num_blocks: int
    num_bytes: int
    runs: Runs
    checksums: bytes = b""


_OBJECTS = list[tuple[Natural, Natural, tuple[tuple[Natural, Natural], ...], bytes]]


class PackedObjects(bytes):
    """Stored objects in the order of their bits. Being bytes costs a chunk no further object."""

    __slots__ = ()

    def with_object(self, position: int, stored: StoredObject) -> "PackedObjects":
        """These objects and one more, at `position` among them."""
        objects = self.objects()
        objects.insert(position, stored)
        return PackedObjects(msgpack.packb(objects))

    def objects(self) -> list[StoredObject]:
        fields: Any = msgpack.unpackb(self, use_list=False)
        return list(map(StoredObject._make, fields))

    def check(self) -> None:
        """Raises ValueError unless `objects` gives what its type says: the bytes may be from anywhere."""
        try:
            plain = msgpack.unpackb(self)
        except Exception as error:  # msgpack raises a dozen types, all of which mean the same here
            raise ValueError(f"objects that are not MessagePack: {error}") from error
        codec.build(_OBJECTS, plain)


NO_OBJECTS = PackedObjects(msgpack.packb([]))
