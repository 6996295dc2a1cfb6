"""Lookup and release: a scheduler sends them, and the cache alone answers them."""

import logging

from lmcache_client.contract import messages
from lmcache_client.contract.messages import Done, Found, Lookup, Message, Release
from lmcache_server.core.cache import Cache
from lmcache_server.service.planner import Planner
from lmcache_server.service.registry import Registry
from lmcache_server.service.requests import Refusal, log_request
from lmcache_server.service.sessions import Session
from lmcache_server.service.system import System
from lmcache_server.telemetry.metrics import Metrics
from lmcache_server.telemetry.partial import PartialChunks


class Lookups:
    """Handles Lookup and Release. `lease_s` is how long a lease lasts, in seconds."""

    def __init__(
        self,
        cache: Cache,
        registry: Registry,
        planner: Planner,
        metrics: Metrics,
        system: System,
        lease_s: float,
    ) -> None:
        self._cache = cache
        self._planner = planner
        self._registry = registry
        self._metrics = metrics
        self._system = system
        self._lease_s = lease_s
        self._partial = PartialChunks()

    def lookup(self, session: Session, message: Lookup) -> Message:
        started_s = self._system.now_s()
        layout = self._registry.joined_layout(session)
        computed, limit = message.computed_tokens, message.limit_tokens
        if not computed <= limit < message.num_tokens or limit > len(message.keys) * layout.chunk_size:
            raise Refusal(messages.BAD_REQUEST, "computed_tokens <= limit_tokens < num_tokens does not hold")
        hit = self._cache.lookup(layout, message.keys, computed, limit, session.session_id, started_s)
        hit_tokens = max(hit.resume_tokens - computed, 0)
        beyond = (computed + hit_tokens) // layout.chunk_size
        if beyond < limit // layout.chunk_size and self._cache.is_partial(layout, message.keys[beyond]):
            partial = self._partial.seen(layout.namespace, message.keys[beyond], started_s)
            self._metrics.count("lmcache_partial_chunks_total", int(partial))
        # A self-test or a benchmark would distort the hit rate.
        if not layout.ephemeral:
            # A request is at most a chunk longer than `limit`, unless it has more chunks than a message may
            # name.
            requested = min(message.num_tokens, limit + layout.chunk_size)
            self._metrics.count_tokens(requested, computed=computed, hit=hit_tokens, limit=limit)
        self._planner.looked_up(session.session_id, layout, message, started_s)
        seconds = self._system.now_s() - started_s
        self._metrics.observe("lmcache_lookup_seconds", seconds)
        values = {
            "hit_tokens": hit_tokens,
            "computed_tokens": computed,
            "num_tokens": message.num_tokens,
            "lease": hit.lease_id,
            "namespace": layout.namespace.hex()[:16],
            "seconds": seconds,
        }
        text = "request %(request_id)s: %(hit_tokens)d of %(num_tokens)d tokens can be restored"
        log_request(logging.DEBUG, text, session, message, values)
        return Found(hit.resume_tokens, hit.lease_id, int(self._lease_s), hit.held)

    def release(self, session: Session, message: Release) -> Message:
        for lease_id in message.lease_ids:
            self._cache.release(lease_id, session.session_id)
        layout = self._registry.joined_layout(session)
        self._cache.touch(layout.namespace, message.keys)
        self._planner.released(session.session_id, layout, message)
        text = "request %(request_id)s: ended" if message.request_id else "leases given up: %(leases)s"
        log_request(logging.DEBUG, text, session, message, {"leases": list(message.lease_ids)})
        return Done()
