"""The age of chunks as an option of the server."""

import logging

from prometheus_client import Counter

from lmcache_server.options.max_age.flags import ages_s
from lmcache_server.service.option import Base, Option
from lmcache_server.telemetry.metrics import Metric

logger = logging.getLogger(__name__)

MAX_FORGOTTEN = 1000
"""How many chunks may be forgotten in a second. That takes 8 to 40 ms."""


class Server(Option):
    METRICS = (Metric(Counter, "lmcache_expired_chunks_total", "Chunks forgotten because of --max-age."),)

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self._cache, self._sessions, self._metrics = base.cache, base.sessions, base.metrics
        self._system = base.system
        self._text = base.config.of_options.get("max_age", "")
        self._ages_s = ages_s(self._text)

    def restored(self, saved: bytes) -> None:
        if old := self.forget_old(self._cache.num_chunks):
            logger.info("forgot %(chunks)d of these chunks, because of --max-age", {"chunks": old})

    def tick(self, now_s: float) -> None:
        self.forget_old(MAX_FORGOTTEN)

    def forget_old(self, most: int) -> int:
        """Forgets `most` chunks that are too old, and one more for each namespace, so that none waits for the
        others; returns how many."""
        names, forgotten, now_s = list(self._cache.namespaces()), 0, self._system.now_s()
        for share in (most // max(len(names), 1), most) if self._text else ():
            for namespace in names:
                known = self._sessions.known.get(namespace, {})
                limit_s = self._ages_s.of(namespace, known.get("model"))
                left = max(min(share, most - forgotten), 1)
                forgotten += self._cache.forget_old(namespace, now_s - limit_s, left)
        self._metrics.count("lmcache_expired_chunks_total", forgotten)
        return forgotten
