"""Bugs of tiers to put in on purpose: see bugs.py."""

from typing import Any

from lmcache_server.core.cache import Cache
from lmcache_server.core.index import Chunk
from lmcache_server.options.tiers.base import TierError
from lmcache_server.options.tiers.fetches import Fetches
from lmcache_server.options.tiers.record import Record
from lmcache_server.options.tiers.tier_states import Tiers
from lmcache_server.options.tiers.worker import TierWorker


def _records_not_checked() -> None:
    def trusting(self: Record, num_bytes: int) -> None:
        self._rest[:] = self._end[: len(self._rest)]

    Record.open = trusting  # type: ignore[method-assign]


def _failed_fetches_keep_their_frames() -> None:
    begin = Fetches.__init__

    def careless(self: Fetches, tiers: Tiers, cache: Cache, *rest: Any) -> None:
        begin(self, tiers, _NeverAborts(cache), *rest)  # type: ignore[arg-type]

    Fetches.__init__ = careless  # type: ignore[method-assign]


class _NeverAborts:
    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def abort(self, reservation: Any) -> None:
        pass


def _calls_that_hang_are_given_up() -> None:
    read = TierWorker.read

    def impatient(self: TierWorker, *arguments: Any) -> Any:
        future: Any = read(self, *arguments)
        server = self._reads.server  # type: ignore[attr-defined]
        server.run_soon(future.set_exception, TierError("it hangs"), delay_s=1.0)
        return future

    TierWorker.read = impatient  # type: ignore[method-assign]


def _written_while_evicted() -> None:
    def careless(self: Cache, chunk: Chunk, bit: int) -> Any:
        return chunk.get(bit) if chunk in self._index else None

    Cache.open_spill = careless  # type: ignore[method-assign]


def _lookups_wait_for_whole_fetches() -> None:
    import lmcache_server.options.tiers.fetches

    lmcache_server.options.tiers.fetches.fetch_patience_s = lambda num_tokens: 60.0


OF_TIERS = (
    _records_not_checked,
    _failed_fetches_keep_their_frames,
    _calls_that_hang_are_given_up,
    _written_while_evicted,
    _lookups_wait_for_whole_fetches,
)
