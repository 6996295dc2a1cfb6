"""The hints of a request about its prompt: the `lmcache.*` keys of its kv_transfer_params."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lmcache_client.connector.log import logger

PREFIX = "lmcache."


class Hint(NamedTuple):
    """`what` says in words which values are valid. `fits` checks one."""

    what: str
    fits: Callable[[object], bool]


class Hints:
    """Reads the hints of an engine's requests. An unknown hint is ignored and never makes a request fail. One
    warning is logged for all of them."""

    def __init__(self, known: Mapping[str, Hint]) -> None:
        self._known = known
        self._has_warned = False

    def read(self, params: object) -> dict[str, Any]:
        """The hints in these kv_transfer_params, by key."""
        values = params if isinstance(params, Mapping) else {}
        given = {key: values[key] for key in values if isinstance(key, str) and key.startswith(PREFIX)}
        hints = {
            key: value for key, value in given.items() if key in self._known and self._known[key].fits(value)
        }
        if len(hints) < len(given) and not self._has_warned:
            self._has_warned = True
            key = next(key for key in given if key not in hints)
            known = ", ".join(f"{name!r} ({hint.what})" for name, hint in self._known.items()) or "left out"
            text = "lmcache: ignored %.60r: %.60r in the kv_transfer_params of a request: the hints are %s"
            logger.warning(f"{text} (later ones are ignored silently)", key, given[key], known)
        return hints
