"""The hints of a request: the `lmcache.*` keys of its kv_transfer_params, and vLLM's typed hints."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_client.connector.log import logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

PREFIX = "lmcache."


class Hint(NamedTuple):
    """`what` says in words which values are valid. `fits` checks one. `action` is vLLM's typed hint that
    means the same. Its payload has the value as `field`; without a `field`, the action itself means true.
    Hints that share an action have a field each; without that of the first, the others count for nothing."""

    what: str
    fits: Callable[[object], bool]
    action: str = ""
    field: str = ""


class Hints:
    """Reads the hints of an engine's requests. An unknown hint is ignored and never makes a request fail. One
    warning is logged for all of them."""

    def __init__(self, known: Mapping[str, Hint]) -> None:
        self._known = known
        self._has_warned = False

    def read(self, request: "Request") -> tuple[dict[str, Any], int]:
        """The hints of this request, by key, and how many others it has."""
        if not request.kv_transfer_params and not request.kv_hints:
            return {}, 0
        hints, ignored = dict[str, Any](), list[tuple[str, object]]()
        params = request.kv_transfer_params if isinstance(request.kv_transfer_params, Mapping) else {}
        own = [each for each in params.items() if isinstance(each[0], str) and each[0].startswith(PREFIX)]
        for key, value in (*self._typed(request), *own):
            if key in self._known and self._known[key].fits(value):
                hints[key] = value
            else:
                ignored.append((key, value))
        if ignored and not self._has_warned:
            self._has_warned = True
            known = ", ".join(f"{name!r} ({hint.what})" for name, hint in self._known.items()) or "left out"
            text = "lmcache: ignored the hint %.60r: %.60r of a request: in its kv_transfer_params may be %s"
            logger.warning(f"{text} (later ones are ignored silently)", *ignored[0], known)
        return hints, len(ignored)

    def _typed(self, request: "Request") -> Iterator[tuple[str, object]]:
        for action in request.kv_hints.actions if request.kv_hints else ():
            said = [
                (key, action.payload.get(hint.field) if hint.field else True)
                for key, hint in self._known.items()
                if hint.action and hint.action == action.action_type
            ]
            if not said or said[0][1] is None:
                said = [(f"action {action.action_type}", action.payload)]
            yield from (each for each in said if each[1] is not None)
