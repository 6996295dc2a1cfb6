"""Where an option of the server meets the base."""

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from lmcache_client.contract.messages import Lookup, Message, Release
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache, Hit, Layout, Reservation
from lmcache_server.core.index import Chunk
from lmcache_server.l1.memory import L1Memory
from lmcache_server.service.engines import Session, Shard
from lmcache_server.service.sessions import Sessions
from lmcache_server.service.system import System
from lmcache_server.telemetry.failures import Failures
from lmcache_server.telemetry.metrics import Metric, Metrics

logger = logging.getLogger(__name__)

Reply = Message | Coroutine[Any, Any, Message]
Handler = Callable[[Session, Any, int], Reply]
"""Called with the session, the message and the bytes of its frame. One that must wait is a coroutine."""


class Base(NamedTuple):
    """What each part of a server may use. `options` has all options once the server is complete."""

    config: Config
    cache: Cache
    l1: L1Memory
    sessions: Sessions
    metrics: Metrics
    failures: Failures
    system: System
    options: "list[Option]"

    def forget_damaged(self, chunk: Chunk, reason: str, engine_id: str = "") -> None:
        """The bytes of a chunk in L1 have changed: nobody gets them any more, also not from a copy."""
        for option in self.options:
            option.damaged(chunk)
        self.cache.forget(chunk)
        self.metrics.count("lmcache_verify_failures_total")
        self.failures.add(self.system.now_s(), "page damaged", engine_id, reason)
        values = {"chunk": chunk.key.hex()[:16], "reason": reason, "engine": engine_id}
        logger.warning("chunk %(chunk)s is damaged and forgotten: %(reason)s", values)


class Option:
    """A part that can be taken away: see lmcache_server/options.

    The base calls these methods, which do nothing unless an option replaces them. All that are no coroutines
    must return at once.
    """

    METRICS: ClassVar[tuple[Metric, ...]] = ()
    """Rows for the table of all metrics."""

    def __init__(self, base: Base) -> None:
        for row in self.METRICS:
            base.metrics.add(row)

    async def open(self) -> None:
        """Called before the first client. Raises StartError."""

    def restore(self) -> None:
        """Brings back what an earlier server left. All options are open. Raises StartError."""

    def restored(self, saved: bytes) -> None:
        """The cache has what an earlier server left. `saved` is what `saved()` returned there; it may be
        empty or damaged."""

    def saved(self) -> bytes:
        """What the next server should be told. The cache does not change any more."""
        return b""

    def save(self) -> None:
        """Called before any `close`, which may take longer than whoever stops the server waits."""

    def tick(self, now_s: float) -> None:
        """Called once a second."""

    def report(self, now_s: float) -> dict[str, Any]:
        """Further fields of /status, as JSON values."""
        return {}

    def handlers(self) -> Mapping[type, Handler]:
        """By type, what answers messages of its own."""
        return {}

    # -- lookups ----------------------------------------------------------------------------------

    def looked_up(
        self, session_id: int, layout: Layout, message: Lookup, hit: Hit, fetched: int, now_s: float
    ) -> None:
        """A lookup is answered with this hit. `fetched` tokens of it are there because of `fetch`."""

    def missed(self, layout: Layout, message: Lookup, hit: Hit, in_tiers: int) -> dict[str, int]:
        """Why a lookup did not find the tokens behind its hit: their number by reason, of the REASONS in
        telemetry/metrics.py. Empty if it does not know. `fetch` promised the resume point `in_tiers`."""
        return {}

    def ends(
        self, layout: Layout, hit: Hit, ready: Sequence[int], limit: int
    ) -> Iterable[tuple[int, int, tuple[int, ...]]]:
        """As `ends` of Inspected. `ready` has, per chunk, the bits of its ready objects."""
        return ()

    def released(self, session_id: int, layout: Layout, message: Release) -> None:
        """Leases are given up, or a request has ended."""

    def may_fetch(self, layout: Layout) -> bool:
        """Whether `fetch` could bring something for an engine with this layout."""
        return False

    def is_down(self, layout: Layout) -> bool:
        """Whether it may have what L1 has evicted, and is left alone because it fails."""
        return False

    async def fetch(
        self, layout: Layout, shards: Mapping[int, Shard], message: Lookup, resume_tokens: int
    ) -> int:
        """Brings into L1 what a larger resume point than `resume_tokens` needs, within the time that a lookup
        may take. Returns the resume point that it promised, whether all of it came or not."""
        return 0

    # -- chunks -----------------------------------------------------------------------------------

    def stored(self, layout: Layout, rooms: Sequence[Reservation]) -> None:
        """An engine has stored these objects."""

    def damaged(self, chunk: Chunk) -> None:
        """The bytes of this chunk in L1 were wrong. Copies of it may have them."""

    def places(self) -> list[str]:
        """What `clear` clears, as users know it."""
        return []

    async def clear(self, namespaces: Sequence[bytes | None]) -> list[str]:
        """Forgets all of these namespaces, None for all; returns what failed, with reasons."""
        return []

    # -- the end ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Lookups are not answered any more. Copies may still run."""

    async def close(self) -> None:
        """The cache does not change any more, and the sockets are closed."""


Make = Callable[[Base], Option]
