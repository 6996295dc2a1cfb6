"""The tiers as an option of the server: what they do for lookups, for stores and for the report."""

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from lmcache_client.contract.messages import Lookup
from lmcache_server.core.cache import Hit, Layout, Reservation
from lmcache_server.core.index import Chunk
from lmcache_server.errors import StartError
from lmcache_server.options.tiers import urls
from lmcache_server.options.tiers.base import TierError, Usage
from lmcache_server.options.tiers.fetches import Fetches
from lmcache_server.options.tiers.record_format import read_key
from lmcache_server.options.tiers.spills import Spills
from lmcache_server.options.tiers.tier_states import Tiers, TierState
from lmcache_server.options.tiers.tier_worker import Rates, TierWorker
from lmcache_server.service.engines import Shard
from lmcache_server.service.option import Base, Option
from lmcache_server.service.requests_of_tests import is_test
from lmcache_server.telemetry.metrics import TRANSFER_S, Metric

logger = logging.getLogger(__name__)

OPEN_S = 5.0
_NUMBERS = ("1", "2")
_READ = ("read", "gone", "damaged", "failed")
_WRITTEN = ("written", "present", "full", "evicted", "dropped", "failed")


class Server(Option):
    """Tiers behind L1. `states` are those of a test; otherwise --tier says which there are."""

    METRICS = (
        Metric(Counter, "lmcache_tier_objects_total",
               "Objects between L1 and a tier (1 or 2, in the order of --tier), by outcome. read: read, gone "
               "since the tier was asked, damaged, failed. write: written, present already, full (no room), "
               "evicted from L1 before they were written, dropped (too many waited), failed.",
               {"tier": _NUMBERS, "direction": ("read", "write"), "outcome": (*_READ, *_WRITTEN[:-1])}),
        Metric(Counter, "lmcache_tier_bytes_total", "Payload bytes read from and written to a tier.",
               {"tier": _NUMBERS, "direction": ("read", "write")}),
        Metric(Counter, "lmcache_tier_stored_bytes_total",
               "What these records take in the tier: less than their payload if they are compressed. Counted "
               "once a second.",
               {"tier": _NUMBERS, "direction": ("read", "write")}),
        Metric(Counter, "lmcache_tier_fetches_total",
               "Lookups and prefetches that asked tiers: ended in time, answered before the end (late), or "
               "not worth the wait, because computing was faster (slow, counted besides).",
               {"outcome": ("ended", "late", "slow")}),
        Metric(Counter, "lmcache_tier_hit_tokens_total",
               "By how many tokens tiers lengthened hits in lmcache_tokens_total, while requests waited."),
        Metric(Counter, "lmcache_tier_saved_seconds_total",
               "Seconds that computing these tokens would have taken, at each engine's recent speed."),
        Metric(Histogram, "lmcache_tier_wait_seconds",
               "How long lookups waited for the tiers.", {}, {"buckets": TRANSFER_S}),
        Metric(Gauge, "lmcache_tier_failing", "1 while a tier is left alone because it failed.",
               {"tier": _NUMBERS}),
        Metric(Gauge, "lmcache_tier_waiting_objects", "Objects that wait to be written to a tier.",
               {"tier": _NUMBERS}),
        Metric(Gauge, "lmcache_tier_used_bytes",
               "What the records in a directory of this server alone take; 0 for other tiers.",
               {"tier": _NUMBERS}),
        Metric(Gauge, "lmcache_tier_capacity_bytes", "What they may take: size_gb.", {"tier": _NUMBERS}),
        Metric(Gauge, "lmcache_tier_records", "How many there are.", {"tier": _NUMBERS}),
        Metric(Gauge, "lmcache_tier_evicted_records", "How many were evicted since the start.",
               {"tier": _NUMBERS}),
        Metric(Gauge, "lmcache_tier_oldest_age_seconds",
               "Time since the last use of the record that is evicted next; 0 without records.",
               {"tier": _NUMBERS}),
        Metric(Counter, "lmcache_tier_helper_restarts_total",
               "How often the process in which a tier's client runs died or hung and was started again.",
               {"tier": _NUMBERS}),
    )  # fmt: skip

    def __init__(self, base: Base, states: Sequence[TierState] | None = None) -> None:
        super().__init__(base)
        self._metrics, self._system, metrics = base.metrics, base.system, base.metrics
        self._urls = [urls.parse(text) for text in base.config.of_options.get("tier", ())]
        self.tiers = states if states is not None else [_state(*each, base) for each in enumerate(self._urls)]
        tiers = Tiers(self.tiers, base)
        self.spills = Spills(tiers, base)
        self.fetches = Fetches(tiers, base, self.spills.made_room)
        for tier in self.tiers:
            is_open = functools.partial(getattr, tier.breaker, "is_open")
            metrics.gauge("lmcache_tier_failing", is_open, tier=tier.label)
            metrics.gauge("lmcache_tier_waiting_objects", tier.backlog.__len__, tier=tier.label)
            for name in Usage._fields:
                used = lambda tier=tier, name=name: getattr(tier.worker.usage, name, 0)  # noqa: E731
                metrics.gauge(f"lmcache_tier_{name}", used, tier=tier.label)

    async def open(self) -> None:
        """One on another machine may come later. Raises StartError if a local one cannot be used."""
        opening = [asyncio.wait_for(tier.worker.open(), OPEN_S) for tier in self.tiers]
        results = await asyncio.gather(*opening, return_exceptions=True)
        for tier, url, error in zip(self.tiers, self._urls, results, strict=True):
            if not isinstance(error, (TierError, asyncio.TimeoutError)):
                continue
            reason = f"--tier {tier.url} cannot be used: {str(error) or 'it does not answer'}"
            if not url.is_shared:
                raise StartError(reason) from error
            logger.warning("%(reason)s; it is tried again", {"reason": reason})
            tier.breaker.open(self._system.now_s())

    def tick(self, now_s: float) -> None:
        self.spills.tick()

    def may_fetch(self, layout: Layout) -> bool:
        return bool(self.fetches.usable(layout))

    def is_down(self, layout: Layout) -> bool:
        return self.fetches.is_down(layout)

    async def fetch(
        self, layout: Layout, shards: Mapping[int, Shard], message: Lookup, resume_tokens: int
    ) -> int:
        began_s = self._system.now_s()
        found = await self.fetches.fetch(layout, shards, message, resume_tokens)
        if message.request_id and not is_test(layout, message.request_id):  # nobody waits for a prefetch
            self._metrics.observe("lmcache_tier_wait_seconds", self._system.now_s() - began_s)
        return found

    def looked_up(
        self, session_id: int, layout: Layout, message: Lookup, hit: Hit, fetched: int, now_s: float
    ) -> None:
        if fetched and not is_test(layout, message.request_id):
            self._metrics.count("lmcache_tier_hit_tokens_total", fetched)
            saved_s = fetched / message.prefill_tokens_s if message.prefill_tokens_s else 0
            self._metrics.count("lmcache_tier_saved_seconds_total", saved_s)

    def stored(self, layout: Layout, rooms: Sequence[Reservation]) -> None:
        self.spills.stored(layout, rooms)

    def damaged(self, chunk: Chunk) -> None:
        self.spills.forget(chunk)

    def places(self) -> list[str]:
        return [tier.url for tier in self.tiers]

    async def clear(self, namespaces: Sequence[bytes | None]) -> list[str]:
        return await self.spills.clear(namespaces)

    def stop(self) -> None:
        self.fetches.close()
        self.spills.pause()

    async def close(self) -> None:
        """It may take longer than whoever stops the server waits."""
        await self.spills.flush()
        await self.spills.close()

    def report(self, now_s: float) -> dict[str, Any]:
        hits = int(self._metrics.value("lmcache_tier_hit_tokens_total"))
        return {"tiers": list(map(self._report, self.tiers)), "tier_hit_tokens": hits}

    def _report(self, tier: TierState) -> dict[str, Any]:
        count = functools.partial(self._metrics.value, "lmcache_tier_objects_total", tier=tier.label)
        reads, writes = (
            {outcome: int(count(direction=direction, outcome=outcome)) for outcome in outcomes}
            for direction, outcomes in (("read", _READ), ("write", _WRITTEN))
        )
        size = functools.partial(self._metrics.value, "lmcache_tier_bytes_total", tier=tier.label)
        return {
            "url": tier.url,
            "write": "cold" if tier.cold else "commit",
            "failing": tier.failure if tier.breaker.is_open else "",
            "waiting_objects": len(tier.backlog) + len(tier.writing),
            "read_bytes_per_s": int(tier.speed.bytes_per_s),
            "read_objects": reads,
            "read_bytes": int(size(direction="read")),
            "written_objects": writes,
            "written_bytes": int(size(direction="write")),
            "stored_bytes": tier.worker.compressor.stored_bytes["write"],
            **(usage._asdict() if (usage := tier.worker.usage) else dict.fromkeys(Usage._fields)),
        }


def _state(number: int, url: urls.TierUrl, base: Base) -> TierState:
    """A tier that is not open yet. Raises StartError if a package is missing, or if a key cannot be read."""
    urls.check_installed(url)
    options, compress = url.options, urls.compress(url)
    try:
        cipher = read_key(options.key_file) if options.key_file else None
    except ValueError as error:
        raise StartError(f"--tier {url.text}: cannot read key_file: {error}") from error
    open_tier = functools.partial(urls.open_tier, url, base.l1.area if url.shares_l1 else None)
    rates = Rates(options.read_mb_s, options.write_mb_s, options.write_tb_day)
    settings = asyncio.get_running_loop(), rates, cipher
    worker = TierWorker(f"tier-{number + 1}", open_tier, *settings, compress=compress)
    return TierState(number, url.text, options.write == urls.COLD, worker)
