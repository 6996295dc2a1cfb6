"""Everything of vLLM that the connector uses, with the first version that has it.

vLLM's connector interface is not stable, and what surrounds it is not public. An engine asks `missing()` at
its start and runs uncached if a name is gone; a test asks it on every version that is supported. What the
connector imports from vLLM by name is not repeated here: an import that fails has the same effect.

"0.28" stands for 0.28 and earlier: nobody has looked further back.
"""

import inspect
from typing import Any

from vllm.config.cache import CacheConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

USED: dict[Any, str] = {
    KVConnectorBase_V1: """
        __init__(vllm_config, role, kv_cache_config)                     0.28
        _vllm_config                                                     0.28
        _kv_cache_config                                                 0.28
        _get_connector_metadata()                                        0.28
        get_required_kvcache_layout(vllm_config)                         0.28
        requires_kv_delivery                                             0.28
        bind_gpu_block_pool(gpu_block_pool)                              0.28
        on_new_request(request)                                          0.28
        get_num_new_matched_tokens(request, num_computed_tokens)         0.28
        update_state_after_alloc(request, blocks, num_external_tokens)   0.28
        build_connector_meta(scheduler_output)                           0.28
        update_connector_output(connector_output)                        0.28
        has_pending_push_work()                                          0.28
        register_kv_caches(kv_caches)                                    0.28
        start_load_kv(forward_context, kwargs)                           0.28
        wait_for_layer_load(layer_name)                                  0.28
        save_kv_layer(layer_name, kv_layer, attn_metadata, kwargs)       0.28
        wait_for_save()                                                  0.28
        get_transfer_results(finished_req_ids)                           0.30
        build_connector_worker_meta()                                    0.28
        get_kv_connector_stats()                                         0.28
        build_kv_connector_stats(data)                                   0.28
        build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)  0.28
        reset_cache()                                                    0.28
        shutdown()                                                       0.28
    """,
    SupportsHMA: "request_finished_all_groups(request, block_ids)  0.28",
    KVConnectorTransferResults: """
        finished_recving  0.30
        failed_recving    0.30
    """,
    KVConnectorOutput: """
        finished_recving          0.28
        failed_recving            0.30
        kv_connector_worker_meta  0.28
    """,
    KVConnectorStats: "data  0.28",
    KVConnectorPromMetrics: """
        __init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)  0.28
        observe(transfer_stats_data, engine_idx)                                 0.28
    """,
    create_metric_per_engine: "(metric, per_engine_labelvalues)  0.28",
    BlockPool: """
        blocks                       0.28
        num_gpu_blocks               0.28
        touch(blocks)                0.28
        free_blocks(ordered_blocks)  0.28
    """,
    KVCacheBlocks: "get_block_ids()  0.28",
    generate_block_hash_extra_keys: "(request, start_token_idx, end_token_idx, start_mm_idx)  0.28",
    Request: """
        request_id                 0.28
        num_tokens                 0.28
        all_token_ids              0.28
        skip_reading_prefix_cache  0.28
    """,
    SchedulerOutput: """
        num_scheduled_tokens      0.28
        scheduled_new_reqs        0.28
        scheduled_cached_reqs     0.28
        kv_connector_block_state  0.29
    """,
    NewRequestData: """
        req_id               0.28
        num_computed_tokens  0.28
    """,
    CachedRequestData: """
        req_ids              0.28
        num_computed_tokens  0.28
    """,
    KVConnectorBlockState: """
        get_block_ids(req_id)    0.30
        boundary_state_offloads  0.29
    """,
    KVCacheConfig: """
        num_blocks        0.28
        kv_cache_tensors  0.28
        kv_cache_groups   0.28
        kv_cache_layout   0.29
    """,
    KVCacheTensor: """
        layers        0.29
        layer_stride  0.29
        block_stride  0.29
        offset        0.29
    """,
    KVCacheGroupSpec: """
        layer_names         0.28
        kv_cache_spec       0.28
        host_resident       0.30
        enable_kv_transfer  0.30
    """,
    KVCacheSpec: """
        block_size        0.28
        page_size_bytes   0.28
        prefix_cacheable  0.29
    """,
    AttentionSpec: """
        dtype          0.28
        kv_quant_mode  0.28
    """,
    MLAAttentionSpec: "max_tp_shards  0.31",
    SlidingWindowSpec: """
        sliding_window         0.28
        extra_retained_tokens  0.28
    """,
    ChunkedLocalAttentionSpec: "attention_chunk_size  0.28",
    MambaSpec: """
        dtypes                0.28
        real_page_size_bytes  0.30
    """,
    UniformTypeKVCacheSpecs: """
        kv_cache_specs  0.28
        first_spec      0.29
    """,
    CacheConfig: """
        block_size                       0.28
        cache_dtype                      0.28
        enable_prefix_caching            0.28
        mamba_cache_mode                 0.28
        prefix_cache_retention_interval  0.29
    """,
    KVTransferConfig: """
        engine_id                  0.28
        is_kv_producer             0.28
        is_kv_consumer             0.28
        kv_connector_extra_config  0.28
        kv_load_failure_policy     0.28
    """,
}
"""By class or function: one name a line, with its arguments where vLLM calls it or is called with them."""


def missing() -> list[str]:
    """What this vLLM does not have of USED, as `Class.name(arguments)`."""
    return [
        f"{owner.__name__}{'' if line.startswith('(') else '.'}{line}"
        for owner, lines in USED.items()
        for line in (each.strip().rpartition(" ")[0].strip() for each in lines.strip().splitlines())
        if not _has(owner, line)
    ]


def _has(owner: Any, line: str) -> bool:
    name, called, arguments = line.rstrip(")").partition("(")
    found = owner
    if name:
        try:
            found = inspect.getattr_static(owner, name)
        except AttributeError:
            return name in _fields(owner)
    if not called:
        return True
    if isinstance(found, classmethod):
        found = found.__func__
    has = [each for each in inspect.signature(found).parameters if each not in ("self", "cls")]
    wanted = [each.strip() for each in arguments.split(",") if each.strip()]
    return has[: len(wanted)] == wanted


def _fields(owner: Any) -> set[str]:
    """Attributes that only instances have: annotated fields, and what `__init__` assigns."""
    names: set[str] = set()
    for each in owner.__mro__:
        names |= set(vars(each).get("__annotations__", ()))
        code = getattr(vars(each).get("__init__"), "__code__", None)
        names |= set(code.co_names) if code is not None else set()
    return names
