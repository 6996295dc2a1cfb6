"""The hint `lmcache.retain_s`: others are evicted before this request's chunks, for so many seconds."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache_client.connector.option import Engine, Option
from lmcache_client.connector.request import Tracked
from lmcache_client.connector.request_keys import PREFIX, Hint
from lmcache_client.contract.control import MAX_RETAIN_S, Retain

if TYPE_CHECKING:
    from vllm.v1.request import Request

RETAIN = f"{PREFIX}retain_s"
TIMEOUT_S = 10.0


class Retention(Option):
    """The server is told when the request ends: what it brought is stored by then, or is about to be."""

    HINTS: ClassVar[Mapping[str, Hint]] = {
        RETAIN: Hint(
            f"seconds, from 1 to {MAX_RETAIN_S}",
            lambda value: type(value) is int and 1 <= value <= MAX_RETAIN_S,
            action="retain",
            field="seconds",
        )
    }

    def __init__(self, engine: Engine, wanted: Any) -> None:
        self._client = engine.client
        self._seconds: dict[str, int] = {}

    def began(self, tracked: Tracked, hints: Mapping[str, Any]) -> None:
        if RETAIN in hints:
            self._seconds[tracked.request.request_id] = hints[RETAIN]

    def ended(self, request: "Request", tracked: Tracked | None) -> Mapping[str, Any]:
        seconds = self._seconds.pop(request.request_id, 0)
        if seconds and tracked is not None and tracked.keys:
            for client in self._client.clients:
                client.channel.submit(Retain(tuple(tracked.keys), seconds), TIMEOUT_S)
        return {}


OPTION = Retention
