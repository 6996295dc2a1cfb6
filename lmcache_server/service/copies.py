"""Between the cache and the hands: objects become pieces, ends of copies become commits."""

import logging
from collections.abc import Callable, Sequence

from lmcache_client.contract.messages import Stored, StoreObject
from lmcache_server.core.cache import Cache, Layout, Read, Refusal, Reservation
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.l1.memory import L1Memory
from lmcache_server.service.sessions import Shard
from lmcache_server.service.system import System
from lmcache_server.telemetry.failures import Failures
from lmcache_server.telemetry.metrics import Metrics
from lmcache_server.transfer.base import CopyJob
from lmcache_server.transfer.checksums import DamagedError, check, checksums
from lmcache_server.transfer.plan import Page, Pieces, join, pieces, pieces_of_all

logger = logging.getLogger(__name__)


class Copies:
    """Starts copies for registered shards and reports their ends on the event loop."""

    def __init__(self, l1: L1Memory, metrics: Metrics, system: System, verify: bool = False) -> None:
        self.l1 = l1
        self.failures = Failures()
        self._verify = verify
        self._metrics = metrics
        self._system = system

    def attach(self, shard: Shard, opened: Callable[[Exception | None, list[bytes]], None]) -> None:
        """Give a shard its copy thread, which maps its memory and calls `opened` with what stands where the
        nonce should be."""
        name = f"copy-{shard.engine_id[:8]}-{shard.rank}"
        # Asked before each slice, because the process id may be given to another.
        alive = shard.process.alive if shard.process is not None else lambda: True
        shard.copier = self._system.copier(name, shard.memory, opened, alive)

    def detach(self, shard: Shard) -> None:
        """End the shard's copies; when this returns none of its memory is being copied."""
        copier, shard.copier = shard.copier, None
        if copier is not None:
            copier.close()

    def load(
        self,
        cache: Cache,
        shard: Shard,
        read: Read,
        block_ids: Sequence[Sequence[int]],
        ended: Callable[[Exception | None, int], None],
    ) -> None:
        """Copy the parts of `read` into the blocks of `block_ids` (per group, in the parts' order); `ended`
        is told what went wrong and how many bytes were copied."""
        pages: list[tuple[int, Page]] = []
        taken = [0] * len(block_ids)
        for part in read.parts:
            start = taken[part.group]
            taken[part.group] = start + part.pages
            ids = block_ids[part.group][start : start + part.pages]
            pages.append((part.group, Page(part.runs, part.num_blocks, part.first_page, ids)))

        def finish(error: Exception | None, num_bytes: int) -> None:
            if isinstance(error, DamagedError):
                damaged = read.parts[error.part]
                cache.forget(damaged.chunk)
                self._metrics.count("lmcache_verify_failures_total")
                logger.warning(
                    "chunk %(chunk)s is damaged and forgotten, group %(group)d: %(reason)s",
                    {
                        "chunk": damaged.chunk.key.hex()[:16],
                        "group": damaged.group,
                        "reason": str(error),
                        "engine": shard.engine_id,
                    },
                )
            ended(error, num_bytes)

        groups = shard.geometry.groups

        def build() -> Pieces:
            if not self._verify:
                return self._all_pieces(shard, pages)
            found = self._pieces(shard, pages)
            for index, part in enumerate(read.parts):
                group, page = pages[index]
                check(index, found[index], page, groups[group].regions, part.checksums)
            return join(found)

        self._submit(shard, "load", bool(pages), build, finish)

    def store(
        self,
        cache: Cache,
        shard: Shard,
        layout: Layout,
        objects: Sequence[StoreObject],
        session_id: int,
        ended: Callable[[Stored, int], None],
    ) -> None:
        """Reserve room for what is not there, copy it, and make it ready."""
        reservations: list[tuple[StoreObject, Reservation]] = []
        pages: list[tuple[int, Page]] = []
        present = dropped = 0
        for each in objects:
            group = shard.geometry.groups[each.group]
            num_bytes = group.block_bytes * len(each.block_ids)
            if not num_bytes:
                present += 1
                continue
            reserved = cache.reserve(
                layout,
                each.key,
                each.chunk_index,
                each.group,
                shard.rank,
                len(each.block_ids),
                num_bytes,
                session_id,
                each.parent,
            )
            if isinstance(reserved, Refusal):
                self._metrics.count("lmcache_objects_total", 1, outcome=_OUTCOMES[reserved])
                present += reserved is not Refusal.NO_ROOM
                dropped += reserved is Refusal.NO_ROOM
                continue
            reservations.append((each, reserved))
            pages.append((each.group, Page(reserved.runs, reserved.num_blocks, 0, each.block_ids)))

        if dropped:
            sentence = "what is in L1 is in use: give it more with --l1-size-gb if this goes on"
            self._failed("store dropped", shard, sentence, dropped)
        found: list[Pieces] = []
        taken = [b""] * len(pages)

        def build() -> Pieces:
            if not self._verify:
                return self._all_pieces(shard, pages)
            found.extend(self._pieces(shard, pages))
            return join(found)

        def take_checksums() -> None:
            for index, (group, page) in enumerate(pages):
                taken[index] = checksums(found[index], page, shard.geometry.groups[group].regions)

        def finish(error: Exception | None, num_bytes: int) -> None:
            # In the order of the chain: a chunk finds its place by the one before it.
            in_order = sorted(zip(reservations, taken, strict=True), key=lambda pair: pair[0][0].chunk_index)
            for (_, reservation), sums in in_order:
                if error is None:
                    cache.commit(reservation, sums)
                else:
                    cache.abort(reservation)
            outcome = "stored" if error is None else "failed"
            self._metrics.count("lmcache_objects_total", len(reservations), outcome=outcome)
            stored = len(reservations) if error is None else 0
            ended(Stored(stored, present, dropped + len(reservations) - stored), num_bytes)

        if reservations:
            self._submit(shard, "store", True, build, finish, take_checksums if self._verify else None)
        else:
            finish(None, 0)

    def _submit(
        self,
        shard: Shard,
        direction: str,
        has_work: bool,
        build: Callable[[], Pieces],
        ended: Callable[[Exception | None, int], None],
        after: Callable[[], None] | None = None,
    ) -> None:
        if not has_work:
            self._system.call_soon(ended, None, 0)
            return
        started_s = self._system.now_s()

        def done(error: Exception | None, num_bytes: int) -> None:
            self._metrics.count("lmcache_transfer_bytes_total", num_bytes, direction=direction)
            self._metrics.observe(
                "lmcache_transfer_seconds", self._system.now_s() - started_s, direction=direction
            )
            if error is not None:
                self._metrics.count("lmcache_copy_failures_total", 1, direction=direction)
                # With a worker that has gone end all its copies, and of a GPU that cannot be used each fails.
                logger.log(
                    logging.DEBUG if shard.copy_failed else logging.INFO,
                    "a %(direction)s of engine %(engine)s, rank %(rank)d, failed: %(reason)s; more of them "
                    "are in lmcache_copy_failures_total and in the debug log",
                    {
                        "direction": direction,
                        "engine": shard.engine_id,
                        "rank": shard.rank,
                        "reason": str(error),
                    },
                )
                shard.copy_failed = True
                what = "page damaged" if isinstance(error, DamagedError) else f"{direction} failed"
                self._failed(what, shard, str(error))
            ended(error, num_bytes)

        assert shard.copier is not None
        shard.copier.submit(CopyJob(direction == "load", build, done, after))

    def _failed(self, what: str, shard: Shard, sentence: str, count: int = 1) -> None:
        self.failures.add(self._system.now_s(), what, shard.engine_id, sentence, count)

    def _pieces(self, shard: Shard, pages: Sequence[tuple[int, Page]]) -> list[Pieces]:
        """The pieces of each object."""
        where, groups = self._where(shard), shard.geometry.groups
        return [pieces(page, groups[group].regions, *where) for group, page in pages]

    def _all_pieces(self, shard: Shard, pages: Sequence[tuple[int, Page]]) -> Pieces:
        """The same of all objects at once, in no order."""
        where, by_group = self._where(shard), dict[int, list[Page]]()
        for group, page in pages:
            by_group.setdefault(group, []).append(page)
        regions = {group: shard.geometry.groups[group].regions for group in by_group}
        return join([pieces_of_all(each, regions[group], *where) for group, each in by_group.items()])

    def _where(self, shard: Shard) -> tuple[Sequence[int], int, int]:
        assert shard.copier is not None
        return shard.copier.bases, self.l1.base_address, FRAME_BYTES


_OUTCOMES = {Refusal.PRESENT: "present", Refusal.BUSY: "busy", Refusal.NO_ROOM: "no_room"}
