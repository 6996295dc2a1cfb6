"""The tiers behind L1, and what is known of each."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache_server.core.index import Chunk
from lmcache_server.core.pool import FRAME_BYTES, Runs
from lmcache_server.options.tiers.base import TierError
from lmcache_server.options.tiers.breaker import PRESENT, Breaker
from lmcache_server.options.tiers.fetch_choice import Speed
from lmcache_server.options.tiers.flags import MAX_TIERS
from lmcache_server.options.tiers.record_name import record_name
from lmcache_server.options.tiers.tier_worker import STUCK_S, TierWorker
from lmcache_server.service.option import Base
from lmcache_server.transfer.plan import payload

logger = logging.getLogger(__name__)

READS_AT_ONCE = 8


@dataclass(eq=False)
class TierState:
    """One tier. `number` is its place in their order. `cold` says that only cold objects are written."""

    number: int
    url: str
    cold: bool
    worker: TierWorker
    breaker: Breaker = field(default_factory=Breaker)
    speed: Speed = field(default_factory=Speed)
    backlog: deque[tuple[Chunk, int]] = field(default_factory=deque)
    """Objects that wait to be written. They may be evicted meanwhile."""
    writing: list[str] = field(default_factory=list)
    """Names of the records that are being written."""
    reads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READS_AT_ONCE))
    """Reads in flight. More would let the questions of other lookups wait."""
    damaged: set[str] = field(default_factory=set)
    """Names of damaged records that are still to be removed. This server reads none of them."""
    removing: set[str] = field(default_factory=set)
    """Those that are being removed."""
    read_bytes: int = 0
    full_until_s: float = 0.0
    """It had no room for a record: until then it is not offered what is cold."""
    is_probed: bool = False
    failure: str = ""

    @property
    def is_busy(self) -> bool:
        return bool(self.backlog or self.writing or self.removing)

    def may_read(self, name: str) -> bool:
        return name not in self.damaged and name not in self.removing

    def mark(self, bit: int) -> int:
        return self.marks(1 << bit)

    def marks(self, bits: int) -> int:
        """The marks of these bits. Each bit becomes a digit that has one bit for each tier."""
        return int(f"{bits:b}", 1 << MAX_TIERS) << self.number

    @property
    def label(self) -> str:
        return str(self.number + 1)


class Tiers:
    """All tiers, in the order in which they are asked. Each fails on its own."""

    def __init__(self, tiers: Sequence[TierState], base: Base) -> None:
        self.all = tiers
        self._l1, self._system = base.l1, base.system
        self._metrics, self._failures = base.metrics, base.failures

    def tick(self) -> None:
        """Once a second: leave alone a tier whose calls all hang, and try one that was left alone."""
        now_s = self._system.now_s()
        for tier in self.all:
            self._count_up("lmcache_tier_helper_restarts_total", tier.worker.restarts, tier=tier.label)
            for way, stored in tier.worker.compressor.stored_bytes.items():
                self._count_up("lmcache_tier_stored_bytes_total", stored, tier=tier.label, direction=way)
            if tier.worker.is_stuck():
                if not tier.breaker.is_open:
                    self.failed(tier, TierError("all its calls hang"), hangs=True)
                tier.worker.fail_stuck()
            elif not tier.is_probed and tier.breaker.tries(now_s):
                tier.is_probed = True
                self._system.spawn(self._probe(tier))

    def _count_up(self, metric: str, total: int, **labels: str) -> None:
        self._metrics.count(metric, total - self._metrics.value(metric, **labels), **labels)

    async def _probe(self, tier: TierState) -> None:
        call = tier.worker.present([record_name(bytes(32), bytes(32), 0)])
        # One that hangs holds a thread. When all are held, nothing is tried until one returns.
        await self._system.wait([call], STUCK_S)
        tier.is_probed = False
        if not call.done():
            self.failed(tier, TierError(f"no answer within {STUCK_S:g} s"))
        elif (error := call.exception()) is not None:
            self.failed(tier, error)
        else:
            tier.breaker.answers()
            self._works_again(tier)

    def payload(self, runs: Runs, num_bytes: int) -> list[tuple[int, int]]:
        """The addresses and sizes of an object's bytes. Raises CopyError if L1 cannot be touched."""
        self._l1.check()
        return payload(runs, num_bytes, self._l1.base_address, FRAME_BYTES)

    def failed(self, tier: TierState, error: BaseException, call: str = PRESENT, hangs: bool = False) -> None:
        """A call of this kind has failed, or, if the tier `hangs`, none will end."""
        now_s, was_known = self._system.now_s(), tier.breaker.is_open or call in tier.breaker.trial
        tier.breaker.failed(now_s, call)
        if hangs:
            tier.breaker.open(now_s)
        tier.failure = str(error)
        self._failures.add(now_s, "tier failed", "", f"{tier.url}: {error}")
        if tier.breaker.is_open and not was_known:
            values = {"tier": tier.url, "reason": tier.failure}
            logger.warning("tier %(tier)s is left alone for now: %(reason)s", values)

    def succeeded(self, tier: TierState, call: str) -> None:
        had_failed = call in tier.breaker.trial
        tier.breaker.succeeded(call)
        if had_failed:
            self._works_again(tier)

    def _works_again(self, tier: TierState) -> None:
        if not tier.breaker.is_open and not tier.breaker.trial:
            logger.info("tier %(tier)s works again", {"tier": tier.url})

    def count(self, tier: TierState, direction: str, outcome: str, num_bytes: int) -> None:
        labels = {"tier": tier.label, "direction": direction}
        self._metrics.count("lmcache_tier_objects_total", 1, **labels, outcome=outcome)
        if outcome in ("read", "written"):
            self._metrics.count("lmcache_tier_bytes_total", num_bytes, **labels)
