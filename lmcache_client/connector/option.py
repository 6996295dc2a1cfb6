"""What the scheduler side calls in each option of the connector, and how it reads hints for them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lmcache_client.connector.log import logger
from lmcache_client.connector.request import Asking, Promised, Tracked
from lmcache_client.connector.settings import Settings
from lmcache_client.contract.geometry import GroupSpec
from lmcache_client.contract.messages import StoreObject
from lmcache_client.servers import Servers
from lmcache_client.transport import System

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

HINT_PREFIX = "lmcache."


class Hint(NamedTuple):
    """`what` says in words which values are valid. `fits` checks one. `action` is vLLM's typed hint that
    means the same. Its payload has the value as `field`; without a `field`, the action itself means true.
    Hints that share an action have a field each; without that of the first, the others count for nothing."""

    what: str
    fits: Callable[[object], bool]
    action: str = ""
    field: str = ""


class Engine(NamedTuple):
    """What an option knows of its engine. `group_ids` are vLLM's indexes of the groups. `loads` is False if
    the engine only stores."""

    settings: Settings
    groups: Sequence[GroupSpec]
    group_ids: Sequence[int]
    client: Servers
    loads: bool
    system: System


class Option:
    """A part that can be taken away: see lmcache_client/options.

    The base calls these methods, which do nothing unless an option replaces them. All return at once. Times
    are in seconds of the engine's clock.
    """

    HINTS: ClassVar[Mapping[str, Hint]] = {}
    """By key, the hints of requests that it reads."""

    def __init__(self, engine: Engine, wanted: Any) -> None:
        """`wanted` is what the method `wanted` returned."""

    @classmethod
    def wanted(cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Any:
        """What it needs of vLLM's configuration. If that is false or empty, the engine runs without it."""
        return True

    def bind(self, pool: "BlockPool") -> None:
        """vLLM's scheduler has its block pool."""

    def reset(self) -> None:
        """vLLM has reset its cache: nothing that was computed before may be used. Requests begin anew."""

    # -- a request --------------------------------------------------------------------------------

    def began(self, tracked: Tracked, hints: Mapping[str, Any]) -> None:
        """A request has arrived, with these hints."""

    def answered(self, tracked: Tracked, asked: Asking, now_s: float) -> None:
        """A lookup has ended, with an answer or an error."""

    def pauses(self, tracked: Tracked) -> bool:
        """Whether it is too early to ask the server again about a request. If one option says so, no other is
        asked."""
        return False

    def goes_on(self, tracked: Tracked, state: Promised | None, computed: int, limit: int) -> bool:
        """Whether the request waits for more than this answer, and asks again later."""
        return False

    def loading(self, tracked: Tracked, since_s: float, now_s: float) -> None:
        """A load begins. It was promised at `since_s`."""

    def loaded(self, tracked: Tracked, tokens: int, outcome: str, since_s: float, now_s: float) -> None:
        """A load has "ended" or "failed"."""

    def ended(self, request: "Request", tracked: Tracked | None) -> Mapping[str, Any]:
        """A request has ended. Returns what to tell an engine that goes on with it. `tracked` is None without
        a server."""
        return {}

    # -- a step -----------------------------------------------------------------------------------

    def storing(self, requests: Sequence[Tracked], objects: Sequence[StoreObject]) -> None:
        """A store begins. `requests` has the request of each object."""

    def settled(self, requests: Sequence[Tracked], seconds: float) -> None:
        """All workers have settled a load or a store, `seconds` after it began. `requests` has the request of
        each object of a store, unless vLLM has reset its cache since."""

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """The events to publish after this step."""
        return ()

    def has_work(self) -> bool:
        """Whether an idle engine must go on stepping."""
        return False

    def has_paused(self) -> bool:
        """Whether a request has paused since the last call. If so, an idle engine sleeps briefly."""
        return False


Options = Sequence[Option]


def replaced(options: Options, method: Callable[..., Any]) -> list[Callable[..., Any]]:
    """This method of each option that has its own. To call the others would only take time."""
    name = method.__name__
    return [getattr(option, name) for option in options if getattr(type(option), name) is not method]


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
        own = [
            each for each in params.items() if isinstance(each[0], str) and each[0].startswith(HINT_PREFIX)
        ]
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
