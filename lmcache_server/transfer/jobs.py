"""The jobs of the copy thread: loads and stores of several objects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache_client.contract.geometry import Region
from lmcache_server.core.pool import count_frames
from lmcache_server.transfer.checksums import DamagedError, check, checksums
from lmcache_server.transfer.plan import ObjectCopy, Pieces, join, pieces, pieces_of_all


@dataclass
class ObjectsJob:
    """The common part of loads and stores of several objects.

    A copy thread calls `build` to get the pieces, and `after` when every byte has been copied. Both may
    raise. `reads_bytes` says whether one of them reads all bytes, which takes long.

    `objects` has (group, copy) pairs and `regions` the regions of each group. `bases` are the addresses of
    the engine's buffers, `l1_address` is L1's, and a frame has `frame_bytes`. `check_l1` raises CopyError if
    L1 has lost memory, which the job must not touch then.
    """

    objects: Sequence[tuple[int, ObjectCopy]]
    regions: Sequence[Sequence[Region]]
    bases: Sequence[int]
    l1_address: int
    frame_bytes: int
    check_l1: Callable[[], object]

    def pieces_by_object(self) -> list[Pieces]:
        where = self.bases, self.l1_address, self.frame_bytes
        return [pieces(page, self.regions[group], *where) for group, page in self.objects]

    def all_pieces(self) -> Pieces:
        """The pieces of all objects together, in no particular order."""
        return pieces_of_all(self.objects, self.regions, self.bases, self.l1_address, self.frame_bytes)


@dataclass
class StoreJob(ObjectsJob):
    """Engine to L1. With `take_checksums`, `checksums` gets those of each object, in the objects' order."""

    take_checksums: bool
    checksums: list[bytes] = field(default_factory=list)
    load: bool = field(default=False, init=False)

    @property
    def reads_bytes(self) -> bool:
        return self.take_checksums

    def build(self) -> Pieces:
        self.check_l1()
        if not self.take_checksums:
            return self.all_pieces()
        self._pieces = self.pieces_by_object()
        return join(self._pieces)

    def after(self) -> None:
        if self.take_checksums:
            for part, (group, page) in zip(self._pieces, self.objects, strict=True):
                self.checksums.append(checksums(part, page, self.regions[group]))


@dataclass
class LoadJob(ObjectsJob):
    """L1 to engine. `stored` has the checksums of each object, empty if unknown, or is None to check nothing.
    A page that does not match, or an object that is too small for its pages, raises DamagedError before any
    byte is copied."""

    stored: Sequence[bytes] | None
    load: bool = field(default=True, init=False)

    @property
    def reads_bytes(self) -> bool:
        return self.stored is not None

    def build(self) -> Pieces:
        self.check_l1()
        block_bytes = [sum(region.page_bytes for region in regions) for regions in self.regions]
        for index, (group, page) in enumerate(self.objects):
            # Restored from a file: a store reserves enough.
            if page.num_blocks * block_bytes[group] > count_frames(page.runs) * self.frame_bytes:
                raise DamagedError(index, 0, page.first_page)
        if self.stored is None:
            return self.all_pieces()
        parts = self.pieces_by_object()
        for index, (group, page) in enumerate(self.objects):
            check(index, parts[index], page, self.regions[group], self.stored[index])
        return join(parts)

    def after(self) -> None:
        """A load has nothing left to do."""


CopyJob = LoadJob | StoreJob
