"""The scheduler side of the connector decides what to look up, load and store, and which blocks to hold.

It never blocks vLLM's scheduler. Every block that the server reads or writes is held in vLLM's block pool.
"""

import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lmcache_client import options
from lmcache_client.connector import stats
from lmcache_client.connector.held_blocks import HeldBlocks
from lmcache_client.connector.log import Absence, log_state, logger, trace
from lmcache_client.connector.lookups import Lookups
from lmcache_client.connector.metadata import LoadJob, StepMetadata, WorkerReport
from lmcache_client.connector.offers import Offers, stores
from lmcache_client.connector.option import Engine, Hints, Option, Options, replaced
from lmcache_client.connector.rank_servers import rank_servers
from lmcache_client.connector.request import Asking, Promised, Tracked
from lmcache_client.connector.settings import Settings
from lmcache_client.connector.stats import TransferStats
from lmcache_client.connector.weights import Adapters, Root
from lmcache_client.contract.chunk_size import unified_block_size
from lmcache_client.contract.codec import unpacked
from lmcache_client.contract.geometry import MAX_CHUNK_TOKENS
from lmcache_client.contract.messages import Cleared, Joined
from lmcache_client.engine import JOIN_S, load_message
from lmcache_client.server_channel import Channel
from lmcache_client.servers import Servers, Together
from lmcache_client.transport import SYSTEM, System

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


OPTIONS = options.classes()  # here, because an engine runs without the cache if one cannot be imported
IDLE_WAIT_S, CONNECT_S = 0.002, 1.0


class SchedulerSide:
    """The scheduler side of one engine, whose `world_size` workers report each job. `advise` takes what a
    server said, returns advice on resume points or nothing. `lookahead` is that of Tracked. `wanted` has what
    each option, by its name, takes from vLLM's configuration; other options are left out."""

    def __init__(
        self,
        settings: Settings,
        engine_id: str,
        offers: Offers,
        world_size: int,
        loads: bool,
        stores: bool,
        advise: Callable[[Joined], str] = lambda _joined: "",
        lookahead: int = 0,
        wanted: Mapping[str, Any] = types.MappingProxyType({}),
        system: System = SYSTEM,
    ) -> None:
        self._settings = settings
        self.groups, self._offers = offers.groups, offers
        self._stores = stores
        self._root = Root(bool(settings.weights_name), system.random_bytes)
        self._clear: Together | None = None
        """The last request to clear the server; None if vLLM has not reset its cache."""
        self._queued: list[LoadJob] = []
        self.held = HeldBlocks(world_size, system.now_s)
        self.stats = TransferStats()
        self._adapters = Adapters()
        self._advise, self._advice = advise, ""
        self._unified = unified_block_size(self.groups)
        self._lookahead = lookahead
        addresses = [each.address for each in rank_servers(settings, world_size)]
        channels = [Channel(each, self._join, log_state, system, Absence().check) for each in addresses]
        self.client = Servers(channels, engine_id)
        self.channel = self.client.channel
        self._now_s = system.now_s
        engine = Engine(settings, self.groups, offers.group_ids, self.client, loads, system)
        chosen = [(option, wanted[name]) for name, option in OPTIONS.items() if name in wanted]
        self.options: Options = [option(engine, value) for option, value in chosen]
        self._began, self._ended = replaced(self.options, Option.began), replaced(self.options, Option.ended)
        self.lookups = Lookups(engine, self.options, self.stats)
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
        """The chains of all requests start at the root's new key from now on."""
        self.lookups.early.reset()
        for option in self.options:
            option.reset()
        self.held.forget_requests()
        requests = self.lookups.requests
        for request_id, tracked in list(requests.items()):
            self.lookups.forget(tracked)
            if tracked.request.num_computed_tokens:
                # vLLM did not preempt it, so it continues with earlier pages.
                del requests[request_id]
            else:
                requests[request_id] = tracked.anew(self._root.key)

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
        self.lookups.joined(joined)
        if (clear := self._clear) is not None and not (clear.advance() and isinstance(clear.reply, Cleared)):
            self._clear = self.client.clear()
        if (advice := self._advise(joined)) and not self._advice:
            self._advice = advice
            logger.info("lmcache: %s", advice)

    # -- lookup -----------------------------------------------------------------------------------

    def matched_tokens(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """vLLM's get_num_new_matched_tokens: (tokens beyond `computed`, load asynchronously), or
        (None, False) to make vLLM ask again. Idempotent: vLLM asks in every step while the request waits."""
        self._root.adopt_version(self._start_anew)
        return self.lookups.matched_tokens(request, computed)

    def new_request(self, request: "Request") -> None:
        """vLLM's on_new_request."""
        lora = request.lora_request
        adapter = self._adapters.key(lora.lora_name, lora.lora_path, lora.lora_int_id) if lora else ()
        tracked = Tracked(request, self._root.key, self._lookahead, adapter=adapter)
        hints, ignored = self._hints.read(request)
        self.stats.count(stats.IGNORED_HINTS, ignored)
        for began in self._began:
            began(tracked, hints)
        self.lookups.arrived(tracked)

    # -- load -------------------------------------------------------------------------------------

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """vLLM's update_state_after_alloc: the request has its blocks. Zero external tokens mean that vLLM
        chose another connector, or calls again after a load."""
        tracked = self.lookups.requests.get(request.request_id)
        if tracked is None or tracked.loading:
            return
        if not external_tokens:
            self.lookups.release(tracked)
            return
        assert isinstance(tracked.state, Promised), "vLLM loads tokens that this connector did not offer"
        found = tracked.state.found
        computed = found.resume_tokens - external_tokens
        assert computed >= tracked.state.computed
        if tracked.state.is_early:
            self.lookups.early.accept(tracked.name, computed)
        key = tracked.keys[found.resume_tokens // self.lookups.chunk_size - 1]
        tables = self._offers.tables(blocks.get_block_ids())
        message = load_message(tracked.name, found, key, computed, self.groups, tables)
        wanted = [block for ids in message.block_ids for block in unpacked(ids)]
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
        self.lookups.may_wait = True
        if output.num_scheduled_tokens:
            self._root.adopt_version(self._start_anew)
        if accepted := self.lookups.early.end_step():
            self.client.accept(accepted)
        idle = not output.num_scheduled_tokens
        self.lookups.prefill.began(sum(output.num_scheduled_tokens.values()), self._now_s())
        if idle:
            # Without this wait, an idle engine would spin until the answer comes; on few cores that would
            # slow the server down. In other steps no reply is urgent.
            states = (tracked.state for tracked in self.lookups.requests.values())
            asked = (state.lookup for state in states if isinstance(state, Asking))
            lookup = next((lookup for lookup in asked if not lookup.advance()), None)
            self.channel.poll(lookup, IDLE_WAIT_S)
            if any(option.has_paused() for option in self.options) and lookup is None:
                self.channel.system.sleep(IDLE_WAIT_S)
        metadata = StepMetadata(loads=self._queued, idle=idle)
        self._queued = []
        if self._stores and self.channel.ready:
            whose = self.lookups.requests, self.lookups.current, self.channel.generation
            for requests, store in stores(self._offers.of_step(output, *whose)):
                if job := self.held.store_job(store, requests):
                    metadata.stores.append(job)
                    for option in self.options:
                        option.storing(requests, store.objects)
        return metadata

    # -- the end of copies and of requests --------------------------------------------------------

    def worker_output(self, output: "KVConnectorOutput") -> None:
        """vLLM's update_connector_output, after each step: frees settled blocks and records failed loads."""
        self.lookups.prefill.ended(self._now_s())
        for request_id in output.failed_recving or ():
            if (tracked := self._loading(request_id)) is not None:
                tracked.no_load = True
        for request_id in output.finished_recving or ():
            if (tracked := self._loading(request_id)) is not None:
                self.stats.count(stats.FAILED_LOADS if tracked.no_load else stats.LOADS)
                self.stats.count(stats.LOADED_TOKENS, 0 if tracked.no_load else tracked.loading)
                outcome = "failed" if tracked.no_load else "ended"
                trace(request_id, "its load of %d tokens %s", tracked.loading, outcome)
                for option in self.options:
                    option.loaded(tracked, tracked.loading, outcome, tracked.loading_since_s, self._now_s())
                tracked.loading = 0
                self.lookups.release(tracked)
        if isinstance(report := output.kv_connector_worker_meta, WorkerReport):
            for job_id, workers in report.settled.items():
                if (job := self.held.settled(job_id, workers)) is not None:
                    for option in self.options:
                        option.settled(job.requests, self._now_s() - job.started_s)

    def _loading(self, request_id: str) -> Tracked | None:
        """The request, if it is this connector that loads for it."""
        tracked = self.lookups.requests.get(request_id)
        return tracked if tracked is not None and tracked.loading else None

    def has_work(self) -> bool:
        """Whether an idle engine must go on stepping."""
        return self.held.has_work() or any(option.has_work() for option in self.options)

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return [event for option in self.options for event in option.take_events()]

    def finished(self, request: "Request") -> dict[str, Any] | None:
        """vLLM's request_finished: marks the request's chunks as used, gives up its lease, and returns what
        to tell an engine that goes on with this request."""
        was_asked = not self.lookups.early.asked(request.request_id)
        tracked = self.lookups.current(request.request_id)
        known = self.lookups.requests.pop(request.request_id, None)
        trace(request.request_id, "ended")
        parts = [ended(request, tracked) for ended in self._ended]
        told = {key: value for part in parts for key, value in part.items()} or None
        if tracked is None:
            if known is not None:
                self.lookups.forget(known)
            return told
        if isinstance(state := tracked.state, Asking):
            self.client.forget(state.lookup)
        leases = (state.found.lease_id,) if isinstance(state, Promised) and state.found.lease_id else ()
        # Otherwise the chunks that only this request brought would count as used again.
        keys = tuple(tracked.keys) if was_asked and not tracked.once else ()
        answers = max(len(keys) - tracked.prompt_chunks, 0)
        if was_asked:
            self.lookups.early.ended(tracked.keys[-2:])
        if leases or tracked.keys:
            self.client.release(leases, keys, tracked.name, answers)
        return told
