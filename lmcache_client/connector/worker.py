"""The worker side of the connector registers the KV cache memory, requests loads and stores, and reports.

A request is sent only when all compute that was submitted before it has finished. On a CPU that is at once.
Loads are submitted before the forward pass of their step, because that touches none of their blocks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from lmcache_client.connector import stats
from lmcache_client.connector.log import log_state, logger
from lmcache_client.connector.metadata import LoadJob, StoreJob
from lmcache_client.connector.rank_servers import rank_servers
from lmcache_client.connector.settings import Settings
from lmcache_client.connector.stats import TransferStats
from lmcache_client.contract import messages
from lmcache_client.contract.codec import shown, unpacked
from lmcache_client.contract.endpoint import start_command
from lmcache_client.contract.geometry import Geometry
from lmcache_client.contract.keys import Details, ModelTag
from lmcache_client.contract.messages import EXPIRED, NOT_REGISTERED, Done, Stored
from lmcache_client.engine import Export, Worker
from lmcache_client.memory.cuda import CudaExport
from lmcache_client.server_channel import Channel, ChannelError, Pending, RefusedError, unsent
from lmcache_client.transport import SYSTEM, System

CONNECT_S = 1.0
STORE_TIMEOUT_S = 60.0
IDLE_WAIT_S = 0.002
GIVE_BACK_S, GPU_END_S, END_S = 10.0, 3.0, 1.0
"""How long a worker waits until the server has unmapped its memory: when it goes to sleep, and when it ends.
vLLM kills one that takes 5 s to end."""


@dataclass
class _InFlight:
    """A job and, once it has been sent, its request. `open` means that its result has not been recorded."""

    job: LoadJob | StoreJob
    started_s: float
    pending: Pending | None = None
    open: bool = True


@dataclass
class Results:
    """The results of a step: loads by request id for vLLM, settled jobs by id for the scheduler side."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    settled: Counter[int] = field(default_factory=Counter)


class WorkerSide:
    """The worker side of one worker; `export` has the memory that `geometry` describes."""

    def __init__(
        self,
        settings: Settings,
        engine_id: str,
        rank: int,
        model: ModelTag,
        geometry: Geometry,
        export: Export,
        system: System = SYSTEM,
    ) -> None:
        self._settings = settings
        self._system = system
        servers = rank_servers(settings, model.world_size)
        self._server = next(number for number, each in enumerate(servers) if rank in each.ranks)
        details = (*model.details, *servers[self._server].details(model.world_size))
        model = msgspec.structs.replace(model, details=details)
        self._jobs: dict[int, _InFlight] = {}
        self._settled: Counter[int] = Counter()
        self._has_failed = False
        self.stats = TransferStats()
        self.channel = Channel(servers[self._server].address, self._register, log_state, system, self._turn)
        self.client = Worker(self.channel, engine_id, rank, model, geometry, export)
        self.is_asleep = self._is_named = False
        self._starting = system.lock()

    def start(self, weights: Details = ()) -> None:
        """Connects and registers, unless the engine sleeps; `weights` are the details of the model that say
        which weights it has. Without a server, or if it refuses the engine, this returns soon, and the engine
        runs without a cache until a server accepts it. Raises ValueError if the sizes that the server was
        started with do not fit; until `close`, it asks again."""
        with self._starting:
            model = self.client.model
            self.client.model = msgspec.structs.replace(model, details=(*model.details, *weights))
            self._is_named = True
            if not self.is_asleep:
                self._connect()

    def _connect(self) -> None:
        self.channel.start(CONNECT_S, self.client.register_s)
        refusal = self.channel.refusal
        if refusal is not None and refusal.code == messages.CONFIGURATION:
            raise ValueError(f"the lmcache server refused this engine: {refusal}")
        if refusal is None and not self.channel.ready and not self.is_asleep:
            logger.warning(
                "lmcache: no server at %s yet: requests are computed without it until it appears "
                "(start one with '%s')",
                self.channel.address,
                start_command(self.channel.address),
            )

    def _register(self, _channel: Channel) -> None:
        if warning := self.client.register().warning:
            logger.warning("lmcache: %s", shown(warning))

    def _turn(self, channel: Channel) -> None:
        if not channel.ready:
            self.client.export.take_back()

    def submit(self, jobs: Sequence[LoadJob | StoreJob]) -> None:
        """Starts loads before the step's forward pass is submitted, and stores after it: the GPU may still be
        reading the blocks of the loads, and writing those of the stores."""
        now_s = self.channel.system.now_s()
        in_flight = []
        for job in jobs:
            if isinstance(job, LoadJob) or self.channel.ready:
                in_flight.append(_InFlight(job, now_s))
            else:
                self._settled[job.job_id] += 1
        self._jobs.update((item.job.job_id, item) for item in in_flight)
        if self.is_asleep:
            self._end_jobs()
        if self.is_asleep or not in_flight:
            return

        def send() -> None:
            for item in in_flight:
                if isinstance(item.job, LoadJob):
                    message = item.job.message
                    if item.job.leases:
                        message = msgspec.structs.replace(message, lease_id=item.job.leases[self._server])
                    item.pending = self.channel.submit(message, self._settings.load_timeout_s)
                else:
                    item.pending = self.channel.submit(item.job.message, STORE_TIMEOUT_S)

        self.client.export.after_compute(send)

    def close(self) -> None:
        self.channel.close(GPU_END_S if isinstance(self.client.export, CudaExport) else END_S)
        self.client.export.close()

    def sleep(self) -> None:
        """Has the server give back the memory, which vLLM will free. Until `wake`, nothing is copied."""
        self.is_asleep = True
        if not self.channel.close(GIVE_BACK_S):
            logger.warning(
                "lmcache: the server at %s has not confirmed that it gave this engine's memory back: if "
                "vLLM cannot wake up for lack of memory, restart the server",
                self.channel.address,
            )
        self.client.export.close()
        self._end_jobs()

    def _end_jobs(self) -> None:
        """Nobody sends what still waits. What the server still copies is no longer this engine's memory."""
        for item in self._jobs.values():
            if item.pending is None or not item.pending.settled:
                item.pending = unsent("this engine sleeps")

    def wake(self, export: Export) -> None:
        """Registers the memory that the engine has now, as soon as its weights have a name. Raises ValueError
        as `start` does."""
        with self._starting:
            self.channel = Channel(self.channel.address, self._register, log_state, self._system, self._turn)
            self.client = replace(self.client, channel=self.channel, export=export)
            self.is_asleep = False
            if self._is_named:
                self._connect()

    def collect(self, idle: bool) -> Results:
        """Collects the server's replies; an `idle` step may wait briefly for one."""
        results = Results(settled=self._settled)
        self._settled = Counter()
        if idle and self._jobs:
            waited_for = next(iter(self._jobs.values())).pending
            self.channel.poll(waited_for, IDLE_WAIT_S)
            if waited_for is None or not waited_for.settled:
                self.channel.system.sleep(IDLE_WAIT_S)
        if self._jobs:
            self.channel.poll()
        failure = self._failure()
        for job_id, item in list(self._jobs.items()):
            if item.pending is None and failure:
                item.pending = unsent(failure)
            pending = item.pending
            if pending is None:
                continue
            if item.open and pending.done:
                item.open = False
                if isinstance(item.job, LoadJob):
                    self._loaded(item.job, pending, item.started_s, results)
                else:
                    self._stored(item.job, pending)
            if pending.settled:
                del self._jobs[job_id]
                results.settled[job_id] += 1
        return results

    def _failure(self) -> str:
        """Why jobs that still wait will never be sent; empty while all is well. Call this before you look at
        the jobs."""
        failure = self.client.export.failure
        if failure and not self._has_failed:
            self._has_failed = True
            logger.error("lmcache: %s: this worker loads and stores nothing more; restart vLLM", failure)
        return failure

    def _loaded(self, load: LoadJob, pending: Pending, started_s: float, results: Results) -> None:
        results.loaded.add(load.request_id)  # vLLM also expects a failed load here
        self.stats.observe_load(self.channel.system.now_s() - started_s)
        if not isinstance(pending.reply, Done):
            results.failed.add(load.request_id)
            error = pending.error or ChannelError("the server did not answer the question")
            # An expired lease or a lost server is normal; any other error needs attention.
            usual = not isinstance(error, RefusedError) or error.code in (EXPIRED, NOT_REGISTERED)
            log = logger.info if usual else logger.warning
            log("lmcache: request %s is computed because its load failed: %s", load.request_id, error)
            return
        blocks = zip(self.client.geometry.groups, map(unpacked, load.message.block_ids), strict=True)
        self.stats.count(stats.LOADED_BYTES, sum(group.block_bytes * len(ids) for group, ids in blocks))

    def _stored(self, store: StoreJob, pending: Pending) -> None:
        reply = pending.reply
        told = reply.stored + reply.present + reply.dropped if isinstance(reply, Stored) else 0
        if isinstance(reply, Stored) and told == len(store.message.objects):
            self.stats.count(stats.STORED, reply.stored)
            self.stats.count(stats.PRESENT, reply.present)
            self.stats.count(stats.DROPPED, reply.dropped)
        else:
            self.stats.count(stats.FAILED_STORES)
