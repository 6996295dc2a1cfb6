"""An engine of this world: real SchedulerSide, real WorkerSides and vLLM's real block pool and requests,
around a model whose pages say what they are.

The page of a block holds a digest of everything that it depends on: weights, tenant, all tokens up to the
last one in it, group, rank, region. Before a step computes, every page that it reads is checked.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from msgspec import structs
from vllm import SamplingParams
from vllm.config import ParallelConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from lmcache_client import options
from lmcache_client.connector.account import named
from lmcache_client.connector.lookups import LOOKUP_WAIT_S
from lmcache_client.connector.metadata import WorkerReport
from lmcache_client.connector.offers import Offers
from lmcache_client.connector.request import Promised
from lmcache_client.connector.scheduler import IDLE_WAIT_S, SchedulerSide
from lmcache_client.connector.settings import Settings
from lmcache_client.connector.support import block_tokens
from lmcache_client.connector.worker import WorkerSide
from lmcache_client.contract import geometry
from lmcache_client.contract.chunk_size import unified_block_size
from lmcache_client.contract.geometry import (
    CHUNKED_LOCAL,
    FULL,
    RECURRENT,
    SLIDING_WINDOW,
    Geometry,
    GroupSpec,
)
from lmcache_client.contract.keys import ModelTag
from lmcache_client.memory.host import HostExport
from simulation.network import ClientSystem, Network
from simulation.world import Process, World

LOOKUP_TIMEOUT_S = 1.0
LOAD_TIMEOUT_S = 5.0
STEP_TOKENS = 24
MAX_RUNNING = 3
HASH_TOKENS = 4
MAX_LOCAL = 3
"""Prefixes that the engine keeps in its own prefix cache."""


@dataclass(frozen=True)
class Model:
    """A model and how an engine runs it; `weights` are what its pages depend on."""

    name: str
    weights: str
    groups: tuple[tuple[str, int, int], ...]
    """Kind, block size, window."""
    ranks: int
    page_bytes: tuple[int, ...] = (16, 24)
    """One region for each."""
    drafts: int = 0
    """The most drafts that a step verifies; none without a drafter."""
    lookahead: int = 0
    """How many tokens behind a chunk its key covers, too."""
    dcp: int = 1
    """How many ranks divide the tokens of a full block among them. Its size in `groups` is that of one."""
    interleave: int = 1
    """How many neighbouring tokens are on one of these ranks."""

    @property
    def parallel(self) -> Any:
        """Of vLLM's configuration, what says so."""
        return ParallelConfig(
            tensor_parallel_size=self.ranks,
            decode_context_parallel_size=self.dcp,
            cp_kv_cache_interleave_size=self.interleave,
        )

    def block_tokens(self, kind: str, size: int) -> int:
        """What the connector says of a block."""
        spec: Any = SimpleNamespace(block_size=size, dcp_sharded=kind == FULL)
        return block_tokens(spec, self.dcp)


class Origin:
    """What an engine is started with: weights that are named as what they are."""

    where = ""
    """What is said of the loads in its history."""

    def tag(self, model: Model) -> ModelTag:
        divided = named(model.parallel, "") if model.dcp > 1 else ()
        return ModelTag(model.name, (("weights", model.weights), *divided), model.ranks, 1)

    def layout(self) -> str:
        """The tag of its groups."""
        return ""

    def start(self, engine: "Engine") -> None:
        """Its workers begin, in a task of its first process."""
        for worker in engine.workers:
            worker.start()


@dataclass
class Running:
    """A request in the engine: its block tables and how far it is."""

    request: Request
    salt: str
    tables: list[list[int]]
    computed: int = 0
    loading: int = 0
    """The resume point of a load under way."""
    stopped: bool = False
    """Ended while its load was under way: its blocks come free when that has ended."""
    failed: bool = False
    scheduled: bool = False
    marks: list[int] = field(default_factory=lambda: [0])


class Engine:
    """One life of an engine. Its steps run in one task; each of its processes has a keeper."""

    def __init__(
        self,
        networks: Sequence[Network],
        model: Model,
        engine_id: str,
        processes: Sequence[Process],
        num_blocks: int,
        origin: Origin,
    ) -> None:
        """Each of several networks is another host, with a server and some of the ranks."""
        self.world: World = networks[0].world
        self.networks = networks
        self.model = model
        self.engine_id = engine_id
        self.processes = processes
        # Only the connector of an engine with a drafter asks for hashes of blocks.
        self.pool = BlockPool(num_blocks, bool(model.drafts), HASH_TOKENS if model.drafts else 1)
        self.waiting: list[Running] = []
        self._arrived: list[Request] = []
        """Those of the waiting ones that the connector does not know yet."""
        self.running: list[Running] = []
        self.loading: list[Running] = []
        self.done = 0
        self.closing = False
        self._aborts = self._resets = 0
        divided = f" {model.interleave} of {model.dcp}" if model.dcp > 1 else ""
        self.weights = [f"{model.weights}{divided}"] * model.ranks
        """What the pages of each rank depend on, apart from tokens."""
        self._computed: set[int] = set()
        """What stands for the tokens of the pages that it has computed."""
        self._pauses = {"between steps": 0.0, "in a step": 0.0}
        self._await: dict[str, dict[str, int]] = {}
        """Loads under way: how many workers have reported, how many of them a failure."""
        self._local: list[tuple[str, int, int, list[list[int]]]] = []
        """What the engine's own prefix cache holds: tenant, mark, tokens, blocks by group."""
        self._memory = [self._buffer(num_blocks) for _ in range(model.ranks)]
        systems = [ClientSystem(networks, process) for process in processes]
        # Hosts, so that the channel does not look at this machine for a directory of sockets.
        settings = Settings(networks[0].host, 5555, LOOKUP_TIMEOUT_S, LOAD_TIMEOUT_S)
        if len(networks) > 1:
            # The first host has what the others leave, which have one rank each.
            last = model.ranks - len(networks)
            ranks = [f"0-{last}", *(str(last + at) for at in range(1, len(networks)))]
            servers = {each: f"{network.host}:5555" for each, network in zip(ranks, networks, strict=True)}
            settings = structs.replace(settings, host="", servers=servers)
        self.origin = origin
        tag = origin.tag(model)
        self.workers = [
            WorkerSide(
                settings,
                engine_id,
                rank,
                tag,
                self._geometry(num_blocks),
                HostExport(((int(memory.ctypes.data), memory.nbytes),)),
                systems[1 + rank],  # type: ignore[arg-type]
            )
            for rank, memory in enumerate(self._memory)
        ]
        bare = tuple(
            GroupSpec(kind, model.block_tokens(kind, size), window, "", ())
            for kind, size, window in model.groups
        )
        self.scheduler = SchedulerSide(
            settings,
            engine_id,
            Offers(
                bare,
                # Half of the engines store what somebody will read, the others everything.
                block_bytes=self.world.random.choice(((), (sum(model.page_bytes),) * len(bare))),
                state_interval=self.world.random.choice((None, 0)),
                drafts=bool(model.drafts),
            ),
            model.ranks,
            loads=True,
            stores=True,
            lookahead=model.lookahead,
            wanted=dict.fromkeys(self._options() & {*options.NAMES}, True),
            system=systems[0],  # type: ignore[arg-type]
        )
        self.scheduler.bind(self.pool)
        # What vLLM's managers say of a block.
        self.groups = tuple(
            GroupSpec(kind, size * (model.dcp if kind == FULL else 1), window, "", ())
            for kind, size, window in model.groups
        )
        self.unified = unified_block_size(self.groups)

    # -- memory -----------------------------------------------------------------------------------

    def _buffer(self, num_blocks: int) -> Any:
        return np.zeros(num_blocks * sum(self.model.page_bytes) * len(self.model.groups), dtype=np.uint8)

    def _geometry(self, num_blocks: int) -> Geometry:
        groups, offset = [], 0
        for kind, size, window in self.model.groups:
            regions = []
            for page_bytes in self.model.page_bytes:
                regions.append(geometry.Region(0, offset, page_bytes, page_bytes))
                offset += num_blocks * page_bytes
            tokens = self.model.block_tokens(kind, size)
            groups.append(GroupSpec(kind, tokens, window, self.origin.layout(), tuple(regions)))
        return Geometry(tuple(groups), num_blocks)

    def _pages(self, rank: int, group: int, block: int) -> Iterator[Any]:
        offset = 0
        for index in range(len(self.model.groups)):
            for page_bytes in self.model.page_bytes:
                if index == group:
                    start = offset + block * page_bytes
                    yield self._memory[rank][start : start + page_bytes]
                offset += self.pool.num_gpu_blocks * page_bytes

    def _content(self, group: int, block: int, mark: int) -> Iterator[tuple[int, Any, bytes]]:
        """Rank, page, and what must be in it."""
        for rank in range(self.model.ranks):
            right = _digests(self.weights[rank], mark, rank, group, self.model.page_bytes)
            pages = self._pages(rank, group, block)
            yield from zip((rank,) * len(right), pages, right, strict=True)

    def _write(self, group: int, block: int, mark: int) -> None:
        self._computed.add(mark)
        for _, page, right in self._content(group, block, mark):
            page[:] = np.frombuffer(right, dtype=np.uint8)

    def _check(self, group: int, block: int, mark: int, what: str) -> None:
        assert block, f"{what}: a block that is needed is the null block"
        for rank, page, right in self._content(group, block, mark):
            where = f"rank {rank} group {group} block {block}"
            assert page.tobytes() == right, f"WRONG BYTES: {what}, {where}"

    def _mark(self, sequence: Running, tokens: int) -> int:
        """What stands for the first `tokens` tokens of this tenant's sequence."""
        marks = sequence.marks
        if not marks[0]:
            marks[0] = int.from_bytes(hashlib.sha256(sequence.salt.encode()).digest()[:7], "little")
        while len(marks) <= tokens:
            marks.append(hash((marks[-1], sequence.request.all_token_ids[len(marks) - 1])))
        return marks[tokens]

    # -- requests ---------------------------------------------------------------------------------

    _hasher: Callable[[Request], list[Any]] | None = None

    def _options(self) -> set[str]:
        """In two of three histories nobody hears what requests ask to retain or bring back, so that others
        evict what they might."""
        return {"handover", "hints"} | (set() if self.world.seed % 3 else {"retention"})

    def add(self, name: str, tokens: list[int], salt: str, max_tokens: int) -> None:
        # Every third prompt will not come back, it says; some do. Every fifth is to be retained,
        # and every seventh to be brought back from the tiers.
        hints: dict[str, Any] = {"lmcache.once": not len(tokens) % 3}
        if not len(tokens) % 5:
            hints["lmcache.retain_s"] = 1 + len(tokens) % 50
            hints["lmcache.priority"] = len(tokens) % 3
        if not len(tokens) % 7:
            hints["lmcache.prefetch_s"] = 1 + len(tokens) % 3
        params = SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": hints})
        request = Request(name, tokens, params, None, cache_salt=salt or None, block_hasher=self._hasher)
        self.waiting.append(Running(request, salt, [[] for _ in self.groups]))
        self._arrived.append(request)

    def abort_one(self) -> None:
        """Before the next step, some request is aborted, wherever it is."""
        self._aborts += 1

    def _abort(self) -> None:
        loading = [sequence for sequence in self.loading if not sequence.stopped]
        alive = [*self.waiting, *self.running, *loading]
        if alive:
            self.world.count("aborts")
            self._finish(self.world.random.choice(alive))

    def reset_soon(self) -> None:
        """Before the next step, the engine gets other weights, as a training run gives it."""
        self._resets += 1

    def _reset(self) -> None:
        """As vLLM's pause_generation with clear_cache, which fails while a request waits for its load."""
        if self.loading:
            return
        self.world.count("resets")
        for sequence in reversed(self.running):
            self._free(sequence)
            self.waiting.insert(0, sequence)
        self.running.clear()
        for sequence in self.waiting:
            # Its keys are others from now on, so what it is offered next is not what failed.
            sequence.failed = False
        self.forget_prefixes()
        assert self.pool.reset_prefix_cache(), "vLLM cannot reset its own cache"
        started_s = self.world.now_s
        self.scheduler.reset()
        assert self.world.now_s == started_s, "a reset waited for the server"
        self.weights = [f"{self.engine_id} {self.world.counts['resets']}"] * self.model.ranks

    def _finish(self, sequence: Running) -> None:
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self.world.note(f"{self.engine_id} ends {sequence.request.request_id} at {sequence.computed}")
        self.scheduler.finished(sequence.request)
        if sequence.loading:
            sequence.stopped = True
        else:
            self._free(sequence)
        self.done += 1

    def _free(self, sequence: Running) -> None:
        for table in sequence.tables:
            self.pool.free_blocks([self.pool.blocks[i] for i in reversed(table) if i])
            table.clear()
        sequence.computed = 0

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.loading)

    # -- the engine's own prefix cache ------------------------------------------------------------

    def _keep_prefix(self, sequence: Running) -> None:
        tokens = sequence.computed // self.unified * self.unified
        if not tokens or sequence.computed != tokens:
            return
        blocks = []
        for spec, table in zip(self.groups, sequence.tables, strict=True):
            needed = _needed(spec, tokens)
            blocks.append([0] * needed.start + [table[i] for i in needed])
            assert all(blocks[-1][i] for i in needed)
        self.pool.touch([self.pool.blocks[i] for ids in blocks for i in ids if i])
        self._local.append((sequence.salt, self._mark(sequence, tokens), tokens, blocks))
        if len(self._local) > MAX_LOCAL:
            self._forget_prefix()

    def _forget_prefix(self) -> None:
        _, _, _, blocks = self._local.pop(0)
        self.pool.free_blocks([self.pool.blocks[i] for ids in blocks for i in ids if i])

    def forget_prefixes(self) -> None:
        while self._local:
            self._forget_prefix()

    def _local_hit(self, sequence: Running) -> tuple[int, list[list[int]]]:
        best: tuple[int, list[list[int]]] = (0, [[] for _ in self.groups])
        for salt, mark, tokens, blocks in self._local:
            fits = salt == sequence.salt and best[0] < tokens < sequence.request.num_tokens
            if fits and self._mark(sequence, tokens) == mark:
                best = (tokens, blocks)
        return best

    # -- a step -----------------------------------------------------------------------------------

    def run(self) -> None:
        """The engine's life, in a task of its first process."""
        self.origin.start(self)
        self.scheduler.start()
        while not self.closing:
            self._step()
            self._rest("between steps", self.world.random.uniform(0.001, 0.02))
            if self.idle and not self.scheduler.held.has_work():
                self.world.sleep(self.world.random.uniform(0.0, 0.3))

    def pause(self, seconds: float) -> None:
        """Its steps stop for a while, soon; its keepers may go on."""
        self._pauses[self.world.random.choice(list(self._pauses))] += seconds

    def _rest(self, where: str, seconds: float) -> None:
        pause_s, self._pauses[where] = self._pauses[where], 0.0
        self.world.sleep(seconds + pause_s)

    def close(self) -> None:
        """In a task: end in order."""
        self.closing = True
        for side in (self.scheduler, *self.workers):
            side.channel.close()

    def _step(self) -> None:
        started_s = self.world.now_s - self.world.jumped_s
        arrived, self._arrived = self._arrived, []
        for request in arrived:
            self.scheduler.new_request(request)
        waited_s = self.world.now_s - self.world.jumped_s - started_s
        assert waited_s <= len(arrived) * 0.001, f"requests waited {waited_s} s to arrive"
        while self._aborts:
            self._aborts -= 1
            self._abort()
        while self._resets:
            self._resets -= 1
            self._reset()
        started_s = self.world.now_s - self.world.jumped_s
        asked = self._admit()
        scheduled = self._schedule()
        tokens = {sequence.request.request_id: count for sequence, count in scheduled}
        tables = {s.request.request_id: tuple(s.tables) for s, _ in scheduled}
        known = [s for s, _ in scheduled if s.scheduled]
        output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            scheduled_new_reqs=[
                SimpleNamespace(req_id=s.request.request_id, num_computed_tokens=s.computed)
                for s, _ in scheduled
                if not s.scheduled
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[s.request.request_id for s in known],
                num_computed_tokens=[s.computed for s in known],
            ),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=tables.get, boundary_state_offloads=self._states(scheduled)
            ),
        )
        for sequence, _ in scheduled:
            sequence.scheduled = True
        metadata = self.scheduler.step(output)  # type: ignore[arg-type]
        waited_s = self.world.now_s - self.world.jumped_s - started_s
        limit_s = LOOKUP_WAIT_S + (asked + 1) * 0.001 + (0 if tokens else IDLE_WAIT_S + 0.001)
        assert waited_s <= limit_s, f"a step waited {waited_s} s for the server"
        for worker in self.workers:
            worker.submit(metadata.loads)
        self._rest("in a step", self.world.random.uniform(0.0005, 0.01))
        for sequence, count in scheduled:
            self._compute(sequence, count)
        self._verify(scheduled)
        finished: dict[str, int] = {}
        failed: set[str] = set()
        report = WorkerReport()
        for worker in self.workers:
            worker.submit(metadata.stores)
            results = worker.collect(metadata.idle)
            for name in sorted(results.loaded):
                finished[name] = finished.get(name, 0) + 1
            failed |= results.failed
            report = report.aggregate(WorkerReport(results.settled))
        self._take(finished, failed, report)
        for sequence, count in scheduled:
            self._advance(sequence, count)

    def _admit(self) -> int:
        """Give waiting requests their blocks; returns how often the connector was asked."""
        asked = 0
        for sequence in list(self.waiting):
            if len(self.running) + len(self.loading) >= MAX_RUNNING:
                break
            local, blocks = self._local_hit(sequence)
            asked += 1
            external, is_async = self.scheduler.matched_tokens(sequence.request, local)
            if external is None:
                continue
            tracked = self.scheduler.lookups.requests[sequence.request.request_id]
            if external and isinstance(tracked.state, Promised) and tracked.state.is_early:
                self.world.count("hits of early lookups")
            resume = local + external
            if external and isinstance(tracked.state, Promised):
                self._check_leases(tracked.state.found.lease_id, resume)
            assert is_async == bool(external)
            assert resume < sequence.request.num_tokens
            assert resume % self.unified == 0
            alone = not (self.running or self.loading)
            roomy = self._outstanding(sequence) <= self.pool.get_num_free_blocks()
            fits = alone or roomy or not external
            if not fits or not self._allocate(sequence, blocks, local, resume):
                if self._local:
                    self._forget_prefix()
                break
            view = SimpleNamespace(get_block_ids=lambda tables=sequence.tables: tuple(map(tuple, tables)))
            self.scheduler.allocated(sequence.request, view, external)  # type: ignore[arg-type]
            self.waiting.remove(sequence)
            sequence.computed = local
            if external:
                self.world.count("loads")
                sequence.loading = resume
                self._await.setdefault(sequence.request.request_id, {})
                self.loading.append(sequence)
            else:
                self.running.append(sequence)
        return asked

    def _check_leases(self, lease_id: int, resume: int) -> None:
        """Every server has promised what is loaded, unless it has restarted, or said nonsense."""
        client = self.scheduler.client
        if self.world.counts.get("replies of nonsense"):
            return
        self.world.count("loads from several servers", len(client.channels) > 1)
        own, leases = client.channels, client.leases(lease_id)
        for each, lease, network in zip(own, leases, self.networks, strict=True):
            server: Any = network.listener
            if server is not None and server.router.sessions.boot_id == each.boot_id:
                promise = server.cache._leases.get(lease)
                assert lease, "a load without a lease"
                assert promise is None or promise.resume_tokens == resume, (
                    "a load that a server did not promise"
                )

    def _outstanding(self, newcomer: Running) -> int:
        """Blocks that this request and those under way still need for the tokens they have. As in vLLM, a
        load waits for them: two that load could otherwise put each other back for ever."""
        return sum(
            self._entries(spec, each.request.num_tokens) + 1 - sum(map(bool, table))
            for each in (newcomer, *self.running, *self.loading)
            for spec, table in zip(self.groups, each.tables, strict=True)
        )

    def _allocate(self, sequence: Running, local_blocks: list[list[int]], local: int, resume: int) -> bool:
        """Blocks for a resume at `resume`: shared ones up to `local`, new ones beyond."""
        wanted: list[list[tuple[int, int]]] = []
        for spec, shared in zip(self.groups, local_blocks, strict=True):
            needed = _needed(spec, resume)
            fresh = [i for i in needed if i * spec.block_size >= local]
            kept = [(i, shared[i]) for i in needed if i * spec.block_size < local]
            assert all(block for _, block in kept)
            wanted.append([*kept, *((i, 0) for i in fresh)])
        count = sum(not block for pairs in wanted for _, block in pairs)
        if count > self.pool.get_num_free_blocks():
            return False
        self.pool.touch([self.pool.blocks[block] for pairs in wanted for _, block in pairs if block])
        new = iter(self.pool.get_new_blocks(count))
        for spec, table, pairs in zip(self.groups, sequence.tables, wanted, strict=True):
            table[:] = [0] * (resume // spec.block_size)
            for position, block in pairs:
                table[position] = block or next(new).block_id
        return True

    def _schedule(self) -> list[tuple[Running, int]]:
        budget, scheduled = STEP_TOKENS, []
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            count = self._next_tokens(sequence, budget)
            while count > 0 and not self._grow(sequence, count):
                if not self._preempt(sequence):
                    count = 0
            if count > 0:
                scheduled.append((sequence, count))
                budget -= count
            if budget <= 0:
                break
        return [(sequence, count) for sequence, count in scheduled if sequence in self.running]

    def _next_tokens(self, sequence: Running, budget: int) -> int:
        """How many tokens the next step of this request computes."""
        count = min(sequence.request.num_tokens - sequence.computed, budget)
        if count > 1 and self.world.chance(0.5):
            # Steps end at block boundaries of recurrent groups, as in vLLM's align mode.
            aligned = (sequence.computed + count) // self.unified * self.unified - sequence.computed
            count = aligned if aligned > 0 else count
        return count

    def _entries(self, spec: GroupSpec, tokens: int) -> int:
        """How long the block table of a group must be for a step that ends after `tokens` tokens."""
        return -(-tokens // spec.block_size)

    def _grow(self, sequence: Running, count: int) -> bool:
        """Free what the next step does not read any more, add blocks for `count` tokens."""
        longer = []
        for spec, table in zip(self.groups, sequence.tables, strict=True):
            first = _first_read(spec, sequence.computed) // spec.block_size
            for position in range(min(first, len(table))):
                if table[position]:
                    self.pool.free_blocks([self.pool.blocks[table[position]]])
                    table[position] = 0
            kept = self._moved(sequence, spec, table, count)
            longer.append((table, kept, max(0, self._entries(spec, sequence.computed + count) - len(kept))))
        if sum(more for _, _, more in longer) > self.pool.get_num_free_blocks():
            return False
        for table, kept, more in longer:
            table[:] = [*kept, *(block.block_id for block in self.pool.get_new_blocks(more))]
        return True

    def _moved(self, sequence: Running, spec: GroupSpec, table: list[int], count: int) -> list[int]:
        """The entries of a block table before a step of `count` tokens adds to them."""
        return table

    def _preempt(self, sequence: Running) -> bool:
        """Make room: forget a prefix, or put back the request that came last. False when nothing helps."""
        if self._local:
            self._forget_prefix()
            return True
        last = self.running[-1]
        self.world.count("preemptions")
        self.running.remove(last)
        self._free(last)
        self.waiting.insert(0, last)
        return last is not sequence

    def _verify(self, scheduled: list[tuple[Running, int]]) -> None:
        """After the forward pass, where there are drafts, and before anything is stored."""

    def _states(self, scheduled: list[tuple[Running, int]]) -> dict[str, list[tuple[int, int, int]]]:
        offers: dict[str, list[tuple[int, int, int]]] = {}
        for sequence, count in scheduled:
            end = sequence.computed + count
            for index, spec in enumerate(self.groups):
                if spec.kind == RECURRENT and end % spec.block_size == 0:
                    block = sequence.tables[index][end // spec.block_size - 1]
                    offers.setdefault(sequence.request.request_id, []).append((index, block, end))
        return offers

    def _compute(self, sequence: Running, count: int) -> None:
        """The forward pass: reads what was computed or loaded before, writes the new pages."""
        if sequence not in self.running:
            return
        start, end = sequence.computed, sequence.computed + count
        for index, spec in enumerate(self.groups):
            table, size = sequence.tables[index], spec.block_size
            what = f"{self.engine_id} {sequence.request.request_id} at {start}"
            if start and spec.kind == RECURRENT:
                self._check(index, self._state_block(sequence, index), self._mark(sequence, start), what)
            elif start:
                for position in range(_first_read(spec, start) // size, (start - 1) // size + 1):
                    mark = self._mark(sequence, min((position + 1) * size, start))
                    self._check(index, table[position], mark, what)
            if spec.kind == RECURRENT:
                self._write_states(sequence, index, start, end)
                continue
            for position in range(start // size, (end - 1) // size + 1):
                assert table[position], "the engine writes to the null block"
                self._write(index, table[position], self._mark(sequence, min((position + 1) * size, end)))

    def _state_block(self, sequence: Running, index: int) -> int:
        """The block of a recurrent group with the state after all computed tokens."""
        return sequence.tables[index][(sequence.computed - 1) // self.groups[index].block_size]

    def _write_states(self, sequence: Running, index: int, start: int, end: int) -> None:
        """What a step from `start` to `end` leaves in the blocks of a recurrent group."""
        block = sequence.tables[index][(end - 1) // self.groups[index].block_size]
        self._write(index, block, self._mark(sequence, end))

    def _advance(self, sequence: Running, count: int) -> None:
        if sequence not in self.running:
            return
        sequence.computed += count
        self._keep_prefix(sequence)
        if sequence.computed < sequence.request.num_tokens:
            return
        sequence.request.append_output_token_ids(self.world.random.randrange(50))
        assert sequence.request.sampling_params is not None
        if sequence.request.num_output_tokens >= (sequence.request.sampling_params.max_tokens or 1):
            self._finish(sequence)

    def _take(self, finished: dict[str, int], failed: set[str], report: WorkerReport) -> None:
        """What vLLM makes of the workers' results: a load has ended once every worker has said so."""
        ended = set()
        for name, workers in finished.items():
            seen = self._await[name]
            seen["count"] = seen.get("count", 0) + workers
            assert seen["count"] <= self.model.ranks, "a worker reports a load once"
            seen["failed"] = seen.get("failed", 0) + (name in failed)
            if seen["count"] == self.model.ranks:
                ended.add(name)
        bad = {name for name in ended if self._await[name]["failed"]}
        self.scheduler.worker_output(
            SimpleNamespace(finished_recving=ended, failed_recving=bad, kv_connector_worker_meta=report)  # type: ignore[arg-type]
        )
        for sequence in [s for s in self.loading if s.request.request_id in ended]:
            name = sequence.request.request_id
            self.loading.remove(sequence)
            del self._await[name]
            resume, sequence.loading = sequence.loading, 0
            if sequence.stopped:
                self._free(sequence)
            elif name in bad:
                self.world.count("loads failed")
                assert not sequence.failed, "a load that failed was offered again"
                sequence.failed = True
                self._free(sequence)
                self.waiting.insert(0, sequence)
            else:
                self.world.count("tokens loaded", resume - sequence.computed)
                self.world.note(f"{self.engine_id} loaded {name} up to {resume}")
                self._count_foreign(sequence, resume)
                sequence.computed = resume
                self.running.append(sequence)
                self._loaded(sequence)

    def _count_foreign(self, sequence: Running, resume: int) -> None:
        """A load of pages that this engine has never computed: another one has, with the same name."""
        if self._mark(sequence, resume) in self._computed:
            return
        server: Any = self.networks[0].listener
        layout = server.router.sessions.layout(self.engine_id) if server is not None else None
        tracked = self.scheduler.lookups.requests.get(sequence.request.request_id)
        self.world.count(f"loads from another engine{self.origin.where}")
        if layout is not None and tracked is not None:
            key = tracked.keys[(resume - 1) // tracked.chunk_size]
            from_tier = (layout.namespace, key) in server.fetched
            self.world.count(f"loads from another engine by a tier{self.origin.where}", int(from_tier))

    def _loaded(self, sequence: Running) -> None:
        """Its load has succeeded."""


def _first_read(spec: GroupSpec, computed: int) -> int:
    """The first token that the model reads to compute the one after `computed`. Said again here, in the
    model's own words, so that the product's answer is not held against itself."""
    following = computed  # the position of the next token
    if spec.kind == SLIDING_WINDOW:
        return max(0, following - (spec.window - 1))
    if spec.kind == CHUNKED_LOCAL:
        return following - following % spec.window
    return max(0, following - 1) if spec.kind == RECURRENT else 0


def _needed(spec: GroupSpec, computed: int) -> range:
    """Positions of the blocks that the model reads to go on from `computed`, a multiple of its blocks."""
    return range(min(_first_read(spec, computed), computed) // spec.block_size, computed // spec.block_size)


@functools.lru_cache(1 << 16)
def _digests(weights: str, mark: int, rank: int, group: int, page_bytes: tuple[int, ...]) -> list[bytes]:
    """What the pages of one block must hold, region by region."""
    return [
        hashlib.blake2b(f"{weights} {mark} {rank} {group} {region}".encode(), digest_size=size).digest()
        for region, size in enumerate(page_bytes)
    ]
