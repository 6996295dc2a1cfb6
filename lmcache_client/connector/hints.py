"""The hints of a request about its prompt: the `lmcache.*` keys of its kv_transfer_params."""

from collections.abc import Mapping

from lmcache_client.connector.log import logger

PREFIX = "lmcache."
ONCE = f"{PREFIX}once"


class Hints:
    """Reads the hints of an engine's requests. An unknown hint is ignored and never makes a request fail. One
    warning is logged for all of them."""

    def __init__(self) -> None:
        self._has_warned = False

    def once(self, params: object) -> bool:
        """Whether the prompt with these kv_transfer_params will not come back."""
        hints = params if isinstance(params, Mapping) else {}
        for key, value in hints.items():
            is_ours = isinstance(key, str) and key.startswith(PREFIX)
            if is_ours and not (key == ONCE and isinstance(value, bool)):
                self._warn(key, value)
        return hints.get(ONCE) is True

    def _warn(self, key: str, value: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "lmcache: ignored %.60r: %.60r in the kv_transfer_params of a request: the one hint is %r, "
                "which is true or false (later ones are ignored silently)",
                key,
                value,
                ONCE,
            )
