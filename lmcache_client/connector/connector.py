"""LMCacheMPConnector implements vLLM's connector interface by its scheduler side and its worker side.

Interface: vLLM's distributed/kv_transfer/kv_connector/v1/base.py; surface.json lists what is used of it.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from lmcache_client.connector import support, translate
from lmcache_client.connector.log import logger
from lmcache_client.connector.metadata import StepMetadata, WorkerReport
from lmcache_client.connector.offers import Offers
from lmcache_client.connector.plugin import SWITCH
from lmcache_client.connector.scheduler import OPTIONS, SchedulerSide
from lmcache_client.connector.settings import parse
from lmcache_client.connector.stats import PromMetrics, TransferStats
from lmcache_client.connector.support import UnsupportedError
from lmcache_client.connector.uncached import Uncached, log_uncached, tell_server
from lmcache_client.connector.vllm_surface import caller
from lmcache_client.connector.weights import in_thread
from lmcache_client.connector.worker import Results, WorkerSide
from lmcache_client.contract.geometry import Geometry, GeometryError, GroupSpec
from lmcache_client.contract.keys import Details
from lmcache_client.contract.version import VERSION
from lmcache_client.memory.cuda import CudaExport, ExportError, check_proof_places
from lmcache_client.memory.host import HostExport

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:
    CacheHitSource = None  # vLLM 0.31 does not count hits by source

WEIGHTS_WAIT_S = 1.0
NOT_YET = "lmcache: this engine is not cached until the server fits: %s"

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class LMCacheMPConnector(Uncached):
    """Connects a vLLM engine to the lmcache server of its machine.

    If the cache is not proven to restore this vLLM, model and settings exactly, the engine runs as if it had
    no connector, and one line in its log says why. Raises ValueError if the configuration is wrong.
    """

    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._engine_id: str = transfer.engine_id
        self._settings, ignored = parse(transfer.kv_connector_extra_config)
        self._group_ids: tuple[int, ...] = ()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._idle = False
        self._block_size_checked = False
        self._results = Results()
        try:
            support.check_vllm(self._settings.untested_vllm)
            dcp_size = vllm_config.parallel_config.decode_context_parallel_size
            self._group_ids, sizes = support.shared_groups(kv_cache_config, dcp_size)
            kept = [kv_cache_config.kv_cache_groups[index] for index in self._group_ids]
            self._shared = dataclasses.replace(kv_cache_config, kv_cache_groups=kept)
            groups = translate.group_specs(self._shared, dcp_size)
            support.check_supported(vllm_config, groups, sizes)
        except (UnsupportedError, GeometryError) as error:
            self._supported = False
            if role == KVConnectorRole.SCHEDULER:
                self._give_up(error)
            return
        self._supported = True
        if role == KVConnectorRole.SCHEDULER:
            self._init_scheduler(groups, ignored)
        else:
            name = functools.partial(translate.weights, vllm_config, self._settings.weights_name)
            self._weights = in_thread(name)

    def _give_up(self, error: Exception) -> None:
        """Reports why this engine is not cached."""
        reason = f"{'a KV cache beyond the limits: ' if isinstance(error, GeometryError) else ''}{error}"
        log_uncached(reason)
        self._teller = tell_server(self._vllm_config, reason)

    def _init_scheduler(self, groups: tuple[GroupSpec, ...], ignored: list[str]) -> None:
        vllm_config, transfer = self._vllm_config, self._vllm_config.kv_transfer_config
        if transfer.kv_connector_module_path is None:
            told = "lmcache: %s is that of lmcache-mp %s; with %s=0 it is vLLM's own, which needs LMCache"
            logger.info(told, transfer.kv_connector, VERSION, SWITCH)
        # A MultiConnector gives a copy to each of its connectors; vLLM reads the original.
        outer = caller("_ktc_kv_transfer_config")
        policy = transfer if outer is None else outer._vllm_config.kv_transfer_config
        if policy.kv_load_failure_policy != "recompute":
            # With vLLM's default, a lost cache makes requests fail. vLLM reads the policy after it has
            # built its connector.
            policy.kv_load_failure_policy = "recompute"
            logger.info("lmcache: vLLM recomputes a load that fails (kv_load_failure_policy=recompute)")
        for key in ignored:
            logger.warning("lmcache: %s has no effect with this connector", key)
        can_resume = support.can_resume(vllm_config, self._shared)
        if not can_resume:
            logger.warning(
                "lmcache: this engine stores but does not load, because it cannot resume in the middle of a "
                "prompt (MLA on a CPU, or neither chunked prefill nor prefix caching)"
            )
        block_bytes = translate.block_bytes(self._shared)
        wanted = {name: option.wanted(vllm_config, self._shared) for name, option in OPTIONS.items()}
        everything = self._settings.store_everything
        offers = Offers(
            groups,
            block_bytes=() if everything else block_bytes,
            state_interval=vllm_config.cache_config.prefix_cache_retention_interval,
            drafts=vllm_config.speculative_config is not None,
            group_ids=self._group_ids,
        )
        self._scheduler = SchedulerSide(
            self._settings,
            self._engine_id,
            offers,
            vllm_config.parallel_config.world_size,
            loads=transfer.is_kv_consumer and can_resume,
            stores=transfer.is_kv_producer,
            advise=functools.partial(support.on_joined, vllm_config, groups, block_bytes, everything),
            lookahead=vllm_config.num_prefill_lookahead_tokens,
            wanted={name: value for name, value in wanted.items() if value},
        )
        self._scheduler.start()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """The preferred layout; vLLM makes its own choice if a backend does not have this one."""
        if sys._getframe(1).f_code.co_name == "get_required_kvcache_layout":
            # MultiConnector asks. It raises if two of its connectors prefer different layouts, and tells
            # none of them about the others.
            return None
        settings, _ = parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        try:
            support.check_vllm(settings.untested_vllm)
        except UnsupportedError:
            return None
        return support.preferred_layout(vllm_config)

    # -- scheduler side ---------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        if self._scheduler is not None:
            if not self._block_size_checked:
                # Checked only here, because vLLM sets the wrong block size after it has built the connector
                # and the scheduler.
                self._block_size_checked = True
                if wrong := support.restore_block_size(self._vllm_config, self._scheduler.groups):
                    logger.debug("lmcache: corrected the block size %d in vLLM's scheduler", wrong)
            self._scheduler.new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        scheduler = self._scheduler
        return (0, False) if scheduler is None else scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """The groups that a load fills. vLLM computes windows that are not among them again."""
        return self._group_ids

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return StepMetadata() if self._scheduler is None else self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if self._scheduler is not None:
            self._scheduler.worker_output(connector_output)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None if self._scheduler is None else self._scheduler.finished(request)

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_work()

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return self._scheduler.take_events() if self._scheduler is not None else ()

    # -- worker side ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        if not self._supported:
            return
        self._kv_caches = kv_caches
        try:
            geometry, export = self._exported()
        except (UnsupportedError, ExportError, GeometryError) as error:
            self._give_up(error)
            return
        rank = self._vllm_config.parallel_config.rank
        model = translate.model_tag(self._vllm_config)
        self._worker = WorkerSide(self._settings, self._engine_id, rank, model, geometry, export)
        # A server that refuses this engine's sizes ends it here, if the weights are named by then.
        wait([self._weights], WEIGHTS_WAIT_S)
        if self._weights.done():
            try:
                self._worker.start(self._weights.result())
            except ValueError:
                self._worker.close()
                raise
        else:
            logger.info("lmcache: this engine is cached as soon as its weights have been read, to name them")
            self._weights.add_done_callback(self._start_late)

    def _start_late(self, weights: "Future[Details]") -> None:
        try:
            if self._worker is not None:
                self._worker.start(weights.result())
        except ValueError as error:
            logger.error(NOT_YET, error)

    def _exported(self) -> tuple[Geometry, HostExport | CudaExport]:
        """Where the pages of the KV caches are, and their memory. Raises what `_give_up` takes."""
        geometry, buffers = translate.geometry(self._vllm_config, self._shared, self._kv_caches)
        if self._vllm_config.device_config.device_type == "cpu":
            return geometry, HostExport(buffers)
        check_proof_places(geometry, len(buffers))
        # An earlier vLLM that sleeps does not say so, and frees memory that the server still has.
        tells = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
        export = CudaExport(buffers, lambda: int(torch.cuda.current_stream().cuda_stream), tells)
        if any(group.kind == "recurrent" for group in geometry.groups):
            logger.warning("lmcache: recurrent layers are untested on GPUs: compare outputs (docs/gpu.md)")
        return geometry, export

    def unregister_kv_caches(self) -> None:
        """vLLM calls this before it frees the KV caches to sleep, perhaps more than once."""
        if self._worker is not None and not self._worker.is_asleep:
            self._worker.sleep()

    def restore_kv_caches(self) -> None:
        """vLLM calls this when it has allocated the KV caches anew, at the same addresses."""
        if self._worker is None or not self._worker.is_asleep:
            return
        try:
            self._worker.wake(self._exported()[1])
        except (UnsupportedError, ExportError, GeometryError) as error:
            logger.error("lmcache: this worker loads and stores nothing more; restart vLLM: %s", error)
        except ValueError as error:
            logger.error(NOT_YET, error)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """vLLM calls this when it has submitted all that may write to the blocks of the loads: earlier steps,
        and this step's zeroing and copying of blocks."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            assert isinstance(connector_metadata, StepMetadata)
            self._worker.submit(connector_metadata.loads)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, StepMetadata)
            self._worker.submit(metadata.stores)
            self._idle = metadata.idle

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is not None:
            self._results = self._worker.collect(self._idle)
        return KVConnectorTransferResults(
            finished_recving=self._results.loaded, failed_recving=self._results.failed
        )

    def build_connector_worker_meta(self) -> WorkerReport | None:
        settled = self._results.settled
        self._results = Results()
        return WorkerReport(settled) if settled else None

    # -- both -------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TransferStats | None:
        if self._scheduler is not None:
            return self._scheduler.take_stats()
        return self._worker.stats.take() if self._worker is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], Any]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool | None:
        """vLLM calls this when it resets its cache, usually because its weights change. It needs no
        server."""
        if self._scheduler is None:
            return None
        self._scheduler.reset()
        return True

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.channel.close()
        if self._worker is not None:
            self._worker.close()
        self._kv_caches = {}  # vLLM frees these tensors, but may keep this object
        super().shutdown()
        self._scheduler = self._worker = self._teller = None
