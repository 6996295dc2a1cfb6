"""The scheduler side's record of one request: its chunk keys, its lookup and the promise of the server."""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from lmcache_client.contract.admission import Prompt
from lmcache_client.contract.geometry import GroupSpec
from lmcache_client.contract.hits import group_ends
from lmcache_client.contract.keys import MAX_CHUNKS, ROOT_KEY, chunk_keys, tenant_id
from lmcache_client.contract.messages import MAX_NAME, Found
from lmcache_client.servers import Together

if TYPE_CHECKING:
    from vllm.v1.request import Request

MIN_PREFILL_TOKENS = 128
MAX_STEPS = 8


class Asking(NamedTuple):
    """A lookup in flight for a resume point beyond `computed`, which the engine has itself, up to `limit`."""

    lookup: Together
    computed: int
    limit: int
    since_s: float
    is_early: bool = False


class Promised(NamedTuple):
    """The answer to a lookup until it is used or released. A miss has no lease. The other fields are those of
    Asking."""

    found: Found
    computed: int
    since_s: float
    answered_s: float
    is_early: bool = False


class PrefillSpeed:
    """How fast the engine computes prompts, from steps of many tokens: decoding has few. A step may begin
    before the one before it has ended. Of a step without tokens, vLLM may never tell the end."""

    def __init__(self) -> None:
        self.tokens_per_s = 0
        self._steps: deque[tuple[int, float]] = deque(maxlen=MAX_STEPS)
        """The tokens and the beginnings of steps that have not ended."""
        self._ended_s = 0.0

    def began(self, tokens: int, now_s: float) -> None:
        if len(self._steps) == MAX_STEPS:  # nobody tells of their ends
            self._steps.clear()
        self._steps.extend([(tokens, now_s)] if tokens else [])

    def ended(self, now_s: float) -> None:
        """The oldest step has ended."""
        if not self._steps:
            return
        tokens, began_s = self._steps.popleft()
        seconds = now_s - max(began_s, self._ended_s)
        self._ended_s = now_s
        if tokens >= MIN_PREFILL_TOKENS and seconds > 0:
            speed = tokens / seconds
            self.tokens_per_s = int((speed + self.tokens_per_s) / 2 if self.tokens_per_s else speed)


@dataclass
class Tracked:
    """A request from its arrival to its end. `generation` is the registration that the server's answers
    belong to."""

    request: "Request"
    root: bytes = ROOT_KEY
    """The parent of its first chunk."""
    lookahead: int = 0
    """A chunk's key covers so many tokens behind the chunk, too: its last slots of a drafter's KV depend on
    them."""
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
    due_tokens: int = 0
    """With fewer computed tokens, no further chunk is complete."""
    loading: int = 0
    """The number of tokens of the load in flight."""
    loading_since_s: float = 0.0
    once: bool = False
    """The request says that its prompt will not come back."""
    store_tokens: int = sys.maxsize
    """Chunks that end behind so many tokens are not stored."""
    store_answer: bool = True
    """Whether chunks of which no token is the prompt's are stored."""
    why: bool = False
    """The server is to give reasons for misses."""
    adapter: tuple[str, ...] = ()
    """How the adapter of the request stands in its keys."""
    waits: bool = False
    """It asks again and again, because an option wants more than what the server has."""
    no_load: bool = False
    """The request says so, or a load failed: vLLM will ask again, but the same offer could fail forever."""

    def __post_init__(self) -> None:
        # Users may choose ids that are too long or not valid text, and no message may fail for that.
        self.name = self.request.request_id[:MAX_NAME].encode("utf-8", "replace").decode()
        """The request's id for the server's debug log."""
        self.tenant = tenant_id(self.request.cache_salt)

    def anew(self, root: bytes) -> "Tracked":
        """The same request when nothing of it is stored or promised yet, with keys that begin at `root`."""
        new = Tracked(self.request, root, self.lookahead, adapter=self.adapter, no_load=self.no_load)
        new.once, new.why = self.once, self.why
        new.store_tokens, new.store_answer = self.store_tokens, self.store_answer
        return new

    def reset(self, generation: int, chunk_size: int) -> None:
        """Forgets everything the server said before this registration."""
        self.generation = generation
        self.state = None
        self.held, self.known = (), 0
        if self.chunk_size != chunk_size:
            self.chunk_size = chunk_size
            self.keys, self.mm_index, self.next_chunk, self.due_tokens = [], 0, 0, 0

    @property
    def prompt(self) -> Prompt:
        """Where requests are likely to resume in this one's prompt."""
        end = min(self.chunks(self.request.num_prompt_tokens), self.most_chunks)
        return Prompt(end, self.known)

    @property
    def prompt_chunks(self) -> int:
        """The number of chunks that have a token of the prompt. Those behind them are the answer's."""
        tokens: int = self.request.num_prompt_tokens
        return -(-tokens // self.chunk_size)

    @property
    def most_chunks(self) -> int:
        """The number of leading chunks that may be stored."""
        most = MAX_CHUNKS if self.store_answer else min(self.prompt_chunks, MAX_CHUNKS)
        return min(most, self.store_tokens // self.chunk_size)

    def chunks(self, tokens: int) -> int:
        """The number of chunks at the end of the largest useful resume point of `tokens` tokens."""
        return min((tokens - max(1, self.lookahead)) // self.chunk_size, MAX_CHUNKS)

    def keys_of(self, chunks: int) -> Sequence[bytes]:
        """The keys of the first `chunks` chunks; each is computed once."""
        if len(self.keys) < chunks:
            self.keys.extend(chunk_keys(self._unkeyed(chunks), self.keys[-1] if self.keys else self.root))
        return self.keys[:chunks]

    def _unkeyed(self, chunks: int) -> Iterator[tuple[Sequence[int], object]]:
        """The tokens and vLLM's extra keys of those of the first `chunks` chunks that have no key yet."""
        request, size = self.request, self.chunk_size
        for start in range(len(self.keys) * size, chunks * size, size):
            end = start + size + self.lookahead
            extra, self.mm_index = generate_block_hash_extra_keys(request, start, end, self.mm_index)
            if self.adapter:
                extra = tuple(self.adapter if part[0] == "lora" else part for part in extra)
            yield request.all_token_ids[start:end], extra

    def end_a_step_at_the_fork(self, computed: int) -> None:
        """Makes vLLM offer the recurrent state where this prompt parts from the prompts that the server has.

        vLLM does the same by itself for its own prefix cache. It has just set this attribute of the request,
        and reads it when it chooses where the next step ends.
        """
        fork = self.known * self.chunk_size
        if fork > computed:
            self.request.shared_prefix_boundary = max(fork, self.request.shared_prefix_boundary)

    def holds(self, group: int, chunk: int) -> bool:
        """Whether the server said that it has this object."""
        bitmap = self.held[group] if self.held else b""
        return chunk // 8 < len(bitmap) and bitmap[chunk // 8] >> chunk % 8 & 1 == 1


def fits(found: Found, groups: Sequence[GroupSpec], chunk_size: int, limit: int) -> bool:
    """Whether an answer fits its question, which asked for a resume point up to `limit`."""
    is_point = found.resume_tokens <= limit and not found.resume_tokens % chunk_size
    return is_point and len(found.held) == len(groups)


def why_not_more(groups: Sequence[GroupSpec], chunk_size: int, found: Found, asked: Asking) -> str:
    """The groups that end the hit of an answer that fits, in words; empty if it reaches the limit."""
    ends = group_ends(groups, chunk_size, found.held, asked.computed, asked.limit)
    named = enumerate(zip(groups, ends, strict=True))
    return ", ".join(
        f"group {n} ({spec.kind}) ends at {end}" for n, (spec, end) in named if end < asked.limit
    )
