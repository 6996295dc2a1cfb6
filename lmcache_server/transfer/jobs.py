"""Copies of whole objects, as the copy thread works them off."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache_client.contract.geometry import Region
from lmcache_server.transfer.checksums import check, checksums
from lmcache_server.transfer.plan import ObjectCopy, Pieces, join, pieces, pieces_of_all


@dataclass
class ObjectsJob:
    """What loads and stores of several objects have in common.

    `objects` are (group, copy) pairs; `regions` are those of each group; `bases` and `l1_address` are
    addresses, `frame_bytes` the size of a frame.
    """

    objects: Sequence[tuple[int, ObjectCopy]]
    regions: Sequence[Sequence[Region]]
    bases: Sequence[int]
    l1_address: int
    frame_bytes: int

    def pieces_by_object(self) -> list[Pieces]:
        where = self.bases, self.l1_address, self.frame_bytes
        return [pieces(each, self.regions[group], *where) for group, each in self.objects]

    def all_pieces(self) -> Pieces:
        """The same of all objects at once, in no order."""
        by_group: dict[int, list[ObjectCopy]] = {}
        for group, each in self.objects:
            by_group.setdefault(group, []).append(each)
        where = self.bases, self.l1_address, self.frame_bytes
        return join([pieces_of_all(each, self.regions[group], *where) for group, each in by_group.items()])


@dataclass
class StoreJob(ObjectsJob):
    """Engine to L1. With `take_checksums` each object has its checksums afterwards, in the objects' order."""

    take_checksums: bool
    checksums: list[bytes] = field(default_factory=list)
    load: bool = field(default=False, init=False)

    def build(self) -> Pieces:
        if not self.take_checksums:
            return self.all_pieces()
        self._pieces = self.pieces_by_object()
        return join(self._pieces)

    def after(self) -> None:
        if self.take_checksums:
            for part, (group, each) in zip(self._pieces, self.objects, strict=True):
                self.checksums.append(checksums(part, each, self.regions[group]))


@dataclass
class LoadJob(ObjectsJob):
    """L1 to engine. `stored` are the checksums of each object, empty where unknown: a page that does not
    have its own raises DamagedError before any byte is copied. None: nothing is checked."""

    stored: Sequence[bytes] | None
    load: bool = field(default=True, init=False)

    def build(self) -> Pieces:
        if self.stored is None:
            return self.all_pieces()
        parts = self.pieces_by_object()
        for index, (group, each) in enumerate(self.objects):
            check(index, parts[index], each, self.regions[group], self.stored[index])
        return join(parts)

    def after(self) -> None:
        """Nothing follows a load."""
