"""Fetches: brings what a lookup could use from the tiers into L1.

Engines talk to L1 only. A tier's word that it has an object is a hint: the hit is what L1 holds afterwards.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from lmcache_client.contract.geometry import FULL
from lmcache_client.contract.hits import fetch_patience_s, resume_point
from lmcache_client.contract.messages import Lookup
from lmcache_server.core.cache import Layout, Reservation
from lmcache_server.core.index import Chunk
from lmcache_server.core.pool import FRAME_BYTES, count_frames
from lmcache_server.options.tiers.base import TierError
from lmcache_server.options.tiers.breaker import PRESENT, READ
from lmcache_server.options.tiers.fetch_choice import Speed, Wanted, choose, wanted
from lmcache_server.options.tiers.record_format import DamagedRecordError, Label
from lmcache_server.options.tiers.record_name import record_name
from lmcache_server.options.tiers.tier_states import Tiers, TierState
from lmcache_server.service.engines import Shard
from lmcache_server.service.option import Base
from lmcache_server.transfer.base import CopyError

FETCH_SHARE = 4
"""Objects that are arriving may take a quarter of L1."""
NAMES_AT_ONCE = 32
"""Windows and states are asked for from the end of a chain, so many chunks at a time."""
MAX_ROUNDS = 8
MAX_ASKED = 4096
"""Chunks of a chain that tiers are asked for."""
SLICE_OBJECTS, SLICE_S = 250, 0.001
"""Lookups have their turn after so many objects of a fetch have got their place."""
MAX_WAITING = 256
"""A tier for which so many calls wait is not asked."""
Size = tuple[int, int]
"""The blocks and the bytes of an object."""


class Fetches:
    """`made_room` is told which objects got frames: what is evicted next may have to be written to a tier
    first."""

    def __init__(self, tiers: Tiers, base: Base, made_room: Callable[[Sequence[Reservation]], None]) -> None:
        self._tiers = tiers
        self._cache, self._known = base.cache, base.sessions.known
        self._metrics, self._failures, self._system = base.metrics, base.failures, base.system
        self._keeps_digests = base.config.checksums
        self._made_room = made_room
        self._fetching_frames = 0
        self._is_closed = False
        self._arriving: dict[tuple[Chunk, int], asyncio.Future[None]] = {}

    def close(self) -> None:
        """Takes no more frames."""
        self._is_closed = True

    def is_down(self, layout: Layout) -> bool:
        """Whether a tier that may have this engine's chunks is left alone."""
        return not layout.ephemeral and any(tier.breaker.is_open for tier in self._tiers.all)

    def usable(self, layout: Layout) -> list[TierState]:
        """The tiers that may be called now for an engine with this layout."""
        if layout.ephemeral or self._is_closed:
            return []
        tiers = [tier for tier in self._tiers.all if not tier.breaker.is_open]
        return [tier for tier in tiers if tier.worker.reads_waiting < MAX_WAITING]

    async def fetch(
        self, layout: Layout, shards: Mapping[int, Shard], message: Lookup, resume_tokens: int
    ) -> int:
        """Brings into L1 what a larger resume point than `resume_tokens` needs; returns when that is there,
        when it is clear that it will not be, or when the request has waited long enough. What comes later
        stays in L1 for the next request. Returns the resume point for which tiers say that they have what L1
        lacks."""
        limit = message.limit_tokens
        ready = self._cache.ready(layout, message.keys[: limit // layout.chunk_size])
        fetch = _Fetch(layout, shards, message, ready)
        least = max(resume_tokens, message.computed_tokens)
        ended = self._system.spawn(self._plan(fetch, least, self.usable(layout)))
        await self._system.wait([ended], fetch_patience_s(message.num_tokens))
        self._metrics.count("lmcache_tier_fetches_total", 1, outcome="ended" if ended.done() else "late")
        return fetch.resume_point(limit)

    async def _plan(self, fetch: "_Fetch", least: int, usable: Sequence[TierState]) -> None:
        """Brings what a resume point beyond `least` tokens needs, if it pays."""
        message, limit = fetch.message, fetch.message.limit_tokens
        for tier in usable:
            await self._look(tier, fetch)
        objects = dict[Wanted, Size]()
        while (target := fetch.resume_point(limit)) > least:
            quota = self._cache.order.tenant_policy.most_frames(message.tenant)
            room = min(self._cache.total_frames // FETCH_SHARE - self._fetching_frames, quota)
            objects = {}
            for each in wanted(fetch.layout, fetch.ready, target, message.computed_tokens):
                objects[each] = fetch.size(each)
                is_coming = self._coming(fetch, each) is not None
                room -= 0 if is_coming else -(-objects[each][1] // FRAME_BYTES)
                if room < 0:
                    break
            if room >= 0:
                break
            objects, limit = {}, (message.computed_tokens + target) // 2
        if not objects:
            return
        if not message.prefill_tokens_s:
            await self._bring(fetch, objects)
            return
        amounts = Counter[TierState]()
        for each, (_, num_bytes) in objects.items():
            amounts[fetch.where[each.group, each.chunk]] += num_bytes
        reads = [(tier.speed, size, tier.worker.read_delay_s(size)) for tier, size in amounts.items()]
        now_s, saved_s = self._system.now_s(), (target - least) / message.prefill_tokens_s
        arrived = None
        if (choice := choose(reads, saved_s, now_s)) is not None:
            for speed in choice.unknown:
                speed.tried_s = now_s
            arrived = self._system.spawn(self._tried(fetch, objects, choice.unknown))
            if choice.wait_s:
                await self._system.wait([arrived], choice.wait_s)
        if arrived is None or not arrived.done():
            self._metrics.count("lmcache_tier_fetches_total", 1, outcome="slow")

    async def _tried(self, fetch: "_Fetch", objects: Mapping[Wanted, Size], unknown: Sequence[Speed]) -> None:
        """Tells how fast these tiers are now. Meanwhile nobody else tries them."""
        try:
            await self._bring(fetch, objects)
        finally:
            for speed in unknown:
                speed.tried_s = -math.inf

    async def _look(self, tier: TierState, fetch: "_Fetch") -> None:
        """Notes what of the chain `tier` says that it has: full attention first, because a gap there ends
        every resume, then windows and states from the end."""
        layout, size, limit = fetch.layout, fetch.layout.chunk_size, fetch.message.limit_tokens
        first = fetch.message.computed_tokens // size
        chunks = min(limit // size, first + MAX_ASKED)
        full = [number for number, group in enumerate(layout.groups) if group.kind == FULL]
        rest = [number for number in range(len(layout.groups)) if number not in full]
        for group in full:
            if not await self._ask(tier, fetch, group, range(first, chunks)):
                return
            missing = fetch.present[group].find(0, first, chunks)
            chunks = chunks if missing < 0 else missing
        for _ in range(MAX_ROUNDS):
            start = max(first, chunks - NAMES_AT_ONCE)
            for group in rest:
                if not await self._ask(tier, fetch, group, range(start, chunks)):
                    return
            if start == first or not rest or fetch.resume_point(limit) > start * size:
                return
            chunks = start

    async def _ask(self, tier: TierState, fetch: "_Fetch", group: int, chunks: range) -> bool:
        """Asks for the objects of one shard, which stands for all. False if the tier failed."""
        places = [chunk for chunk in chunks if not fetch.present[group][chunk]]
        if not places:
            return True
        names = [fetch.name(group, chunk) for chunk in places]
        try:
            found = await tier.worker.present(names)
        except TierError as error:
            self._tiers.failed(tier, error)
            return False
        self._tiers.succeeded(tier, PRESENT)
        for chunk, name, there in zip(places, names, found, strict=True):
            if there and tier.may_read(name):
                fetch.present[group][chunk] = 1
                fetch.where[group, chunk] = tier
        return True

    async def _bring(self, fetch: "_Fetch", objects: Mapping[Wanted, Size]) -> None:
        layout, keys = fetch.layout, fetch.message.keys
        # The engine may have ended while the tiers were asked. One that had chunks is still known.
        if self._is_closed or layout.namespace not in self._known:
            return
        arrivals: list[asyncio.Future[None]] = []
        rooms: list[Reservation] = []
        read = {tier: tier.read_bytes for tier in fetch.where.values()}
        started_s = self._system.now_s()
        for number, (each, size) in enumerate(objects.items(), 1):
            if number % SLICE_OBJECTS == 0:
                await self._system.wait([self._system.future()], SLICE_S)
                if layout.namespace not in self._known or self._is_closed:
                    break
            tier = fetch.where[each.group, each.chunk]
            parent = keys[each.chunk - 1] if each.chunk else b""
            place = keys[each.chunk], each.group, each.rank, *size, parent
            # Other lookups may have planned in the same turn.
            is_full = self._fetching_frames >= self._cache.total_frames // FETCH_SHARE
            room = None if is_full else self._cache.reserve(layout, *place, tenant=fetch.message.tenant)
            if isinstance(room, Reservation):
                rooms.append(room)
                self._fetching_frames += count_frames(room.runs)
                arrival = self._system.spawn(self._arrive(tier, room))
                self._arriving[room.chunk, room.bit] = arrival
                arrivals.append(arrival)
            elif other := self._coming(fetch, each):
                arrivals.append(other)
        self._made_room(rooms)
        if arrivals:
            await self._system.wait(arrivals, None)
        now_s = self._system.now_s()
        for tier, before in read.items():
            # Also what others have fetched meanwhile: these reads waited for theirs.
            if tier.read_bytes > before:
                tier.speed.add(tier.read_bytes - before, now_s - started_s, now_s)

    def _coming(self, fetch: "_Fetch", each: Wanted) -> "asyncio.Future[None] | None":
        """The arrival of an object that another lookup fetches; None if an engine is storing it."""
        chunk = self._cache.chunk(fetch.layout.namespace, fetch.message.keys[each.chunk])
        return self._arriving.get((chunk, fetch.layout.bit(each.group, each.rank))) if chunk else None

    async def _arrive(self, tier: TierState, room: Reservation) -> None:
        """Reads one object into its frames, which stay reserved until the call has returned."""
        outcome, digest = "failed", None
        try:
            await tier.reads.acquire()
            if tier.breaker.is_open:
                raise TierError(tier.failure)
            label = Label(room.chunk.namespace, room.chunk.key, room.bit, room.num_blocks, room.num_bytes)
            payload = self._tiers.payload(room.runs, room.num_bytes)
            if tier.may_read(label.name):
                digest = await tier.worker.read(label, payload)
                self._tiers.succeeded(tier, READ)
            outcome = "gone" if digest is None else "read"
            tier.read_bytes += room.num_bytes if digest is not None else 0
        except DamagedRecordError as error:
            outcome = "damaged"
            self._failures.add(self._system.now_s(), "record damaged", "", f"{tier.url}: {error}")
        except CopyError:  # L1's file was cut
            pass
        except TierError as error:
            if not tier.breaker.is_open:
                self._tiers.failed(tier, error, READ)
        finally:
            tier.reads.release()
            self._fetching_frames -= count_frames(room.runs)
            if digest is None:
                self._cache.abort(room)
            else:
                self._cache.commit(room, digest if self._keeps_digests else b"")
                room.chunk.in_tiers |= tier.mark(room.bit)
            del self._arriving[room.chunk, room.bit]
            self._tiers.count(tier, "read", outcome, room.num_bytes)


class _Fetch:
    """What a lookup asks for, and what L1 and the tiers seem to have of it. `present` has a flag per group
    and chunk; `where` says which tier has what L1 lacks. `ready` is what Cache.ready returned."""

    def __init__(
        self, layout: Layout, shards: Mapping[int, Shard], message: Lookup, ready: Sequence[int]
    ) -> None:
        self.layout, self.shards, self.message, self.ready = layout, shards, message, ready
        self.present = [bytearray(flags) for flags in layout.present(ready)]
        self.where: dict[tuple[int, int], TierState] = {}

    def name(self, group: int, chunk: int) -> str:
        layout = self.layout
        bit = layout.bit(group, layout.holders[group][0])
        return record_name(layout.namespace, self.message.keys[chunk], bit)

    def resume_point(self, limit: int) -> int:
        layout, flags = self.layout, list(map(bytes, self.present))
        return resume_point(layout.groups, layout.chunk_size, flags, self.message.computed_tokens, limit)

    def size(self, each: Wanted) -> Size:
        blocks = len(self.layout.groups[each.group].stored_blocks(each.chunk, self.layout.chunk_size))
        return blocks, blocks * self.shards[each.rank].geometry.groups[each.group].block_bytes
