"""Quotas as an option of the server."""

import heapq
import math
import operator
from typing import Any

from prometheus_client import Counter

from lmcache_server.core.cache import Gone
from lmcache_server.core.index import Chunk
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.options.quotas.flags import quotas_gb
from lmcache_server.options.quotas.tenants import Tenants
from lmcache_server.service.option import Base, Option
from lmcache_server.telemetry.metrics import Metric

MAX_SHOWN = 10
"""Further tenants, which have less in L1, are left out of the report."""


class Server(Option):
    METRICS = (
        Metric(Counter, "lmcache_quota_evicted_chunks_total",
               "Evicted chunks of a cache_salt that was at its --quota-gb, to make room for its new ones."),
    )  # fmt: skip

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self._metrics, self._evicted = base.metrics, 0
        quotas = quotas_gb(base.config.of_options.get("quota_gb", ""))
        self._tenants = base.cache.order.tenant_policy = Tenants(quotas, base.cache.frame_bytes)
        base.cache.on_gone.append(self._gone)

    def _gone(self, _chunk: Chunk, why: Gone) -> None:
        self._evicted += why is Gone.QUOTA

    def tick(self, now_s: float) -> None:
        self._metrics.count("lmcache_quota_evicted_chunks_total", self._evicted)
        self._evicted = 0

    def report(self, now_s: float) -> dict[str, Any]:
        shown = heapq.nlargest(MAX_SHOWN, self._tenants, operator.attrgetter("frames"))
        tenants = [
            {
                "tenant": tenant.name.hex(),
                "bytes": tenant.frames * FRAME_BYTES,
                "quota_bytes": None
                if (quota := tenant.quota_frames) == math.inf
                else int(quota * FRAME_BYTES),
            }
            for tenant in shown
        ]
        return {"tenants": tenants, "tenants_left_out": len(self._tenants) - len(tenants)}
