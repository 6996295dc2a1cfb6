"""Lookup, inspect and release: the cache alone answers them."""

import logging
from collections.abc import Coroutine
from typing import Any, NamedTuple

from msgspec.structs import replace

from lmcache_client.contract import messages
from lmcache_client.contract.control import Inspect, Inspected
from lmcache_client.contract.messages import Accept, Done, Found, Lookup, Message, Release
from lmcache_server.core.cache import Hit, Layout
from lmcache_server.service.engines import Session, Shard
from lmcache_server.service.option import Base, Option
from lmcache_server.service.refusals import Refusal, log_request
from lmcache_server.service.requests_of_tests import traffic
from lmcache_server.telemetry.metrics import NOT_STORED

MAX_EARLY = 1024
"""Early lookups beyond these push out the oldest, which are then never counted."""


class _Asked(NamedTuple):
    """A lookup and what it found: L1 itself had the resume point `in_l1`, and options promised `in_tiers`."""

    layout: Layout
    message: Lookup
    hit: Hit
    in_l1: int
    in_tiers: int = 0


class Lookups:
    """Handles Lookup, Accept, Inspect and Release."""

    def __init__(self, base: Base) -> None:
        self._cache, self._sessions, self._options = base.cache, base.sessions, base.options
        self._metrics, self._system = base.metrics, base.system
        self._lease_s = base.config.lease_s
        self._early: dict[tuple[int, str], _Asked] = {}
        """By session and request, the early lookups that the engine has not accepted yet."""

    def lookup(
        self, session: Session, message: Lookup, request_bytes: int
    ) -> Message | Coroutine[Any, Any, Message]:
        """Answers at once if L1 has everything or no option could bring more."""
        layout, started_s = self._sessions.joined_layout(session), self._system.now_s()
        computed, limit = message.computed_tokens, message.limit_tokens
        if not computed <= limit < message.num_tokens or limit > len(message.keys) * layout.chunk_size:
            raise Refusal(messages.BAD_REQUEST, "computed_tokens <= limit_tokens < num_tokens does not hold")
        if message.early and len(message.keys) > messages.MAX_EARLY_CHUNKS:
            raise Refusal(messages.BAD_REQUEST, "an early lookup has too many keys")
        owner, once = session.session_id, message.once
        hit = self._cache.lookup(layout, message.keys, computed, limit, owner, started_s, once)
        asked = _Asked(layout, message, hit, hit.resume_tokens)
        if hit.resume_tokens < limit > computed:
            sources = [option for option in self._options if option.may_fetch(layout)]
            if sources and self._sessions.may_wait(session, request_bytes):
                shards = self._sessions.shards(session)
                return self._after_fetch(session, shards, asked, sources, request_bytes)
        return self._answer(session, asked, started_s)

    async def _after_fetch(
        self, session: Session, shards: dict[int, Shard], asked: _Asked, sources: list[Option], num_bytes: int
    ) -> Message:
        """Answers when `sources` have brought what they can. Meanwhile the lease keeps what L1 has. `shards`
        are what the engine had when it asked: it may have ended when this begins."""
        layout, message, hit, in_l1, in_tiers = asked
        with session.working(num_bytes):
            for source in sources:
                in_tiers = max(in_tiers, await source.fetch(layout, shards, message, in_l1))
        self._cache.release(hit.lease_id, session.session_id)
        # The session may have ended meanwhile, and its engine may have another namespace.
        if self._sessions.by_identity.get(session.identity) is not session:
            raise Refusal(messages.NOT_REGISTERED, "the session ended before its lookup was answered")
        if self._sessions.joined_layout(session).namespace != layout.namespace:
            raise Refusal(messages.NOT_REGISTERED, "the engine has registered again")
        started_s, computed, limit = self._system.now_s(), message.computed_tokens, message.limit_tokens
        owner, once = session.session_id, message.once
        hit = self._cache.lookup(layout, message.keys, computed, limit, owner, started_s, once)
        return self._answer(session, asked._replace(hit=hit, in_tiers=in_tiers), started_s)

    def _answer(self, session: Session, asked: _Asked, started_s: float) -> Message:
        message, hit = asked.message, asked.hit
        request = (session.session_id, message.request_id)
        self._early.pop(request, None)
        if message.early:
            self._early[request] = asked
            if len(self._early) > MAX_EARLY:
                del self._early[next(iter(self._early))]
            missed = self._missed(asked) if message.why else {}
        else:
            missed = self._count(session, asked, started_s)
        self._metrics.observe("lmcache_lookup_seconds", self._system.now_s() - started_s)
        why = tuple(missed.items()) if message.why else ()
        return Found(hit.resume_tokens, hit.lease_id, int(self._lease_s), hit.held, why, asked.in_l1)

    def accept(self, session: Session, message: Accept) -> Message:
        """Counts early lookups as if the engine had asked them with these computed tokens."""
        for request_id, computed in message.lookups:
            found = self._early.pop((session.session_id, request_id), None)
            if found is not None and computed <= found.message.limit_tokens:
                again = found._replace(message=replace(found.message, computed_tokens=computed))
                self._count(session, again, self._system.now_s())
        return Done()

    def _count(self, session: Session, asked: _Asked, started_s: float) -> dict[str, int]:
        layout, message, hit, in_l1, in_tiers = asked
        computed, limit = message.computed_tokens, message.limit_tokens
        hit_tokens = max(hit.resume_tokens - computed, 0)
        missed = self._missed(asked)
        # A request is at most a chunk longer than `limit`, unless it has more chunks than a message may name.
        requested = min(message.num_tokens, limit + layout.chunk_size)
        whose = traffic(self._metrics, layout, message.request_id)
        self._metrics.count_tokens(whose, requested, computed, hit_tokens, limit, missed)
        fetched = max(min(hit.resume_tokens, in_tiers) - max(in_l1, computed), 0)
        for option in self._options:
            option.looked_up(session.session_id, layout, message, hit, fetched, started_s)
        values = {
            "hit_tokens": hit_tokens, "computed_tokens": computed, "num_tokens": message.num_tokens,
            "missed": missed, "lease": hit.lease_id, "namespace": layout.namespace.hex()[:16],
            "seconds": self._system.now_s() - started_s,
        }  # fmt: skip
        text = "request %(request_id)s: hits %(hit_tokens)d of %(num_tokens)d tokens, misses %(missed)s"
        log_request(logging.DEBUG, text, session, message, values)
        return missed

    def _missed(self, asked: _Asked) -> dict[str, int]:
        layout, message, hit, _, in_tiers = asked
        if not (miss := message.limit_tokens - max(message.computed_tokens, hit.resume_tokens)):
            return {}
        told = (option.missed(layout, message, hit, in_tiers) for option in self._options)
        return next(filter(None, told), {NOT_STORED: miss})

    def inspect(self, message: Inspect) -> Message:
        """Changes nothing, not even a counter of tokens."""
        layout, keys, limit = self._sessions.layout(message.engine_id), message.keys, message.limit_tokens
        if layout is None:
            raise Refusal(messages.NOT_REGISTERED, f"engine {message.engine_id!r} is not connected any more")
        if limit > len(keys) * layout.chunk_size:
            raise Refusal(messages.BAD_REQUEST, "the keys end before limit_tokens")
        chain, hit = self._cache.find(layout, keys, 0, limit)
        missed = self._missed(_Asked(layout, Lookup("", keys, 0, limit, limit), hit, 0))
        ready = [chunk.ready if chunk else 0 for chunk in chain]
        ends = [end for option in self._options for end in option.ends(layout, hit, ready, limit)]
        return Inspected(hit.resume_tokens, hit.held, tuple(missed.items()), tuple(ends))

    def release(self, session: Session, message: Release) -> Message:
        self._early.pop((session.session_id, message.request_id), None)
        for lease_id in message.lease_ids:
            self._cache.release(lease_id, session.session_id)
        layout = self._sessions.joined_layout(session)
        self._cache.touch(layout.namespace, message.keys[: max(len(message.keys) - message.answers, 0)])
        for option in self._options:
            option.released(session.session_id, layout, message)
        text = "request %(request_id)s: ended" if message.request_id else "leases given up: %(leases)s"
        log_request(logging.DEBUG, text, session, message, {"leases": list(message.lease_ids)})
        return Done()
