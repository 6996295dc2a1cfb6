"""What the scheduler side calls in each option of the connector."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lmcache_client.connector.request import Asking, Promised, Tracked
from lmcache_client.connector.request_keys import Hint
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
