"""Spills: writes what L1 holds to the tiers. Nobody waits for that; what there is no time for is left out."""

import asyncio
import itertools
import logging
import math
from collections.abc import Iterator, Sequence

from lmcache_server.core.cache import Layout, Reservation
from lmcache_server.core.index import Chunk
from lmcache_server.core.packed import StoredObject
from lmcache_server.core.pool import count_frames
from lmcache_server.options.tiers.base import TierError
from lmcache_server.options.tiers.breaker import WRITE
from lmcache_server.options.tiers.record_format import DamagedRecordError, Label
from lmcache_server.options.tiers.record_name import record_name
from lmcache_server.options.tiers.tier_states import Tiers, TierState
from lmcache_server.service.option import Base
from lmcache_server.transfer.base import CopyError

logger = logging.getLogger(__name__)

SPILL_SHARE, COLD_SHARE = 20, 4
"""Objects that are being written may take a twentieth of L1. Where only cold objects are written, the coldest
quarter of L1 is kept written."""
MAX_BACKLOG = 1 << 16
WRITES_AT_ONCE = 4
MAX_GONE = 1000
"""Evicted objects that are taken from the backlog at once."""
SCAN_CHUNKS, NEXT_CHUNKS = 10_000, 64
"""How many of the coldest chunks are looked at each second, and after each store."""
SLICE_CHUNKS, SLICE_S = 250, 0.01
"""Lookups have their turn after so many of these: all at once would stop them for up to 0.1 s."""
FULL_S = 10.0
"""So long a tier without room is not offered what is cold: each try costs the digest of a record."""
FLUSH_S = 30.0
CLEAR_S = 10.0


class Spills:
    """Nothing of an ephemeral namespace is kept."""

    def __init__(self, tiers: Tiers, base: Base) -> None:
        self._tiers, self._known = tiers, base.sessions.known
        self._cache, self._system = base.cache, base.system
        self._forget_damaged = base.forget_damaged
        base.cache.on_kept.append(self._kept)
        self._spilling_frames = 0
        self._is_paused = False

    def stored(self, layout: Layout, rooms: Sequence[Reservation]) -> None:
        """An engine has stored these objects. Tiers that take everything write them soon."""
        if layout.ephemeral:
            return
        for tier in self._tiers.all:
            for room in () if tier.cold else rooms:
                if not room.chunk.once:
                    self._append(tier, room.chunk, room.bit)
        self.made_room(rooms)

    def _kept(self, chunk: Chunk) -> None:
        """It was `once` when it was stored. Without it, nobody could use what comes behind it in a tier."""
        for tier in self._tiers.all:
            if not tier.cold:
                self._append_all(tier, chunk)

    def made_room(self, rooms: Sequence[Reservation]) -> None:
        """These objects got frames. Tiers that take what is cold write what is evicted next."""
        for tier in self._tiers.all:
            for chunk in self._next(rooms) if self._takes_cold(tier) else ():
                self._append_all(tier, chunk)
            self._write(tier)

    def tick(self) -> None:
        """Once a second: look after the tiers, and keep the coldest part of L1 written to some of them."""
        self._tiers.tick()
        for tier in self._tiers.all:
            self._remove_damaged(tier)
            if self._takes_cold(tier) and len(tier.backlog) < MAX_BACKLOG // 2:
                self._system.spawn(self._scan(tier))
            self._write(tier)

    def _takes_cold(self, tier: TierState) -> bool:
        return tier.cold and self._system.now_s() >= tier.full_until_s

    async def _scan(self, tier: TierState) -> None:
        cold = list(itertools.islice(self._coldest(), SCAN_CHUNKS))
        while cold and not self._is_paused and self._takes_cold(tier):
            for chunk in cold[:SLICE_CHUNKS]:
                self._append_all(tier, chunk)
            del cold[:SLICE_CHUNKS]
            self._write(tier)
            await self._system.wait([self._system.future()], SLICE_S)

    async def flush(self) -> None:
        """At a clean stop: write what waits, and for tiers that only take cold objects all of L1, what is
        protected and the most recently used first, for at most FLUSH_S seconds."""
        self._is_paused = False
        end_s, cold = self._system.now_s() + FLUSH_S, [tier for tier in self._tiers.all if tier.cold]
        everything = [*self._cache.coldest(self._cache.total_frames), *self._cache.protected] if cold else []
        """The most recently used at the end."""
        rest = {tier: everything.copy() if tier.cold else [] for tier in self._tiers.all}
        for tier in self._tiers.all:
            self._remove_damaged(tier)  # once more, if that has failed
            tier.full_until_s = 0.0
        for tier in cold:
            self._unqueue(tier)

        def has_work(tier: TierState) -> bool:
            return tier.is_busy or (bool(rest[tier]) and self._takes_cold(tier))

        while any(has_work(tier) and not tier.breaker.is_open for tier in self._tiers.all):
            if self._system.now_s() > end_s:
                break
            self._tiers.tick()
            for tier in self._tiers.all:
                while rest[tier] and len(tier.backlog) < MAX_BACKLOG // 2 and self._takes_cold(tier):
                    self._append_all(tier, rest[tier].pop())
                self._write(tier)
            await self._system.wait([self._system.future()], 0.02)
        left = sum(len(tier.backlog) + len(tier.writing) for tier in self._tiers.all)
        left += sum(self._missing(tier, chunk).bit_count() for tier in cold for chunk in everything)
        if left:
            logger.warning("%(objects)d objects were not written to their tier", {"objects": left})

    def pause(self) -> None:
        """Starts no more writes until `flush`."""
        self._is_paused = True

    async def close(self) -> None:
        """Ends the tiers."""
        for tier in self._tiers.all:
            tier.backlog.clear()
            await asyncio.to_thread(tier.worker.close, 1.0)

    async def clear(self, namespaces: Sequence[bytes | None]) -> list[str]:
        """Forgets the records of these namespaces, None for all; returns the tiers that failed, with
        reasons."""
        futures = {}
        for tier in self._tiers.all:
            kept = [each for each in tier.backlog if not {None, each[0].namespace} & set(namespaces)]
            tier.backlog.clear()
            tier.backlog.extend(kept)
            prefixes = [f"{each.hex()}/" if each is not None else "" for each in namespaces]
            futures[tier.worker.clear(prefixes)] = tier
        await self._system.wait([*futures], CLEAR_S)
        failed = list[str]()
        for future, tier in futures.items():
            if not future.done():
                failed.append(f"{tier.url}: no answer within {CLEAR_S:g} s")
            elif (error := future.exception()) is not None:
                failed.append(f"{tier.url}: {error}")
        return failed

    def forget(self, chunk: Chunk) -> None:
        """Removes the records of a damaged chunk: they may be of its damaged bytes."""
        names = [record_name(chunk.namespace, chunk.key, bit) for bit in range(chunk.ready.bit_length())]
        for tier in self._tiers.all:
            tier.damaged.update(names)
            self._remove_damaged(tier)

    def _remove_damaged(self, tier: TierState) -> None:
        # What is being written would come after its removal.
        names = tier.damaged.difference(tier.writing)
        if names and not tier.removing and not tier.breaker.is_open:
            tier.removing, tier.damaged = names, tier.damaged - names
            self._system.spawn(self._remove(tier))

    async def _remove(self, tier: TierState) -> None:
        try:
            await tier.worker.remove([*tier.removing])
        except TierError:
            tier.damaged |= tier.removing
            tier.removing = set()
        else:
            tier.removing = set()
            self._remove_damaged(tier)

    def _coldest(self) -> Iterator[Chunk]:
        return self._cache.coldest(self._cache.total_frames // COLD_SHARE)

    def _next(self, rooms: Sequence[Reservation]) -> Iterator[Chunk]:
        """What the next stores evict, of all and of these objects' tenants that are near their quota."""
        yield from itertools.islice(self._coldest(), NEXT_CHUNKS)
        policy = self._cache.order.tenant_policy
        for tenant in dict.fromkeys(room.chunk.tenant for room in rooms):
            most = policy.most_frames(tenant)
            if most < math.inf and policy.excess_frames(tenant, int(most / COLD_SHARE)):
                own = itertools.islice(policy.line(tenant, once=False), NEXT_CHUNKS)
                yield from (chunk for chunk in own if not chunk.once)

    def _missing(self, tier: TierState, chunk: Chunk) -> int:
        """The marks of what this tier should still get of a chunk."""
        is_ephemeral = self._known.get(chunk.namespace, {}).get("ephemeral")
        return 0 if is_ephemeral else tier.marks(chunk.ready) & ~chunk.in_tiers

    def _append_all(self, tier: TierState, chunk: Chunk) -> None:
        if self._missing(tier, chunk):
            for bit in range(chunk.ready.bit_length()):
                if chunk.ready >> bit & 1:
                    self._append(tier, chunk, bit)

    @staticmethod
    def _unqueue(tier: TierState) -> None:
        """Forgets what waits for a tier that takes what is cold: it is offered again."""
        for chunk, bit in tier.backlog:
            chunk.in_tiers &= ~tier.mark(bit)
        tier.backlog.clear()

    def _append(self, tier: TierState, chunk: Chunk, bit: int) -> None:
        if chunk.in_tiers & tier.mark(bit):
            return
        if len(tier.backlog) >= MAX_BACKLOG:
            self._tiers.count(tier, "write", "dropped", 0)
            return
        chunk.in_tiers |= tier.mark(bit)
        tier.backlog.append((chunk, bit))

    def _write(self, tier: TierState) -> None:
        """Starts writing what waits, as far as there is room."""
        gone = 0
        while tier.backlog and len(tier.writing) < WRITES_AT_ONCE and gone < MAX_GONE and not self._is_paused:
            # What hangs holds its frames, perhaps forever: beside it, one object at a time is written.
            busy = len(tier.writing) > tier.worker.writes_hanging
            if busy and self._spilling_frames > self._cache.total_frames // SPILL_SHARE:
                return
            if tier.breaker.is_open:
                return
            chunk, bit = tier.backlog.popleft()
            stored = self._cache.open_spill(chunk, bit)
            if stored is None:
                self._tiers.count(tier, "write", "evicted", 0)
                gone += 1
                continue
            # Not in the task: before it begins, more objects are chosen, and this one may be found damaged.
            self._spilling_frames += count_frames(stored.runs)
            size = stored.num_blocks, stored.num_bytes
            label = Label(chunk.namespace, chunk.key, bit, *size, digest=stored.digest)
            tier.writing.append(label.name)
            self._system.spawn(self._spill(tier, chunk, stored, label))

    async def _spill(self, tier: TierState, chunk: Chunk, stored: StoredObject, label: Label) -> None:
        outcome = "failed"
        try:
            outcome = await tier.worker.write(label, self._tiers.payload(stored.runs, stored.num_bytes))
            self._tiers.succeeded(tier, WRITE)
        except CopyError:  # L1's file was cut
            pass
        except DamagedRecordError as error:
            if self._cache.chunk(chunk.namespace, chunk.key) is chunk:
                self._forget_damaged(chunk, str(error))
        except TierError as error:
            self._tiers.failed(tier, error, WRITE)
        finally:
            self._spilling_frames -= count_frames(stored.runs)
            tier.writing.remove(label.name)
            if outcome not in ("written", "present"):
                chunk.in_tiers &= ~tier.mark(label.bit)
            self._cache.close_spill(chunk)
            self._tiers.count(tier, "write", outcome, stored.num_bytes)
            if outcome == "full":
                tier.full_until_s = self._system.now_s() + FULL_S
                if tier.cold:
                    self._unqueue(tier)
            # Nothing evicts it meanwhile, so it was cleared, or is damaged.
            if self._cache.chunk(chunk.namespace, chunk.key) is not chunk:
                tier.damaged.add(label.name)
                self._remove_damaged(tier)
            self._write(tier)
