"""The hints of a request about its prompt: the `lmcache.*` keys of its kv_transfer_params."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lmcache_client.connector.log import logger

PREFIX = "lmcache."
ONCE, WAIT_TOKENS, LOAD = f"{PREFIX}once", f"{PREFIX}wait_tokens", f"{PREFIX}load"
MAX_WAIT_TOKENS = 2**31
_IGNORED = (
    "lmcache: ignored %.60r: %.60r in the kv_transfer_params of a request: the hints are %r and %r, true or "
    "false, and %r, a number of tokens (later ones are ignored silently)"
)


class Hint(NamedTuple):
    """The prompt will not come back if it is there `once`. Another engine is storing its first `wait_tokens`
    tokens. Nothing is loaded for it unless `load`."""

    once: bool = False
    wait_tokens: int = 0
    load: bool = True


class Hints:
    """Reads the hints of an engine's requests. An unknown hint is ignored and never makes a request fail. One
    warning is logged for all of them."""

    def __init__(self) -> None:
        self._has_warned = False

    def read(self, params: object) -> Hint:
        """The hints in these kv_transfer_params."""
        values = params if isinstance(params, Mapping) else {}
        for key, value in values.items():
            if isinstance(key, str) and key.startswith(PREFIX) and not _is_hint(key, value):
                self._warn(key, value)
        wait = values.get(WAIT_TOKENS)
        wait_tokens: Any = wait if _is_hint(WAIT_TOKENS, wait) else 0
        return Hint(values.get(ONCE) is True, wait_tokens, values.get(LOAD) is not False)

    def _warn(self, key: str, value: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(_IGNORED, key, value, ONCE, LOAD, WAIT_TOKENS)


def _is_hint(key: str, value: object) -> bool:
    if key == WAIT_TOKENS:
        # True is an int, too.
        return type(value) is int and 0 <= value <= MAX_WAIT_TOKENS
    return key in (ONCE, LOAD) and isinstance(value, bool)
