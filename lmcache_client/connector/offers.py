"""The objects that a step of the engine completes and that are worth storing."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes

from lmcache_client.connector.request import Tracked
from lmcache_client.contract.admission import Admission, checkpoint_interval
from lmcache_client.contract.geometry import RECURRENT, GroupSpec
from lmcache_client.contract.messages import MAX_OBJECTS, Store, StoreObject
from lmcache_client.engine import chunk_object

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput

Offer = tuple[Tracked, StoreObject]
"""A request, and an object of it."""
Finds = Callable[[str], Tracked | None]
"""Finds a request by its id."""


@dataclass
class Offers:
    """Chooses the objects that an engine with these groups, which have no regions, offers to the server.

    `block_bytes` has the bytes of one block of each group. If it is empty, every window and state is offered.
    `state_interval` is vLLM's prefix_cache_retention_interval. With `drafts`, the engine has a drafter.
    `group_ids` are vLLM's indexes of the groups; without any, vLLM has no other groups.
    """

    groups: tuple[GroupSpec, ...]
    block_bytes: Sequence[int] = ()
    state_interval: int | None = None
    drafts: bool = False
    group_ids: Sequence[int] = ()
    pool: "BlockPool | None" = None
    """vLLM's, as soon as the scheduler has it."""
    _admissions: dict[int, Admission] = field(default_factory=dict)
    """By chunk size: a server that was restarted may have another one."""
    _generation: int = 0

    def __post_init__(self) -> None:
        self.group_ids = self.group_ids or range(len(self.groups))

    def of_step(
        self, output: "SchedulerOutput", requests: Mapping[str, Tracked], tracked_of: Finds, generation: int
    ) -> list[Offer]:
        """The objects that are complete after this step. `tracked_of` brings one of the `requests` up to date
        with the registration of this `generation`."""
        if generation != self._generation:
            self._generation = generation
            for tracked in requests.values():
                tracked.due_tokens = 0
        return [*self._computed(output, requests, tracked_of), *self._states(output, tracked_of)]

    def tables(self, of_all: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The block tables of these groups, among those of all groups of vLLM."""
        return [of_all[index] for index in self.group_ids]

    def _admission(self, chunk_size: int) -> Admission:
        if chunk_size not in self._admissions:
            interval = 0
            if self.block_bytes:
                interval = checkpoint_interval(self.groups, self.block_bytes, chunk_size)
            # By default vLLM itself offers a state only where it expects a request to resume.
            all_states = self.state_interval == 0
            self._admissions[chunk_size] = Admission(self.groups, chunk_size, interval, all_states)
        return self._admissions[chunk_size]

    def _computed(
        self, output: "SchedulerOutput", requests: Mapping[str, Tracked], tracked_of: Finds
    ) -> Iterable[Offer]:
        """The objects of attention groups."""
        new = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached, scheduled, due = output.scheduled_cached_reqs, output.num_scheduled_tokens, list(new.items())
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            # Most requests decode, and complete nothing in most steps.
            if request_id in requests and computed + scheduled[request_id] >= requests[request_id].due_tokens:
                due.append((request_id, computed))
        for request_id, computed in due:
            if (tracked := tracked_of(request_id)) is None:
                continue
            chunk_size = tracked.chunk_size
            if request_id in new and not computed % chunk_size:
                # Other prompts also share the beginning that only the engine's own prefix cache had.
                tracked.known = max(tracked.known, computed // chunk_size)
            # Tokens beyond num_tokens are drafts or not sampled yet, so their KV may change.
            whole = min(computed + scheduled[request_id], tracked.request.num_tokens - tracked.lookahead)
            complete = min(whole // chunk_size, tracked.most_chunks)
            if complete <= tracked.next_chunk:
                tracked.due_tokens = (tracked.next_chunk + 1) * chunk_size
                continue
            state = output.kv_connector_block_state
            tables = state.get_block_ids(request_id) if state is not None else None
            if tables is None:
                continue
            keys, tables = tracked.keys_of(complete), self.tables(tables)
            for chunk in range(tracked.next_chunk, complete):
                yield from self._chunk(tracked, tables, chunk, keys)
            tracked.next_chunk, tracked.due_tokens = complete, (complete + 1) * chunk_size

    def _chunk(
        self, tracked: Tracked, tables: Sequence[Sequence[int]], chunk: int, keys: Sequence[bytes]
    ) -> Iterable[Offer]:
        admission = self._admission(tracked.chunk_size)
        for index, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            positions = group.stored_blocks(chunk, tracked.chunk_size)
            if group.kind == RECURRENT or not positions or tracked.holds(index, chunk):
                continue
            if not admission.admits(index, chunk, tracked.prompt):
                continue
            blocks = table[positions.start : positions.stop]
            # A null block means that the engine does not have this part of the object.
            if len(blocks) == len(positions) and all(blocks):
                yield tracked, chunk_object(keys, chunk, index, blocks, tracked.tenant)

    def _states(self, output: "SchedulerOutput", tracked_of: Finds) -> Iterable[Offer]:
        """The recurrent states that vLLM offers in this step, each with its exact block."""
        state = output.kv_connector_block_state
        if state is None:
            return
        for request_id, offers in state.boundary_state_offloads.items():
            if (tracked := tracked_of(request_id)) is None:
                continue
            chunk_size = tracked.chunk_size
            # A state is only offered at the end of a step, so the next one is about a step away.
            spacing = max(output.num_scheduled_tokens.get(request_id, 0), self.state_interval or 0)
            prompt = tracked.prompt._replace(spacing=math.ceil(spacing / chunk_size))
            for group_id, block_id, tokens in offers:
                if group_id not in self.group_ids:
                    continue
                group = self.group_ids.index(group_id)
                chunk = tokens // chunk_size - 1
                is_past_end = tokens > tracked.request.num_tokens - tracked.lookahead
                is_past_end |= chunk >= tracked.most_chunks
                if tokens % chunk_size or is_past_end or not block_id:
                    continue
                if self.groups[group].kind != RECURRENT or tracked.holds(group, chunk):
                    continue
                if self.drafts and not self._is_final(tracked, group, block_id, tokens):
                    continue
                if self._admission(chunk_size).admits(group, chunk, prompt):
                    keys = tracked.keys_of(chunk + 1)
                    yield tracked, chunk_object(keys, chunk, group, (block_id,), tracked.tenant)

    def _is_final(self, tracked: Tracked, group: int, block_id: int, tokens: int) -> bool:
        """Whether, in an engine with a drafter, this block has the state after `tokens` tokens at the end of
        this step, and keeps it.

        Within the prompt, steps without drafts make the states, where they stay. After it, drafts move them,
        and vLLM may offer a block that it has freed meanwhile. Then the block has lost its hash if anybody
        else got it.
        """
        request, pool = tracked.request, self.pool
        if tokens > request.num_prompt_tokens or pool is None:
            return False
        size = self.groups[group].block_size
        hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, size)
        own = make_block_hash_with_group_id(hashes[tokens // size - 1], self.group_ids[group])
        return bool(pool.blocks[block_id].block_hash == own)


def stores(offered: Sequence[Offer]) -> Iterable[tuple[Sequence[Tracked], Store]]:
    """The messages that offer these objects, and of each one the requests of its objects. Few next prompts
    begin with an answer and its thoughts, so answers must not push prompts out."""
    for once in (False, True):
        chosen = [
            (tracked, each)
            for tracked, each in offered
            if (tracked.once or each.chunk_index >= tracked.prompt_chunks) == once
        ]
        for start in range(0, len(chosen), MAX_OBJECTS):
            requests, objects = zip(*chosen[start : start + MAX_OBJECTS], strict=True)
            names = dict.fromkeys(tracked.name for tracked in requests)
            yield requests, Store(objects, tuple(names), once)
