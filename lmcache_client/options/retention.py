"""Hints about a request that pauses: for how long others are evicted before its chunks, and when these are
brought back from the tiers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache_client.connector.option import HINT_PREFIX, Engine, Hint, Option
from lmcache_client.connector.request import Tracked
from lmcache_client.contract.control import MAX_PAUSE_S, MAX_PRIORITY, Retain

if TYPE_CHECKING:
    from vllm.v1.request import Request

RETAIN, PRIORITY, PREFETCH = f"{HINT_PREFIX}retain_s", f"{HINT_PREFIX}priority", f"{HINT_PREFIX}prefetch_s"
TIMEOUT_S = 10.0


def _number(what: str, least: int, most: int, action: str, field: str) -> Hint:
    fits = lambda value: type(value) is int and least <= value <= most  # noqa: E731
    return Hint(f"{what} from {least} to {most}", fits, action, field)


class Retention(Option):
    """The server is told when the request ends: what it brought is stored by then, or is about to be."""

    HINTS: ClassVar[Mapping[str, Hint]] = {
        RETAIN: _number("seconds", 1, MAX_PAUSE_S, "retain", "seconds"),
        PRIORITY: _number("a number", 0, MAX_PRIORITY, "retain", "priority"),
        PREFETCH: _number("seconds", 1, MAX_PAUSE_S, "prefetch", "after_seconds"),
    }

    def __init__(self, engine: Engine, wanted: Any) -> None:
        self._client = engine.client
        self._asked: dict[str, tuple[int, int, int]] = {}

    def began(self, tracked: Tracked, hints: Mapping[str, Any]) -> None:
        if RETAIN in hints or PREFETCH in hints:
            seconds, priority, prefetch_s = (hints.get(key, 0) for key in (RETAIN, PRIORITY, PREFETCH))
            self._asked[tracked.request.request_id] = seconds, priority, prefetch_s

    def ended(self, request: "Request", tracked: Tracked | None) -> Mapping[str, Any]:
        asked = self._asked.pop(request.request_id, None)
        if asked and tracked is not None and tracked.keys:
            message = Retain(tuple(tracked.keys), *asked, tracked.tenant)
            for channel in self._client.channels:
                channel.submit(message, TIMEOUT_S)
        return {}


OPTION = Retention
