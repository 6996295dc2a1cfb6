"""Hints about a prompt: whether it comes back, and whether to load it."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lmcache_client.connector.hints import PREFIX, Hint
from lmcache_client.connector.option import Option
from lmcache_client.connector.request import Tracked

ONCE, LOAD = f"{PREFIX}once", f"{PREFIX}load"
_YES_OR_NO = Hint("true or false", lambda value: isinstance(value, bool))


class PromptHints(Option):
    """With `once`, the prompt will not come back. If `load` is false, nothing is loaded for it."""

    HINTS: ClassVar[Mapping[str, Hint]] = {ONCE: _YES_OR_NO, LOAD: _YES_OR_NO}

    def began(self, tracked: Tracked, hints: Mapping[str, Any]) -> None:
        tracked.once = hints.get(ONCE, False)
        tracked.no_load = not hints.get(LOAD, True)


OPTION = PromptHints
