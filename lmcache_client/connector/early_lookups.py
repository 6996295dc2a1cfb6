"""Early lookups leave when their requests arrive, so that vLLM's scheduler finds the answers when it asks.

vLLM asks about its waiting requests one after the other. Without early lookups, requests that arrive together
would wait for as many round trips.
"""

from collections.abc import Iterable, Sequence

from lmcache_client.connector.request import Asking, Tracked
from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_client.contract.messages import MAX_EARLY_CHUNKS, Found

EARLY_LOOKUPS = 64
"""At most so many wait for vLLM's question: each holds a lease."""
FRESH_S = 1.0
"""An older early answer is not used, nor is an older miss: the server may have more by now."""
MAX_RECENT = 4096


class EarlyLookups:
    """Which requests to look up early, and which of these lookups were of use."""

    def __init__(self) -> None:
        self._unasked: set[str] = set()
        """The requests with an early lookup that vLLM has not asked about yet."""
        self._is_backed_up = False
        """vLLM did not get to all of them in its last step. Further ones would have to wait, too."""
        self._recent: dict[bytes, None] = {}
        """The last keys of the requests that ended last. The engine itself probably holds these chunks."""
        self._accepted: list[tuple[str, int]] = []

    def wants(self, request_id: str, keys: Sequence[bytes]) -> bool:
        """Whether to look up a request that has just arrived. `keys` are of all chunks that it could load."""
        if not 0 < len(keys) <= MAX_EARLY_CHUNKS or keys[-1] in self._recent:
            return False
        if self._is_backed_up or len(self._unasked) >= EARLY_LOOKUPS:
            return False
        self._unasked.add(request_id)
        return True

    @staticmethod
    def repeats(tracked: Tracked, limit: int) -> bool:
        """Whether this request asks again and again. Such lookups are sent as early ones, because the server
        counts only the answer that is accepted."""
        return tracked.waits and limit <= MAX_EARLY_CHUNKS * tracked.chunk_size

    def asked(self, request_id: str) -> bool:
        """vLLM asks about a request, or it has ended. Returns whether its early lookup was still waiting."""
        is_first = request_id in self._unasked
        self._unasked.discard(request_id)
        return is_first

    def accept(self, name: str, computed: int) -> None:
        """The answer is used, and the engine itself holds `computed` tokens: the server counts it so."""
        self._accepted.append((name, computed))

    def ended(self, keys: Iterable[bytes]) -> None:
        """A request has ended that has computed or loaded these chunks, the last ones of its chain."""
        self._recent.update(dict.fromkeys(keys))
        while len(self._recent) > MAX_RECENT:
            del self._recent[next(iter(self._recent))]

    def end_step(self) -> list[tuple[str, int]]:
        """vLLM has asked about all requests that have room in this step. Returns what was accepted in it."""
        accepted, self._accepted = self._accepted, []
        self._is_backed_up = bool(self._unasked)
        return accepted

    def reset(self) -> None:
        """Forgets all requests and chunks: vLLM has reset its cache."""
        self._unasked.clear()
        self._recent.clear()


def is_stale(tracked: Tracked, asked: Asking, limit: int, now_s: float) -> bool:
    """Whether an early lookup that is still under way asks for too little, or is too old. A request that
    waits asks early, too, and as often as it must."""
    return asked.limit != limit or (not tracked.waits and now_s - asked.since_s > FRESH_S)


def is_enough(
    groups: Sequence[GroupSpec], tracked: Tracked, found: Found, computed: int, asked: Asking
) -> bool:
    """Whether another lookup, behind the engine's own `computed` tokens, would find no later resume point
    than this early one. The server may lack chunks among those that the engine has."""
    end = max(found.resume_tokens, computed)
    full = [index for index, group in enumerate(groups) if group.kind == FULL]
    is_next_held = all(tracked.holds(index, end // tracked.chunk_size) for index in full)
    return computed <= asked.computed or end >= asked.limit or not is_next_held
