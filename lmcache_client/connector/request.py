"""One request of the engine, as the scheduler side sees it: its keys, its lookup or what that promised."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from lmcache_client.channel import Pending
from lmcache_client.contract.keys import ROOT_KEY, chunk_keys
from lmcache_client.contract.messages import MAX_NAME, Found

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Asking(NamedTuple):
    """A lookup under way: of what is restorable beyond the `computed` tokens that the engine held, up to the
    resume point `limit`."""

    lookup: Pending
    computed: int
    limit: int
    since_s: float


class Promised(NamedTuple):
    """What a lookup found, until it has been used or released; the rest is as it was asked."""

    found: Found
    computed: int
    since_s: float


@dataclass
class Tracked:
    """From the request's arrival to its end. What depends on the server is of one registration."""

    request: "Request"
    generation: int = 0
    chunk_size: int = 0
    keys: list[bytes] = field(default_factory=list)
    mm_index: int = 0
    state: Asking | Promised | None = None
    """None: the server has not been asked, did not answer, or its promise is of no use any more."""
    held: tuple[bytes, ...] = ()
    next_chunk: int = 0
    """Chunks before this one have been offered for storing."""
    loading: int = 0
    """Tokens of the load under way."""
    no_load: bool = False
    """A load failed: vLLM asks again, and the same offer would fail for ever."""

    def __post_init__(self) -> None:
        # An id that a user chose may have any length, and be no text: what carries it must not fail for that.
        self.name = self.request.request_id[:MAX_NAME].encode("utf-8", "replace").decode()
        """The request's id as the server hears it, for its debug log."""

    def start_anew(self, generation: int, chunk_size: int) -> None:
        """Forget what a server said before its present registration."""
        self.generation = generation
        self.state = None
        self.held = ()
        if self.chunk_size != chunk_size:
            self.chunk_size = chunk_size
            self.keys, self.mm_index, self.next_chunk = [], 0, 0

    def keys_of(self, chunks: int) -> Sequence[bytes]:
        """The keys of the first `chunks` chunks, computed once each."""
        self.keys.extend(chunk_keys(self._unkeyed(chunks), self.keys[-1] if self.keys else ROOT_KEY))
        return self.keys[:chunks]

    def _unkeyed(self, chunks: int) -> Iterator[tuple[Sequence[int], object]]:
        """Tokens and vLLM's extra keys of each of the first `chunks` chunks that has no key yet."""
        request, size = self.request, self.chunk_size
        for start in range(len(self.keys) * size, chunks * size, size):
            end = start + size
            extra, self.mm_index = generate_block_hash_extra_keys(request, start, end, self.mm_index)
            yield request.all_token_ids[start:end], extra

    def holds(self, group: int, chunk: int) -> bool:
        """Whether the server said that it has this object."""
        if not self.held or chunk // 8 >= len(self.held[group]):
            return False
        return self.held[group][chunk // 8] >> chunk % 8 & 1 == 1
