"""The jobs of the copy thread: loads and stores of several objects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache_client.contract.geometry import Region
from lmcache_server.core.pool import count_frames
from lmcache_server.transfer.digest import DamagedError, digest, has_changed
from lmcache_server.transfer.plan import ObjectCopy, Pieces, payload, pieces_of_all


@dataclass
class ObjectsJob:
    """The common part of loads and stores of several objects.

    A copy thread calls `build` to get the pieces, and `after` when every byte has been copied. Both may
    raise. With `checksums`, one of them reads all bytes, which takes long.

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
    checksums: bool

    def pieces(self) -> Pieces:
        """The pieces of all objects together, in no particular order."""
        return pieces_of_all(self.objects, self.regions, self.bases, self.l1_address, self.frame_bytes)

    def payload(self, group: int, page: ObjectCopy) -> list[tuple[int, int]]:
        """Where all bytes of an object are in L1, also those of pages that this job does not copy."""
        num_bytes = page.num_blocks * sum(region.page_bytes for region in self.regions[group])
        return payload(page.runs, num_bytes, self.l1_address, self.frame_bytes)


@dataclass
class StoreJob(ObjectsJob):
    """Engine to L1. With `checksums`, `digests` gets the digest of each object, in their order."""

    digests: list[bytes] = field(default_factory=list)
    load: bool = field(default=False, init=False)

    def build(self) -> Pieces:
        self.check_l1()
        return self.pieces()

    def after(self) -> None:
        if self.checksums:
            self.digests += [digest(self.payload(*each)) for each in self.objects]


@dataclass
class LoadJob(ObjectsJob):
    """L1 to engine. `stored` has the digest of each object, empty if unknown. An object that has too few
    frames or, with `checksums`, does not match raises DamagedError before any byte is copied."""

    stored: Sequence[bytes]
    load: bool = field(default=True, init=False)

    def build(self) -> Pieces:
        self.check_l1()
        block_bytes = [sum(region.page_bytes for region in regions) for regions in self.regions]
        for index, (group, page) in enumerate(self.objects):
            # Restored from a file: a store reserves enough.
            if page.num_blocks * block_bytes[group] > count_frames(page.runs) * self.frame_bytes:
                raise DamagedError(index, "it has too few frames for its pages")
            if self.checksums and has_changed(self.payload(group, page), self.stored[index]):
                raise DamagedError(index)
        return self.pieces()

    def after(self) -> None:
        """A load has nothing left to do."""


CopyJob = LoadJob | StoreJob
