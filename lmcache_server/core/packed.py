"""The ready objects of one chunk as MessagePack, which takes a tenth of the memory that tuples take.

In a large index most objects are seldom read, so unpacking them costs little.
"""

from typing import NamedTuple

import msgpack  # type: ignore[import-untyped]

from lmcache_client.contract import codec
from lmcache_client.contract.codec import Natural, Wire

CHECKSUM_BYTES = 4
"""The size of a page's checksum."""


class StoredObject(NamedTuple):
    """A ready object: its blocks, its payload in bytes, its frames as Runs, and the checksums of its pages
    (empty if none were taken)."""

    num_blocks: Natural
    num_bytes: Natural
    runs: tuple[tuple[Natural, Natural], ...]
    checksums: bytes


class PackedObjects(bytes):
    """Stored objects in the order of their bits. As a subclass of bytes it costs a chunk only one object."""

    __slots__ = ()

    def with_object(self, position: int, stored: StoredObject) -> "PackedObjects":
        """Returns these objects with one more at `position`."""
        objects = self.objects()
        objects.insert(position, stored)
        return PackedObjects(msgpack.packb(objects))

    def objects(self) -> list[StoredObject]:
        return list(map(StoredObject._make, msgpack.unpackb(self, use_list=False)))

    def checked_objects(self) -> list[StoredObject]:
        """As `objects`, for bytes that may come from anywhere: raises ValueError if a type is wrong."""
        try:
            plain = msgpack.unpackb(self)
        except Exception as error:  # msgpack raises a dozen types, all of which mean the same here
            raise ValueError(f"objects that are not MessagePack: {error}") from error
        checked: _Objects = codec.build(_Objects, [plain])
        return checked.objects


class _Objects(Wire, frozen=True):
    objects: list[StoredObject]


NO_OBJECTS = PackedObjects(msgpack.packb([]))
