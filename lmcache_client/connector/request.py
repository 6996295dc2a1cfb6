"""The scheduler side's record of one request: its chunk keys, its lookup and the promise of the server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from lmcache_client.channel import Pending
from lmcache_client.contract.admission import Prompt
from lmcache_client.contract.keys import ROOT_KEY, chunk_keys
from lmcache_client.contract.messages import MAX_CHUNKS, MAX_NAME, Found

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Asking(NamedTuple):
    """A lookup in flight for a resume point beyond `computed`, which the engine has itself, up to `limit`."""

    lookup: Pending
    computed: int
    limit: int
    since_s: float


class Promised(NamedTuple):
    """The answer to a lookup until it is used or released; the other fields are those of Asking."""

    found: Found
    computed: int
    since_s: float


@dataclass
class Tracked:
    """A request from its arrival to its end. `generation` is the registration that the server's answers
    belong to."""

    request: "Request"
    root: bytes = ROOT_KEY
    """The parent of its first chunk."""
    generation: int = 0
    chunk_size: int = 0
    keys: list[bytes] = field(default_factory=list)
    mm_index: int = 0
    state: Asking | Promised | None = None
    """None if the server has not been asked or did not answer, or if its promise is of no use any more."""
    held: tuple[bytes, ...] = ()
    known: int = 0
    """The number of leading chunks that the server or the engine had when the prompt came."""
    next_chunk: int = 0
    """Chunks before this one have been offered for storing."""
    loading: int = 0
    """The number of tokens of the load in flight."""
    once: bool = False
    """The request says that its prompt will not come back."""
    no_load: bool = False
    """A load failed; vLLM will ask again, but the same offer could fail forever."""

    def __post_init__(self) -> None:
        # Users may choose ids that are too long or not valid text, and no message may fail for that.
        self.name = self.request.request_id[:MAX_NAME].encode("utf-8", "replace").decode()
        """The request's id for the server's debug log."""

    def reset(self, generation: int, chunk_size: int) -> None:
        """Forgets everything the server said before this registration."""
        self.generation = generation
        self.state = None
        self.held, self.known = (), 0
        if self.chunk_size != chunk_size:
            self.chunk_size = chunk_size
            self.keys, self.mm_index, self.next_chunk = [], 0, 0

    @property
    def prompt(self) -> Prompt:
        """Where requests are likely to resume in this one's prompt."""
        return Prompt(min((self.request.num_prompt_tokens - 1) // self.chunk_size, MAX_CHUNKS), self.known)

    def keys_of(self, chunks: int) -> Sequence[bytes]:
        """The keys of the first `chunks` chunks; each is computed once."""
        self.keys.extend(chunk_keys(self._unkeyed(chunks), self.keys[-1] if self.keys else self.root))
        return self.keys[:chunks]

    def _unkeyed(self, chunks: int) -> Iterator[tuple[Sequence[int], object]]:
        """The tokens and vLLM's extra keys of those of the first `chunks` chunks that have no key yet."""
        request, size = self.request, self.chunk_size
        for start in range(len(self.keys) * size, chunks * size, size):
            end = start + size
            extra, self.mm_index = generate_block_hash_extra_keys(request, start, end, self.mm_index)
            yield request.all_token_ids[start:end], extra

    def holds(self, group: int, chunk: int) -> bool:
        """Whether the server said that it has this object."""
        bitmap = self.held[group] if self.held else b""
        return chunk // 8 < len(bitmap) and bitmap[chunk // 8] >> chunk % 8 & 1 == 1
