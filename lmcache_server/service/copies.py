"""Store and load: the two messages that move bytes."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
from msgspec.structs import asdict

from lmcache_client.contract import messages
from lmcache_client.contract.codec import NUMBER_BYTES, unpacked
from lmcache_client.contract.geometry import Region
from lmcache_client.contract.keys import MAX_CHUNKS
from lmcache_client.contract.messages import Done, Load, Message, Refused, Store, Stored, StoreObject
from lmcache_server.core.cache import Layout, NotReserved, Read, Reservation
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.service.engines import Session, Shard
from lmcache_server.service.option import Base
from lmcache_server.service.refusals import Refusal, log_request
from lmcache_server.service.requests_of_tests import traffic
from lmcache_server.telemetry.metrics import Traffic
from lmcache_server.transfer.base import Outcome
from lmcache_server.transfer.digest import DamagedError
from lmcache_server.transfer.jobs import CopyJob, LoadJob, StoreJob
from lmcache_server.transfer.plan import ObjectCopy

logger = logging.getLogger(__name__)

ADVICE = {
    NotReserved.NO_ROOM: "all of L1 is in use or pinned: if this goes on, give it more with --l1-size-gb",
    NotReserved.QUOTA: "all that a salt may hold is in use or pinned: if this goes on, raise --quota-gb",
}
"""What helps against dropped stores."""
MAX_PAGES = 1 << 24
"""A copy is planned as a whole, which takes some 40 bytes a page, however small the pages are. A million
tokens of a large model have ten million pages."""
_Reserved = list[tuple[StoreObject, Reservation]]


class Copies:
    """Handles Store and Load. Each handler is a coroutine that returns the reply.

    It first checks the message and raises Refusal. Then it takes frames, has the worker's own thread copy,
    and makes the frames ready or gives them back.
    """

    def __init__(self, base: Base) -> None:
        self._cache, self._sessions, self._l1 = base.cache, base.sessions, base.l1
        self._metrics, self._failures = base.metrics, base.failures
        self._system, self._options = base.system, base.options
        self._checksums, self._forget_damaged = base.config.checksums, base.forget_damaged

    # -- store ------------------------------------------------------------------------------------

    async def store(self, session: Session, message: Store, request_bytes: int) -> Message:
        """Reserves room for the objects that L1 lacks, copies them and makes them ready."""
        shard, layout = self._sessions.shard(session, request_bytes)
        for wanted in message.objects:
            _check_object(layout, wanted)
        _check_blocks(shard, [(wanted.group, wanted.block_ids) for wanted in message.objects])
        with session.working(request_bytes):
            started_s = self._system.now_s()
            # Stores of several requests count as a test only if the first one is.
            whose = traffic(self._metrics, layout, "".join(message.request_ids[:1]))
            reserved, present, dropped = self._reserve(shard, layout, message, whose)
            copies = [
                (wanted.group, ObjectCopy(room.runs, room.num_blocks, 0, unpacked(wanted.block_ids)))
                for wanted, room in reserved
            ]
            job = StoreJob(copies, *self._where(shard), self._checksums)
            outcome = await self._copy(shard, job, whose) if reserved else Outcome(None, 0)
            self._end_reservations(layout, reserved, job.digests, outcome, whose)
            copied = len(reserved) if outcome.error is None else 0
            stored = Stored(copied, present, dropped + len(reserved) - copied)
        text = (
            "requests %(request_ids)s: %(stored)d objects stored, %(bytes)d bytes; "
            "%(present)d were present, %(dropped)d were dropped"
        )
        values = asdict(stored) | self._copied("store", outcome, started_s)
        log_request(logging.DEBUG, text, session, message, values)
        return stored

    def _reserve(
        self, shard: Shard, layout: Layout, message: Store, whose: Traffic
    ) -> tuple[_Reserved, int, int]:
        """Reserves frames; returns the reservations, the number of objects already present, and the number
        dropped."""
        reserved, present, refused = _Reserved(), 0, Counter[NotReserved]()
        block_bytes = [group.block_bytes for group in shard.geometry.groups]
        for wanted in message.objects:
            count = len(wanted.block_ids) // NUMBER_BYTES
            num_bytes = block_bytes[wanted.group] * count
            if not num_bytes:
                present += 1
                continue
            place = wanted.key, wanted.group, shard.rank, count, num_bytes, wanted.parent
            room = self._cache.reserve(layout, *place, message.once, wanted.tenant)
            if isinstance(room, Reservation):
                reserved.append((wanted, room))
            else:
                refused[room] += 1
        for why, number in refused.items():
            self._count("objects_total", number, whose, outcome=why.value)
            if why in ADVICE:
                self._fail("store dropped", shard, ADVICE[why], number)
        present += refused.pop(NotReserved.PRESENT, 0) + refused.pop(NotReserved.BUSY, 0)
        return reserved, present, refused.total()

    def _end_reservations(
        self, layout: Layout, reserved: _Reserved, digests: list[bytes], outcome: Outcome, whose: Traffic
    ) -> None:
        """Commits or aborts in the order of the chain, because a chunk is placed relative to its parent."""
        known = digests if digests and outcome.error is None else [b""] * len(reserved)
        pairs = zip(reserved, known, strict=True)
        for (_, room), digest in sorted(pairs, key=lambda pair: pair[0][0].chunk_index):
            if outcome.error is None:
                self._cache.commit(room, digest)
            else:
                self._cache.abort(room)
        if outcome.error is None:
            for option in self._options:
                option.stored(layout, [room for _, room in reserved])
        name = "stored" if outcome.error is None else "failed"
        self._count("objects_total", len(reserved), whose, outcome=name)

    # -- load -------------------------------------------------------------------------------------

    async def load(self, session: Session, message: Load, request_bytes: int) -> Message:
        """Copies the leased pages into the worker's blocks."""
        shard, layout = self._sessions.shard(session, request_bytes)
        resume, computed = message.resume_tokens, message.computed_tokens
        groups = shard.geometry.groups
        if len(message.block_ids) != len(groups) or resume % layout.chunk_size:
            raise Refusal(messages.BAD_REQUEST, "the message does not fit the registered groups")
        for group, block_ids in zip(groups, message.block_ids, strict=True):
            _check_count(block_ids, len(group.needed_blocks(resume, computed)))
        _check_blocks(shard, [*enumerate(message.block_ids)])
        read = self._cache.open_read(message.lease_id, message.key, shard.rank, resume, computed, layout)
        if read is None:
            raise Refusal(messages.EXPIRED, "the lease of this request has ended")
        with session.working(request_bytes), ExitStack() as stack:
            stack.callback(self._cache.close_read, read)
            started_s = self._system.now_s()
            parts = _parts(read, list(map(unpacked, message.block_ids)))
            stored = [part.digest for part in read.parts]
            job = LoadJob(parts, *self._where(shard), self._checksums, stored=stored)
            whose = traffic(self._metrics, layout, message.request_id)
            outcome = await self._copy(shard, job, whose) if read.parts else Outcome(None, 0)
            if isinstance(outcome.error, DamagedError):
                damaged = read.parts[outcome.error.part].chunk
                self._forget_damaged(damaged, str(outcome.error), shard.engine_id)
        text = "request %(request_id)s: loaded %(tokens)d tokens, %(bytes)d bytes: %(outcome)s"
        values = {"tokens": resume - computed, "outcome": str(outcome.error or "ok")}
        values |= {"lease": message.lease_id, **self._copied("load", outcome, started_s)}
        log_request(logging.DEBUG, text, session, message, values)
        return Done() if outcome.error is None else Refused(messages.COPY_FAILED, str(outcome.error))

    # -- both -------------------------------------------------------------------------------------

    async def _copy(self, shard: Shard, job: CopyJob, whose: Traffic) -> Outcome:
        """Has the worker's thread run the job, and counts and logs how it ended."""
        assert shard.copier is not None
        direction = "load" if job.load else "store"
        started_s = self._system.now_s()
        outcome = await shard.copier.submit(job)
        seconds = self._system.now_s() - started_s
        self._count("transfer_bytes_total", outcome.num_bytes, whose, direction=direction)
        self._metrics.observe("lmcache_transfer_seconds", seconds, direction=direction)
        if outcome.error is not None:
            own = whose if "namespace" in whose.labels else self._metrics.other
            self._count("copy_failures_total", 1, own, direction=direction)
            # When a worker dies or its GPU fails, all its copies fail: one line is enough.
            logger.log(
                logging.DEBUG if shard.copy_failed else logging.INFO,
                "a %(direction)s of engine %(engine)s, rank %(rank)d, failed: %(reason)s; for further "
                "failures see lmcache_copy_failures_total and the debug log",
                {"direction": direction, "engine": shard.engine_id, "rank": shard.rank}
                | {"reason": str(outcome.error)},
            )
            shard.copy_failed = True
            if not isinstance(outcome.error, DamagedError):
                self._fail(f"{direction} failed", shard, str(outcome.error))
        return outcome

    def _count(self, name: str, amount: int, whose: Traffic, **labels: str) -> None:
        self._metrics.count(whose.prefix + name, amount, **whose.labels, **labels)

    def _fail(self, what: str, shard: Shard, reason: str, count: int = 1) -> None:
        self._failures.add(self._system.now_s(), what, shard.engine_id, reason, count)

    def _where(
        self, shard: Shard
    ) -> tuple[Sequence[Sequence[Region]], Sequence[int], int, int, Callable[[], None]]:
        """What a job must know: the regions of each group, the addresses of the worker's buffers and of L1,
        the bytes of a frame, and how to check L1."""
        assert shard.copier is not None
        regions = [group.regions for group in shard.geometry.groups]
        return regions, shard.copier.bases, self._l1.base_address, FRAME_BYTES, self._l1.check

    def _copied(self, direction: str, outcome: Outcome, started_s: float) -> dict[str, object]:
        seconds = self._system.now_s() - started_s
        return {"direction": direction, "bytes": outcome.num_bytes, "seconds": seconds}


def _parts(read: Read, block_ids: Sequence[Sequence[int]]) -> list[tuple[int, ObjectCopy]]:
    """The parts of a read with their blocks. `block_ids` lists the blocks of each group, in the order of that
    group's parts."""
    parts, used = list[tuple[int, ObjectCopy]](), [0] * len(block_ids)
    for group, _, runs, num_blocks, first_page, pages, _ in read.parts:
        first, used[group] = used[group], used[group] + pages
        parts.append((group, ObjectCopy(runs, num_blocks, first_page, block_ids[group][first : used[group]])))
    return parts


def _check_object(layout: Layout, wanted: StoreObject) -> None:
    group, chunk_index = wanted.group, wanted.chunk_index
    if group >= len(layout.groups) or chunk_index >= MAX_CHUNKS:
        raise Refusal(messages.BAD_REQUEST, f"no object of group {group}, chunk {chunk_index}")
    positions = layout.groups[group].stored_blocks(chunk_index, layout.chunk_size)
    _check_count(wanted.block_ids, len(positions))


def _check_count(block_ids: bytes, count: int) -> None:
    if len(block_ids) != count * NUMBER_BYTES:
        raise Refusal(messages.BAD_REQUEST, f"expected {count} block ids, got {len(block_ids)} bytes")


def _check_blocks(shard: Shard, blocks: Sequence[tuple[int, bytes]]) -> None:
    """Checks all block ids of a message at once: one by one they would take longer than the rest of it.
    `blocks` has pairs of a group and its ids."""
    regions = [len(group.regions) for group in shard.geometry.groups]
    pages = sum(len(each) // NUMBER_BYTES * regions[group] for group, each in blocks)
    if pages > MAX_PAGES:
        raise Refusal(messages.BAD_REQUEST, f"a message may name {MAX_PAGES} pages, not {pages}")
    ids, last = np.frombuffer(b"".join(each for _, each in blocks), np.uint32), shard.geometry.num_blocks - 1
    if len(ids) and not 0 < ids.min() <= ids.max() <= last:
        raise Refusal(messages.BAD_REQUEST, f"block ids are numbers from 1 to {last}")
