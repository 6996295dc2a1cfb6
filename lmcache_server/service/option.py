"""Where an option of the server meets the base."""

from typing import Any, ClassVar, NamedTuple

from lmcache_client.contract.messages import Lookup, Release
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache, Layout
from lmcache_server.telemetry.metrics import Metric, Metrics


class Base(NamedTuple):
    """What an option is given of the server."""

    config: Config
    cache: Cache
    metrics: Metrics


class Option:
    """A part that can be taken away: see lmcache_server/options.

    The base calls these methods, which do nothing unless an option replaces them.
    """

    METRICS: ClassVar[tuple[Metric, ...]] = ()
    """Rows for the table of all metrics."""

    def __init__(self, base: Base) -> None:
        for row in self.METRICS:
            base.metrics.add(row)

    def looked_up(self, session_id: int, layout: Layout, message: Lookup, now_s: float) -> None:
        """A lookup is answered."""

    def released(self, session_id: int, layout: Layout, message: Release) -> None:
        """Leases are given up, or a request has ended."""

    def tick(self, now_s: float) -> None:
        """Called once a second, and once more at the end."""

    def report(self, now_s: float) -> dict[str, Any]:
        """Further fields of /status, as JSON values."""
        return {}
