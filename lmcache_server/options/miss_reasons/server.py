"""The reasons of misses as an option of the server."""

import functools
from collections.abc import Iterable, Sequence

from prometheus_client import Counter

from lmcache_client.contract.messages import Lookup
from lmcache_server.core.cache import Gone, Hit, Layout
from lmcache_server.core.index import Chunk
from lmcache_server.options.miss_reasons.partial import PartialChunks
from lmcache_server.options.miss_reasons.reasons import Evicted, ending_groups, missed_tokens
from lmcache_server.service.option import Base, Option
from lmcache_server.telemetry.metrics import Metric


class Server(Option):
    METRICS = (
        Metric(Counter, "lmcache_partial_chunks_total",
               "Lookups that ended before a chunk which, for 5 s, only some workers of the engine had "
               "stored."),
    )  # fmt: skip

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self._cache, self._metrics, self._options = base.cache, base.metrics, base.options
        self._evicted, self._partial = Evicted(), PartialChunks()
        base.cache.on_gone.append(self._gone)

    def _gone(self, chunk: Chunk, why: Gone) -> None:
        if why is not Gone.FORGOTTEN:
            self._evicted.add(chunk.namespace, chunk.key)

    def looked_up(
        self, session_id: int, layout: Layout, message: Lookup, hit: Hit, fetched: int, now_s: float
    ) -> None:
        size = layout.chunk_size
        end = max(message.computed_tokens, hit.resume_tokens) // size
        if end < message.limit_tokens // size and self._cache.is_partial(layout, key := message.keys[end]):
            partial = self._partial.seen(layout.namespace, key, now_s)
            self._metrics.count("lmcache_partial_chunks_total", int(partial))

    def missed(self, layout: Layout, message: Lookup, hit: Hit, in_tiers: int) -> dict[str, int]:
        span = max(message.computed_tokens, hit.resume_tokens), message.limit_tokens
        of_cache = self._evicted, functools.partial(self._cache.is_partial, layout)
        is_down = any(each.is_down(layout) for each in self._options)
        return missed_tokens(layout, message.keys, hit.held, *span, *of_cache, is_down, in_tiers)

    def ends(
        self, layout: Layout, hit: Hit, ready: Sequence[int], limit: int
    ) -> Iterable[tuple[int, int, tuple[int, ...]]]:
        return ending_groups(layout, hit.held, ready, limit)
