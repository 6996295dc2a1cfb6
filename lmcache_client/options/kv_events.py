"""KV events for routers: which prompts of this engine the server can restore, in vLLM's own words.

vLLM publishes what its engines hold (`--kv-events-config`), and takes the events of its connector after each
step. The server is asked how far a request's chain can be restored when a store of it has ended and when a
lookup has found something. Everything before that point is then announced, block by block. Its replies also
name forgotten chunks, and what cannot be restored without them is withdrawn. All ranks count in its answers.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from lmcache_client.connector.option import Engine, Option
from lmcache_client.connector.request import Asking, Tracked, fits
from lmcache_client.contract.control import Followed
from lmcache_client.contract.geometry import FULL, SLIDING_WINDOW
from lmcache_client.contract.keys import MAX_CHUNKS
from lmcache_client.contract.messages import Found
from lmcache_client.servers import Together

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig

POLL_S = 0.5
"""How often an engine that computes asks what the server has forgotten."""
MAX_ASKED, MAX_WAITING = 16, 1024
"""Limits of the questions under way and of the requests that wait for one. More are left out."""


@dataclass(eq=False, slots=True)
class _Chunk:
    """An announced chunk: vLLM's hashes of its blocks, and the announced chunks around it."""

    key: bytes
    hashes: Sequence[bytes | int]
    parent: "_Chunk | None"
    is_end: bool
    """Requests can resume at its end."""
    children: set["_Chunk"] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.parent.children.add(self)


class Events(Option):
    """The events of one engine, unless it only stores. `kinds` are its groups' as vLLM's events name them.

    The blocks are those of the first group with full attention, which has every token of the prompt.
    """

    def __init__(self, engine: Engine, kinds: Sequence[str]) -> None:
        self._groups = groups = engine.groups
        self._is_on, self._client = engine.loads, engine.client
        first = next((index for index, group in enumerate(groups) if group.kind == FULL), 0)
        self._group_id, spec = engine.group_ids[first], groups[first]
        self._block_size = spec.block_size
        self._kind = kinds[first]
        self._window = spec.window if spec.kind == SLIDING_WINDOW else None
        self._resumes_anywhere = all(group.kind == FULL for group in groups)
        self._hash_block_size = self._block_size
        self._generation = 0
        self._waiting: dict[str, Tracked] = {}
        self._asked: deque[tuple[Together, Tracked | None, Sequence[bytes]]] = deque()
        self._asked_s = 0.0
        self._chunks: dict[bytes, _Chunk] = {}
        """What is announced, by key: always whole chains from their first chunk on."""
        self._blocks = Counter[bytes | int]()
        """In how many of these chunks a block is. Keys also depend on the tokens of a drafter's lookahead and
        on an adapter's weights, so several may stand for the same blocks."""
        self._events: list[KVCacheEvent] = []

    def bind(self, pool: "BlockPool") -> None:
        self._hash_block_size, reset = pool.hash_block_size, pool.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            # It publishes AllBlocksCleared, after which routers know of no block of this engine any more.
            if is_reset := bool(reset()):
                self._chunks.clear()
                self._blocks.clear()
                self._events.clear()
            return is_reset

        pool.reset_prefix_cache = reset_prefix_cache

    @classmethod
    def wanted(cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Any:
        events = vllm_config.kv_events_config
        is_heard = events is not None and events.enable_kv_cache_events
        groups = kv_cache_config.kv_cache_groups if is_heard else ()
        return tuple(get_kv_cache_spec_kind(group.kv_cache_spec).value for group in groups)

    def settled(self, requests: Sequence[Tracked], seconds: float) -> None:
        for tracked in requests:
            self.changed(tracked)

    def answered(self, tracked: Tracked, asked: Asking, now_s: float) -> None:
        found = asked.lookup.reply
        if isinstance(found, Found) and fits(found, self._groups, tracked.chunk_size, asked.limit):
            self.changed(tracked)

    def changed(self, tracked: Tracked) -> None:
        """The server may be able to restore more of this request than was announced."""
        if self._is_on and len(self._waiting) < MAX_WAITING:
            self._waiting[tracked.request.request_id] = tracked

    def has_work(self) -> bool:
        # Every question has a deadline.
        return bool(self._waiting or self._asked or self._events)

    def reset(self) -> None:
        self._waiting.clear()
        self._asked.clear()
        self._forget(self._chunks)

    def take_events(self) -> list[KVCacheEvent]:
        if not self._is_on:
            return []
        channel = self._client.channel
        generation = channel.generation if channel.ready else 0
        if generation != self._generation:
            # Another server, or the same one that has forgotten this engine.
            self._generation = generation
            self._asked.clear()
            self._forget(self._chunks)
        if not generation:
            self._waiting.clear()
        else:
            channel.poll()
            while self._asked and self._asked[0][0].advance():
                self._hear(*self._asked.popleft())
            self._ask()
        events, self._events = self._events, []
        return events

    def _ask(self) -> None:
        now_s = self._client.channel.system.now_s()
        if self._chunks and not self._waiting and not self._asked and now_s - self._asked_s >= POLL_S:
            self._asked.append((self._client.follow(()), None, ()))
            self._asked_s = now_s
        while self._waiting and len(self._asked) < MAX_ASKED:
            tracked = self._waiting.pop(next(iter(self._waiting)))
            keys = tuple(tracked.keys[:MAX_CHUNKS])
            self._asked.append((self._client.follow(keys), tracked, keys))
            self._asked_s = now_s

    def _hear(self, question: Together, tracked: Tracked | None, keys: Sequence[bytes]) -> None:
        reply = question.reply
        if not isinstance(reply, Followed) or reply.missed:
            # Nobody knows what was forgotten. What is still there is announced again when it is asked for.
            self._forget(self._chunks)
        if isinstance(reply, Followed):
            self._forget(reply.gone)
            if tracked is not None:
                self._announce(tracked, keys, reply.resume_tokens)

    def _announce(self, tracked: Tracked, keys: Sequence[bytes], resume_tokens: int) -> None:
        """Announces the chunks up to this resume point that are not announced yet; they end its chain."""
        request, size, chunk_size = tracked.request, self._block_size, tracked.chunk_size
        hashes = resolve_block_hashes(request.block_hashes, self._hash_block_size, size)
        chunks = min(resume_tokens // chunk_size, len(keys), len(hashes) * size // chunk_size)
        first = next((index for index in range(chunks) if keys[index] not in self._chunks), chunks)
        last = self._chunks[keys[first - 1]] if first else None
        start, end = first * chunk_size // size, chunks * chunk_size // size
        while start < end and maybe_convert_block_hash(hashes[start]) in self._blocks:
            start += 1
        for index, key in enumerate(keys[first:chunks], first):
            own = hashes[index * chunk_size // size : (index + 1) * chunk_size // size]
            last = _Chunk(key, list(map(maybe_convert_block_hash, own)), last, self._resumes_anywhere)
            self._chunks[key] = last
            self._blocks.update(last.hashes)
        if last is not None:
            last.is_end = True
        starts, lora = range(start * size, end * size, size), request.lora_request
        if starts:
            extra = [generate_block_hash_extra_keys(request, at, at + size, 0)[0] for at in starts]
            stored = BlockStored(
                block_hashes=list(map(maybe_convert_block_hash, hashes[start:end])),
                parent_block_hash=maybe_convert_block_hash(hashes[start - 1]) if start else None,
                token_ids=request.all_token_ids[starts.start : starts.stop],
                block_size=size,
                lora_id=lora.lora_int_id if lora else None,
                medium=MEDIUM_CPU,
                lora_name=lora.lora_name if lora else None,
                extra_keys=to_event_extra_keys(extra),
                group_idx=self._group_id,
                kv_cache_spec_kind=self._kind,
                kv_cache_spec_sliding_window=self._window,
            )
            self._events.append(stored)

    def _forget(self, keys: Iterable[bytes]) -> None:
        """Withdraws these chunks and what cannot be restored without them."""
        lost: list[_Chunk] = []
        for key in list(keys):
            if (top := self._chunks.get(key)) is None:
                continue
            # Where a window or a state is lost, nobody resumes before it either, back to an end or a fork.
            while (above := top.parent) is not None:
                if above.is_end or len(above.children) > 1:
                    above.children.discard(top)
                    break
                top = above
            branch = [top]
            for chunk in branch:
                branch.extend(chunk.children)
                del self._chunks[chunk.key]
            lost += reversed(branch)
        # Not AllBlocksCleared: for routers, that would also end what the engine itself holds.
        gone = []
        for block in (each for chunk in lost for each in reversed(chunk.hashes)):
            self._blocks[block] -= 1
            if not self._blocks[block]:
                del self._blocks[block]
                gone.append(block)
        if gone:
            self._events.append(BlockRemoved(block_hashes=gone, medium=MEDIUM_CPU, group_idx=self._group_id))


OPTION = Events
