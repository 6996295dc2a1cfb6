"""Lookup, inspect and release: the cache alone answers them."""

import functools
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from lmcache_client.contract import messages
from lmcache_client.contract.control import Inspect, Inspected
from lmcache_client.contract.messages import Accept, Done, Found, Lookup, Message, Release
from lmcache_server.core.cache import Hit, Layout
from lmcache_server.core.misses import ending_groups, missed_tokens
from lmcache_server.service.option import Base, Option
from lmcache_server.service.pinning import Pinning
from lmcache_server.service.refusals import Refusal, log_request
from lmcache_server.service.requests_of_tests import traffic
from lmcache_server.service.sessions import Session, Shard
from lmcache_server.telemetry.partial import PartialChunks

MAX_EARLY = 1024
"""Early lookups beyond these push out the oldest, which are then never counted."""


class Lookups:
    """Handles Lookup, Accept, Inspect and Release."""

    def __init__(self, base: Base, pinning: Pinning) -> None:
        self._cache, self._registry, self._options = base.cache, base.registry, base.options
        self._metrics, self._system, self._pinning = base.metrics, base.system, pinning
        self._lease_s = base.config.lease_s
        self._partial = PartialChunks()
        self._early: dict[tuple[int, str], tuple[Layout, Lookup, Hit, int]] = {}
        """By session and request, the early lookups that the engine has not accepted yet."""

    def lookup(
        self, session: Session, message: Lookup, request_bytes: int
    ) -> Message | Coroutine[Any, Any, Message]:
        """Answers at once if L1 has everything or no option could bring more."""
        layout, started_s = self._registry.joined_layout(session), self._system.now_s()
        computed, limit = message.computed_tokens, message.limit_tokens
        if not computed <= limit < message.num_tokens or limit > len(message.keys) * layout.chunk_size:
            raise Refusal(messages.BAD_REQUEST, "computed_tokens <= limit_tokens < num_tokens does not hold")
        if message.early and len(message.keys) > messages.MAX_EARLY_CHUNKS:
            raise Refusal(messages.BAD_REQUEST, "an early lookup has too many keys")
        owner, once = session.session_id, message.once
        hit = self._cache.lookup(layout, message.keys, computed, limit, owner, started_s, once)
        if hit.resume_tokens < limit > computed:
            sources = [option for option in self._options if option.may_fetch(layout)]
            if sources and self._registry.may_wait(session, request_bytes):
                shards = self._registry.shards(session)
                return self._after_fetch(session, layout, shards, message, hit, sources, request_bytes)
        return self._answer(session, layout, message, hit, started_s)

    async def _after_fetch(
        self,
        session: Session,
        layout: Layout,
        shards: Mapping[int, Shard],
        message: Lookup,
        hit: Hit,
        sources: Sequence[Option],
        request_bytes: int,
    ) -> Message:
        """Answers when `sources` have brought what they can. Meanwhile the lease keeps what L1 has. `shards`
        are what the engine had when it asked: it may have ended when this begins."""
        in_tiers = 0
        with session.working(request_bytes):
            for source in sources:
                in_tiers = max(in_tiers, await source.fetch(layout, shards, message, hit.resume_tokens))
        self._cache.release(hit.lease_id, session.session_id)
        # The session may have ended meanwhile, and its engine may have another namespace.
        if self._registry.sessions.get(session.identity) is not session:
            raise Refusal(messages.NOT_REGISTERED, "the session ended before its lookup was answered")
        if self._registry.joined_layout(session).namespace != layout.namespace:
            raise Refusal(messages.NOT_REGISTERED, "the engine has registered again")
        started_s, computed, limit = self._system.now_s(), message.computed_tokens, message.limit_tokens
        owner, once = session.session_id, message.once
        hit = self._cache.lookup(layout, message.keys, computed, limit, owner, started_s, once)
        return self._answer(session, layout, message, hit, started_s, in_tiers)

    def _answer(
        self, session: Session, layout: Layout, message: Lookup, hit: Hit, started_s: float, in_tiers: int = 0
    ) -> Message:
        request, keys = (session.session_id, message.request_id), message.keys
        computed, limit = message.computed_tokens, message.limit_tokens
        self._early.pop(request, None)
        if message.early:
            self._early[request] = layout, message, hit, in_tiers
            if len(self._early) > MAX_EARLY:
                del self._early[next(iter(self._early))]
            missed = self._missed(layout, keys, hit, computed, limit, in_tiers) if message.why else {}
        else:
            missed = self._count(session, layout, message, hit, started_s, in_tiers)
        self._metrics.observe("lmcache_lookup_seconds", self._system.now_s() - started_s)
        why = tuple(missed.items()) if message.why else ()
        return Found(hit.resume_tokens, hit.lease_id, int(self._lease_s), hit.held, why)

    def accept(self, session: Session, message: Accept) -> Message:
        """Counts early lookups as if the engine had asked them with these computed tokens."""
        for request_id, computed in message.lookups:
            found = self._early.pop((session.session_id, request_id), None)
            if found is not None and computed <= found[1].limit_tokens:
                layout, question, hit, in_tiers = found
                asked, now_s = replace(question, computed_tokens=computed), self._system.now_s()
                self._count(session, layout, asked, hit, now_s, in_tiers)
        return Done()

    def _count(
        self, session: Session, layout: Layout, message: Lookup, hit: Hit, started_s: float, in_tiers: int
    ) -> dict[str, int]:
        computed, limit = message.computed_tokens, message.limit_tokens
        hit_tokens = max(hit.resume_tokens - computed, 0)
        beyond = (computed + hit_tokens) // layout.chunk_size
        if beyond < limit // layout.chunk_size and self._cache.is_partial(layout, message.keys[beyond]):
            partial = self._partial.seen(layout.namespace, message.keys[beyond], started_s)
            self._metrics.count("lmcache_partial_chunks_total", int(partial))
        missed = self._missed(layout, message.keys, hit, computed, limit, in_tiers)
        # A request is at most a chunk longer than `limit`, unless it has more chunks than a message may name.
        requested = min(message.num_tokens, limit + layout.chunk_size)
        whose = traffic(self._metrics, layout, message.request_id)
        self._metrics.count_tokens(whose, requested, computed, hit_tokens, limit, missed)
        for option in self._options:
            option.looked_up(session.session_id, layout, message, started_s)
        values = {
            "hit_tokens": hit_tokens,
            "computed_tokens": computed,
            "num_tokens": message.num_tokens,
            "missed": missed,
            "lease": hit.lease_id,
            "namespace": layout.namespace.hex()[:16],
            "seconds": self._system.now_s() - started_s,
        }
        text = "request %(request_id)s: hits %(hit_tokens)d of %(num_tokens)d tokens, misses %(missed)s"
        log_request(logging.DEBUG, text, session, message, values)
        return missed

    def _missed(
        self, layout: Layout, keys: tuple[bytes, ...], hit: Hit, computed: int, limit: int, in_tiers: int = 0
    ) -> dict[str, int]:
        start = max(computed, hit.resume_tokens)
        is_partial = functools.partial(self._cache.is_partial, layout)
        is_down, evicted = any(each.is_down(layout) for each in self._options), self._cache.evicted
        return missed_tokens(layout, keys, hit.held, start, limit, evicted, is_partial, is_down, in_tiers)

    def inspect(self, message: Inspect) -> Message:
        """Changes nothing, not even a counter of tokens."""
        layout, keys, limit = self._registry.layout(message.engine_id), message.keys, message.limit_tokens
        if layout is None:
            raise Refusal(messages.NOT_REGISTERED, f"engine {message.engine_id!r} is not connected any more")
        if limit > len(keys) * layout.chunk_size:
            raise Refusal(messages.BAD_REQUEST, "the keys end before limit_tokens")
        chain, hit = self._cache.find(layout, keys, 0, limit)
        missed = self._missed(layout, keys, hit, 0, limit)
        ends = ending_groups(layout, hit.held, [chunk.ready if chunk else 0 for chunk in chain], limit)
        return Inspected(hit.resume_tokens, hit.held, tuple(missed.items()), tuple(ends))

    def release(self, session: Session, message: Release) -> Message:
        self._early.pop((session.session_id, message.request_id), None)
        for lease_id in message.lease_ids:
            self._cache.release(lease_id, session.session_id)
        layout = self._registry.joined_layout(session)
        self._cache.touch(layout.namespace, message.keys[: max(len(message.keys) - message.answers, 0)])
        for option in self._options:
            option.released(session.session_id, layout, message)
        self._pinning.released(layout, message)
        text = "request %(request_id)s: ended" if message.request_id else "leases given up: %(leases)s"
        log_request(logging.DEBUG, text, session, message, {"leases": list(message.lease_ids)})
        return Done()
