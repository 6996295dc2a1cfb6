"""The worker side of the connector: registers the KV cache memory, passes loads and stores on, reports.

Every request to the server is sent when the compute that was submitted before it is over: after a step's
forward pass, and on a GPU when the GPU has come as far.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_client.channel import Channel, ChannelError, Pending, RefusedError
from lmcache_client.connector import stats
from lmcache_client.connector.log import log_state, logger
from lmcache_client.connector.metadata import LoadJob, StepMetadata, StoreJob, WorkerReport
from lmcache_client.connector.settings import Settings
from lmcache_client.connector.stats import TransferStats
from lmcache_client.contract import messages
from lmcache_client.contract.geometry import Geometry
from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.messages import Stored
from lmcache_client.engine import REGISTER_S, Export, Worker
from lmcache_client.transport import SYSTEM, System

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults


CONNECT_S = 1.0
STORE_TIMEOUT_S = 60.0
IDLE_WAIT_S = 0.002
FATAL_AT_START = (messages.CONFIGURATION, messages.NO_ACCESS, messages.WRONG_VERSION, messages.BAD_REQUEST)


@dataclass
class _InFlight:
    """A job and its request, once that is sent; `open` until it has been accounted for."""

    job: LoadJob | StoreJob
    started_s: float
    pending: Pending | None = None
    open: bool = True


@dataclass
class Results:
    """What one step's poll brought: for vLLM, by request id, and for the scheduler side, by job id."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    settled: Counter[int] = field(default_factory=Counter)


class WorkerSide:
    """See the module. `export` has the memory that `geometry` describes."""

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
        self._jobs: dict[int, _InFlight] = {}
        self._settled: Counter[int] = Counter()
        self.stats = TransferStats()
        self.channel = Channel(settings.address, self._register, log_state, system)
        self.client = Worker(self.channel, engine_id, rank, model, geometry, export)

    def start(self) -> None:
        """Connect and register. Without a server this returns after a moment, and the engine runs
        without a cache until one appears. Raises ValueError when the server refuses the engine."""
        self.channel.start(CONNECT_S, REGISTER_S)
        refusal = self.channel.refusal
        if refusal is not None and refusal.code in FATAL_AT_START:
            self.close()
            raise ValueError(f"the lmcache server refused this engine: {refusal}")
        if not self.channel.ready:
            logger.warning(
                "lmcache: no server at %s yet: requests are computed without it until it appears "
                "(start one with 'lmcache server')",
                self._settings.address,
            )

    def _register(self, _channel: Channel) -> None:
        if warning := self.client.register().warning:
            logger.warning("lmcache: %s", warning)

    def submit(self, metadata: StepMetadata) -> None:
        """Start the step's loads and stores; called when its forward pass has been submitted."""
        now_s = self.channel.system.now_s()
        flying = [_InFlight(each, now_s) for each in metadata.loads]
        for store in metadata.stores:
            if self.channel.ready:
                flying.append(_InFlight(store, now_s))
            else:
                self._settled[store.job_id] += 1
        if not flying:
            return
        self._jobs.update((each.job.job_id, each) for each in flying)

        def send() -> None:
            for each in flying:
                if isinstance(each.job, LoadJob):
                    each.pending = self.client.load(each.job.message, self._settings.load_timeout_s)
                else:
                    each.pending = self.client.store(each.job.message, STORE_TIMEOUT_S)

        # A destination may still be read, and a source is still written, by what is being computed.
        self.client.export.after_compute(send)

    def close(self) -> None:
        self.client.export.close()
        self.channel.close()

    def collect(self, idle: bool) -> Results:
        """Take in the server's answers; an `idle` step may wait a moment for one."""
        results = Results(settled=self._settled)
        self._settled = Counter()
        if idle and self._jobs:
            waited_for = next(iter(self._jobs.values())).pending
            self.channel.poll(waited_for, IDLE_WAIT_S)
            if waited_for is None or not waited_for.done:
                self.channel.system.sleep(IDLE_WAIT_S)
        self.channel.poll()
        for job_id, each in list(self._jobs.items()):
            pending = each.pending
            if pending is None:
                continue
            if each.open and pending.done:
                each.open = False
                if isinstance(each.job, LoadJob):
                    self._loaded(each.job, pending, each.started_s, results)
                else:
                    self._stored(pending)
            if pending.settled:
                del self._jobs[job_id]
                results.settled[job_id] += 1
        return results

    def _loaded(self, load: LoadJob, pending: Pending, started_s: float, results: Results) -> None:
        results.loaded.add(load.request_id)
        self.stats.observe_load(self.channel.system.now_s() - started_s)
        if pending.error is not None:
            results.failed.add(load.request_id)
            _log_failed_load(load, pending.error)
            return
        blocks = zip(self.client.geometry.groups, load.message.block_ids, strict=True)
        self.stats.count(stats.LOADED_BYTES, sum(group.block_bytes * len(ids) for group, ids in blocks))

    def _stored(self, pending: Pending) -> None:
        reply = pending.reply
        if isinstance(reply, Stored):
            self.stats.count(stats.STORED, reply.stored)
            self.stats.count(stats.PRESENT, reply.present)
            self.stats.count(stats.DROPPED, reply.dropped)
        else:
            self.stats.count(stats.FAILED_STORES)


def transfer_results(results: Results) -> "KVConnectorTransferResults":
    """For vLLM: a failed load is finished as well."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(finished_recving=results.loaded, failed_recving=results.failed)


def worker_report(results: Results) -> WorkerReport | None:
    """For the scheduler side; None when there is nothing to say."""
    return WorkerReport(results.settled) if results.settled else None


def _log_failed_load(load: LoadJob, error: ChannelError) -> None:
    # An expired lease or a lost server is the contract at work; anything else deserves a look.
    expected = not isinstance(error, RefusedError) or error.code in (
        messages.EXPIRED,
        messages.NOT_REGISTERED,
    )
    (logger.info if expected else logger.warning)(
        "lmcache: request %s is computed, its load failed: %s", load.request_id, error
    )
