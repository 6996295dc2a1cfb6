"""Bugs of tiers to put in on purpose: see bugs.py."""

from typing import Any

from lmcache_server.core.cache import Cache
from lmcache_server.options.tiers import fetches
from lmcache_server.options.tiers.base import TierError
from lmcache_server.options.tiers.fetches import Fetches
from lmcache_server.options.tiers.record_format import Record
from lmcache_server.options.tiers.tier_states import Tiers
from lmcache_server.options.tiers.tier_worker import TierWorker
from lmcache_server.service.option import Base
from lmcache_server.transfer.digest import digest


def _unchecked(_: Any) -> Any:
    def trusting(self: Record, num_bytes: int) -> bytes:
        self._rest[:] = self._end[: len(self._rest)]
        return digest(self._addresses)

    return trusting


def _leaks(begin: Any) -> Any:
    def careless(self: Fetches, tiers: Tiers, base: Base, *rest: Any) -> None:
        begin(self, tiers, base._replace(cache=_NeverAborts(base.cache)), *rest)

    return careless


class _NeverAborts:
    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def abort(self, reservation: Any) -> None:
        pass


def _impatient(read: Any) -> Any:
    def impatient(self: TierWorker, *arguments: Any) -> Any:
        future: Any = read(self, *arguments)
        server = self._reads.server  # type: ignore[attr-defined]
        server.run_soon(future.set_exception, TierError("it hangs"), delay_s=1.0)
        return future

    return impatient


OF_TIERS: dict[str, Any] = {
    "records_not_checked": (31, (Record, "open", _unchecked)),
    "failed_fetches_keep_their_frames": (21, (Fetches, "__init__", _leaks)),
    "calls_that_hang_are_given_up": (133, (TierWorker, "read", _impatient)),
    "written_while_evicted": (
        13,
        (
            Cache,
            "open_spill",
            lambda _: lambda self, chunk, bit: chunk.get(bit) if chunk in self._index else None,
        ),
    ),
    "lookups_wait_for_whole_fetches": (23, (fetches, "fetch_patience_s", lambda _: lambda _tokens: 60.0)),
}
