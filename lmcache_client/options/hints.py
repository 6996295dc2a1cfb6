"""Hints about a request: whether its prompt comes back, whether to load it, and how much to store of it."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lmcache_client.connector.option import HINT_PREFIX, Engine, Hint, Option
from lmcache_client.connector.request import Tracked

ONCE, LOAD, STORE_TOKENS = f"{HINT_PREFIX}once", f"{HINT_PREFIX}load", f"{HINT_PREFIX}max_offload_tokens"
_YES_OR_NO = Hint("true or false", lambda value: isinstance(value, bool))
_TOKENS = Hint("a number of tokens", lambda value: type(value) is int and value >= 0)


class RequestHints(Option):
    """With `once`, the prompt will not come back. If `load` is false, nothing is loaded for it. At most the
    first `max_offload_tokens` tokens are stored, and none of the answer without `save_decode_cache`."""

    HINTS: ClassVar[Mapping[str, Hint]] = {
        ONCE: _YES_OR_NO._replace(action="demote"),
        LOAD: _YES_OR_NO,
        STORE_TOKENS: _TOKENS._replace(action="no_store", field="after_tokens"),
    }

    def __init__(self, engine: Engine, wanted: Any) -> None:
        self._store_answers = engine.settings.save_decode_cache

    def began(self, tracked: Tracked, hints: Mapping[str, Any]) -> None:
        tracked.once = hints.get(ONCE, False)
        tracked.no_load = not hints.get(LOAD, True)
        tracked.store_tokens = hints.get(STORE_TOKENS, tracked.store_tokens)
        tracked.store_answer = self._store_answers


OPTION = RequestHints
