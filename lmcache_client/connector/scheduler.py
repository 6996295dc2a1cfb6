"""The scheduler side of the connector decides what to look up, load and store, and which blocks to hold.

It never blocks vLLM's scheduler. Every block that the server reads or writes is held in vLLM's block pool.
"""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_client import options
from lmcache_client.channel import Channel, Pending
from lmcache_client.connector import stats
from lmcache_client.connector.early import EarlyLookups, is_enough, is_stale
from lmcache_client.connector.held import HeldBlocks
from lmcache_client.connector.hints import Hints
from lmcache_client.connector.log import logger, trace
from lmcache_client.connector.metadata import LoadJob, StepMetadata, WorkerReport
from lmcache_client.connector.offers import Offers, stores
from lmcache_client.connector.option import Engine, Options
from lmcache_client.connector.places import places, schedulers
from lmcache_client.connector.request import Asking, PrefillSpeed, Promised, Tracked, fits
from lmcache_client.connector.root import Root, start_anew
from lmcache_client.connector.settings import Settings
from lmcache_client.connector.stats import TransferStats
from lmcache_client.connector.weights import Adapters
from lmcache_client.contract.admission import known_chunks
from lmcache_client.contract.geometry import MAX_CHUNK_TOKENS, RECURRENT, GroupSpec, unified_block_size
from lmcache_client.contract.hits import fetch_patience_s
from lmcache_client.contract.messages import Cleared, Found, Joined, Lookup
from lmcache_client.engine import JOIN_S, load_message
from lmcache_client.servers import Servers
from lmcache_client.transport import SYSTEM, System

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


OPTIONS = options.classes()  # here, because an engine runs without the cache if one cannot be imported
LOOKUP_WAIT_S, FRESH_LOOKUP_S, IDLE_WAIT_S, CONNECT_S = 0.001, 0.01, 0.002, 1.0


class SchedulerSide:
    """The scheduler side of one engine. `groups` have no regions; `world_size` workers report each job.
    `advise` takes what a server said, returns advice on resume points or nothing. `lookahead` is that of
    Tracked, `block_bytes` to `drafts` and `group_ids` are those of Offers. `wanted` has what each option, by
    its name, takes from vLLM's configuration; other options are left out."""

    def __init__(
        self,
        settings: Settings,
        engine_id: str,
        groups: tuple[GroupSpec, ...],
        world_size: int,
        loads: bool,
        stores: bool,
        advise: Callable[[Joined], str] = lambda _joined: "",
        block_bytes: Sequence[int] = (),
        state_interval: int | None = None,
        lookahead: int = 0,
        drafts: bool = False,
        group_ids: Sequence[int] = (),
        wanted: Mapping[str, Any] = types.MappingProxyType({}),
        system: System = SYSTEM,
    ) -> None:
        self._settings = settings
        self.groups = groups
        self._loads = loads
        self._stores = stores
        self._tracked: dict[str, Tracked] = {}
        self._root = Root(bool(settings.weights_name), system.random_bytes)
        self._clear: Pending | None = None
        """The last request to clear the server; None if vLLM has not reset its cache."""
        self._queued: list[LoadJob] = []
        self._early = EarlyLookups()
        self._may_wait = True
        """False after a wait without an answer, until the next step: the server is slow, or gone."""
        self.held = HeldBlocks(world_size, system.now_s)
        self.stats = TransferStats()
        self._adapters = Adapters()
        self.chunk_size = 0
        self._fetches = False
        """Whether the server has tiers, so that its answers may take longer."""
        self._prefill = PrefillSpeed()
        self._offers = Offers(groups, block_bytes, state_interval, drafts, group_ids)
        self._advise, self._advice = advise, ""
        self._unified = unified_block_size(groups)
        self._lookahead = lookahead
        self._has_states = any(group.kind == RECURRENT for group in groups)
        self.client = Servers(schedulers(places(settings, world_size), engine_id, self._join, system))
        self.channel = self.client.channel
        self._now_s = system.now_s
        engine = Engine(settings, groups, group_ids or range(len(groups)), self.client, loads, system)
        chosen = [(option, wanted[name]) for name, option in OPTIONS.items() if name in wanted]
        self.options: Options = [option(engine, value) for option, value in chosen]
        self._hints = Hints({key: hint for option in self.options for key, hint in option.HINTS.items()})

    def start(self) -> None:
        """Connects and joins the engine, or returns soon without a server. Raises ValueError if the settings
        turn advice into an error."""
        self.channel.start(CONNECT_S, JOIN_S)
        if self._settings.strict_resume_points and self._advice:
            self.channel.close()
            raise ValueError(f"{self._advice} (lmcache.mp.strict_resume_points makes this an error)")

    def reset(self) -> None:
        """vLLM's reset_cache: from now on no page that was computed before may serve a request, because the
        weights may change.

        All further keys start at a new root. So no earlier page can be found, even if its store is still
        under way, or if a server that is gone now restores it later. Nobody waits for the server. It is
        asked to free the memory, unless others may share the pages by name.
        """
        self._root.reset()
        self._start_anew()
        self._clear = None if self._settings.weights_name else self.client.clear()
        logger.info("lmcache: vLLM reset its cache, so pages of the old weights are no longer used")

    def _start_anew(self) -> None:
        self._early.reset()
        for option in self.options:
            option.reset()
        start_anew(self._tracked, self._root.key, self._forget)

    def take_stats(self) -> TransferStats | None:
        """Returns and resets the counts since the last step, with CONNECTED. This side can only have joined
        if all workers have registered."""
        self.stats.data[stats.CONNECTED] = int(self.channel.ready)
        return self.stats.take()

    def bind(self, pool: "BlockPool") -> None:
        self.held.bind(pool)
        self._offers.pool = pool
        for option in self.options:
            option.bind(pool)

    def _join(self, channel: Channel) -> None:
        joined = self.client.join(channel)
        # vLLM accepts any hit length and computes nonsense from a misaligned one.
        if not 0 < joined.chunk_size <= MAX_CHUNK_TOKENS or joined.chunk_size % self._unified:
            raise ValueError(f"the server's chunk size {joined.chunk_size} does not fit this engine")
        self.chunk_size, self._fetches = joined.chunk_size, joined.fetches
        if (clear := self._clear) is not None and not (clear.done and isinstance(clear.reply, Cleared)):
            self._clear = self.client.clear()
        if (advice := self._advise(joined)) and not self._advice:
            self._advice = advice
            logger.info("lmcache: %s", advice)

    # -- lookup -----------------------------------------------------------------------------------

    def matched_tokens(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """vLLM's get_num_new_matched_tokens: (tokens beyond `computed`, load asynchronously), or
        (None, False) to make vLLM ask again. Idempotent: vLLM asks in every step while the request waits."""
        self._root.name(self._start_anew)
        self._early.asked(request.request_id)
        tracked = self._current(request.request_id)
        if tracked is None or not self._loads or request.skip_reading_prefix_cache:
            return 0, False
        limit = tracked.chunks(request.num_tokens) * self.chunk_size
        if tracked.no_load or limit <= computed:
            self._forget(tracked)
            return 0, False
        if any(option.pauses(tracked) for option in self.options):
            return None, False
        if isinstance(state := self._ask(tracked, computed, limit), Asking):
            return None, False
        if any(option.goes_on(tracked, state, computed, limit) for option in self.options):
            self._release(tracked)
            return None, False
        if self._has_states:
            tracked.end_a_step_at_the_fork(computed)
        if state is None or state.found.resume_tokens <= computed:
            if state and state.is_early:
                self._early.accept(tracked.name, computed)
            self._release(tracked)
            return 0, False
        return state.found.resume_tokens - computed, True

    def _ask(self, tracked: Tracked, computed: int, limit: int) -> Asking | Promised | None:
        """The state of the request's lookup: Asking until the next step, Promised with the answer, or None
        if there is no answer."""
        state, now_s = tracked.state, self._now_s()
        if isinstance(state, Promised):
            # If the engine has computed more tokens since, the promise covers more than it needs.
            if computed >= state.computed and now_s - state.since_s < state.found.lease_s / 2:
                return state
            self._release(tracked)
            state = None
        elif state and state.is_early and is_stale(tracked, state, limit, now_s):
            self._forget(tracked)
            state = None
        if state is None:
            if not self.channel.responsive:
                return None
            state = self._send(tracked, computed, limit, self._early.repeats(tracked, limit))
        # A lookup that waits for a tier holds up no step, and no other lookup.
        waits = self._may_wait and not (self._fetches and now_s - state.since_s > FRESH_LOOKUP_S)
        self.channel.poll(state.lookup, LOOKUP_WAIT_S if waits else 0.0)
        self._may_wait &= state.lookup.done or not waits
        return self._answered(tracked, state, computed) if state.lookup.done else state

    def _send(self, tracked: Tracked, computed: int, limit: int, early: bool = False) -> Asking:
        keys, num_tokens = tuple(tracked.keys_of(limit // self.chunk_size)), tracked.request.num_tokens
        name, tenant, speed = tracked.name, tracked.tenant, 0 if tracked.waits else self._prefill.tokens_per_s
        told = (tracked.why, tracked.once)
        question = Lookup(name, keys, computed, limit, num_tokens, speed, early, tenant, *told)
        patience_s = fetch_patience_s(num_tokens) if self._fetches else 0
        lookup = self.client.lookup(question, self._settings.lookup_timeout_s + patience_s)
        tracked.state = asking = Asking(lookup, computed, limit, self._now_s(), early)
        return asking

    def _look_up_early(self, tracked: Tracked) -> None:
        request = tracked.request
        # A tier should not fetch what the engine has itself, which nobody knows yet.
        is_read = self._loads and not request.skip_reading_prefix_cache and not self._fetches
        if not is_read or not self.channel.responsive or self._current(request.request_id) is None:
            return
        keys = tracked.keys_of(tracked.chunks(request.num_tokens))
        if self._early.wants(request.request_id, keys):
            self._send(tracked, 0, len(keys) * self.chunk_size, early=True)

    def _answered(self, tracked: Tracked, asked: Asking, computed: int) -> Asking | Promised | None:
        tracked.state, found, answered_s = None, asked.lookup.reply, self._now_s()
        for option in self.options:
            option.answered(tracked, asked, answered_s)
        if not isinstance(found, Found):
            self.stats.count(stats.LATE_LOOKUPS)
            trace(tracked.request.request_id, "not looked up: %s", asked.lookup.error)
            return None
        if not fits(found, self.groups, self.chunk_size, asked.limit):
            # Whatever a server says, the engine goes on: this is a miss.
            trace(tracked.request.request_id, "not looked up: the answer does not fit the question")
            self.client.forget(asked.lookup)
            return None
        tracked.held, tracked.known = found.held, known_chunks(self.groups, found.held)
        tracked.state = promised = Promised(found, asked.computed, asked.since_s, answered_s, asked.is_early)
        trace(tracked.request.request_id, "can be resumed at %d tokens", found.resume_tokens)
        if computed < asked.computed:
            # The engine has lost tokens meanwhile, so the promise is too small: ask again.
            self._release(tracked)
            return asked
        if asked.is_early and not is_enough(self.groups, tracked, found, computed, asked):
            self._release(tracked)
            return self._ask(tracked, computed, asked.limit)
        return promised

    def new_request(self, request: "Request") -> None:
        """vLLM's on_new_request."""
        lora = request.lora_request
        adapter = self._adapters.key(lora.lora_name, lora.lora_path, lora.lora_int_id) if lora else ()
        tracked = Tracked(request, self._root.key, self._lookahead, adapter=adapter)
        hints = self._hints.read(request.kv_transfer_params)
        for option in self.options:
            option.began(tracked, hints)
        self._tracked[request.request_id] = tracked
        self._look_up_early(tracked)

    def _current(self, request_id: str) -> Tracked | None:
        """The request, without any promises from before the current registration; None without a server."""
        tracked = self._tracked.get(request_id)
        if tracked is None or not self.channel.ready:
            return None
        if tracked.generation != self.channel.generation:
            self._forget(tracked)
            tracked.reset(self.channel.generation, self.chunk_size)
        return tracked

    def _forget(self, tracked: Tracked) -> None:
        """Gives up the server's promise to this request, or the lookup that still asks for one."""
        if isinstance(tracked.state, Asking):
            self.client.forget(tracked.state.lookup)
            tracked.state = None
        self._release(tracked)

    def _release(self, tracked: Tracked) -> None:
        """Gives up the lease of a promise that will not be used any more."""
        if isinstance(state := tracked.state, Promised):
            tracked.state = None
            if state.found.lease_id:
                self.client.release((state.found.lease_id,))

    # -- load -------------------------------------------------------------------------------------

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """vLLM's update_state_after_alloc: the request has its blocks. Zero external tokens mean that vLLM
        chose another connector, or calls again after a load."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.loading:
            return
        if not external_tokens:
            self._release(tracked)
            return
        assert isinstance(tracked.state, Promised), "vLLM loads tokens that this connector did not offer"
        found = tracked.state.found
        computed = found.resume_tokens - external_tokens
        assert computed >= tracked.state.computed
        if tracked.state.is_early:
            self._early.accept(tracked.name, computed)
        key = tracked.keys[found.resume_tokens // self.chunk_size - 1]
        tables = self._offers.tables(blocks.get_block_ids())
        message = load_message(tracked.name, found, key, computed, self.groups, tables)
        wanted = [block for ids in message.block_ids for block in ids]
        assert all(wanted), "vLLM allocated no block where one is needed"
        job_id = self.held.hold(wanted)
        leases = self.client.leases(found.lease_id)
        self._queued.append(LoadJob(job_id, request.request_id, message, leases))
        tracked.loading, tracked.loading_since_s = external_tokens, self._now_s()
        for option in self.options:
            option.loading(tracked, tracked.state.answered_s, tracked.loading_since_s)
        trace(request.request_id, "loading %d tokens, job %d", external_tokens, job_id)

    # -- store ------------------------------------------------------------------------------------

    def step(self, output: "SchedulerOutput") -> StepMetadata:
        """vLLM's build_connector_meta: the loads and stores that the workers start in this step."""
        self._may_wait = True
        if output.num_scheduled_tokens:
            self._root.name(self._start_anew)
        if accepted := self._early.end_step():
            self.client.accept(accepted)
        idle = not output.num_scheduled_tokens
        self._prefill.began(sum(output.num_scheduled_tokens.values()), self._now_s())
        if idle:
            # Without this wait, an idle engine would spin until the answer comes; on few cores that would
            # slow the server down. In other steps no reply is urgent.
            states = (tracked.state for tracked in self._tracked.values())
            asked = (state.lookup for state in states if isinstance(state, Asking))
            lookup = next((lookup for lookup in asked if not lookup.done), None)
            self.channel.poll(lookup, IDLE_WAIT_S)
            if any(option.has_paused() for option in self.options) and lookup is None:
                self.channel.system.sleep(IDLE_WAIT_S)
        metadata = StepMetadata(loads=self._queued, idle=idle)
        self._queued = []
        if self._stores and self.channel.ready:
            for requests, store in stores(self._offers.of_step(output, self._current)):
                if job := self.held.store_job(store):
                    metadata.stores.append(job)
                    for option in self.options:
                        option.storing(job.job_id, requests, store.objects)
        return metadata

    # -- the end of copies and of requests --------------------------------------------------------

    def worker_output(self, output: "KVConnectorOutput") -> None:
        """vLLM's update_connector_output, after each step: frees settled blocks and records failed loads."""
        self._prefill.ended(self._now_s())
        for request_id in output.failed_recving or ():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.no_load = True
        for request_id in output.finished_recving or ():
            if (tracked := self._tracked.get(request_id)) is not None:
                self.stats.count(stats.FAILED_LOADS if tracked.no_load else stats.LOADS)
                self.stats.count(stats.LOADED_TOKENS, 0 if tracked.no_load else tracked.loading)
                outcome = "failed" if tracked.no_load else "ended"
                trace(request_id, "its load of %d tokens %s", tracked.loading, outcome)
                for option in self.options:
                    option.loaded(tracked, tracked.loading, outcome, tracked.loading_since_s, self._now_s())
                tracked.loading = 0
                self._release(tracked)
        if isinstance(report := output.kv_connector_worker_meta, WorkerReport):
            for job_id, workers in report.settled.items():
                if (seconds := self.held.settled(job_id, workers)) is not None:
                    for option in self.options:
                        option.settled(job_id, seconds)

    def has_work(self) -> bool:
        """Whether an idle engine must go on stepping."""
        return self.held.has_work() or any(option.has_work() for option in self.options)

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return [event for option in self.options for event in option.take_events()]

    def finished(self, request: "Request") -> dict[str, Any] | None:
        """vLLM's request_finished: marks the request's chunks as used, gives up its lease, and returns what
        to tell an engine that goes on with this request."""
        was_asked = not self._early.asked(request.request_id)
        tracked = self._current(request.request_id)
        known = self._tracked.pop(request.request_id, None)
        trace(request.request_id, "ended")
        parts = [option.ended(request, tracked) for option in self.options]
        told = {key: value for part in parts for key, value in part.items()} or None
        if tracked is None:
            if known is not None:
                self._forget(known)
            return told
        if isinstance(state := tracked.state, Asking):
            self.client.forget(state.lookup)
        leases = (state.found.lease_id,) if isinstance(state, Promised) and state.found.lease_id else ()
        # Without their keys, the chunks that only this request brought do not count as used again.
        keys = tuple(tracked.keys[: tracked.prompt_chunks]) if was_asked and not tracked.once else ()
        if was_asked:
            self._early.ended(tracked.keys[-2:])
        if leases or tracked.keys:
            self.client.release(leases, keys, tracked.name)
        return told
