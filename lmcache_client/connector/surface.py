"""Lists everything that the connector uses from vLLM, with the first version that has it.

vLLM's connector interface is not stable, and its surroundings are not public. An engine calls `missing()` at
startup and runs uncached if a name is gone; a test calls it for every supported version. Names that the
connector imports from vLLM are not repeated here, because a failed import has the same effect.
"""

import inspect
import re
from typing import Any

from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
from vllm.lora.request import LoRARequest
from vllm.platforms.interface import Platform
from vllm.tracing import extract_trace_context, instrument_manual
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.core.sched import output
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

USED: dict[Any, dict[str, str]] = {
    base.KVConnectorBase_V1: {
        "0.28": """__init__(vllm_config, role, kv_cache_config) _vllm_config _kv_cache_config
            _get_connector_metadata() get_required_kvcache_layout(vllm_config) requires_kv_delivery
            bind_gpu_block_pool(gpu_block_pool) on_new_request(request)
            get_num_new_matched_tokens(request, num_computed_tokens)
            update_state_after_alloc(request, blocks, num_external_tokens)
            build_connector_meta(scheduler_output) update_connector_output(connector_output)
            has_pending_push_work() register_kv_caches(kv_caches) start_load_kv(forward_context, kwargs)
            wait_for_layer_load(layer_name) save_kv_layer(layer_name, kv_layer, attn_metadata, kwargs)
            bind_connector_metadata(connector_metadata) wait_for_save() build_connector_worker_meta()
            get_kv_connector_stats() build_kv_connector_stats(data)
            build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            reset_cache() take_events() shutdown()""",
        "0.30": "get_transfer_results(finished_req_ids)",
    },
    base.SupportsHMA: {"0.28": "request_finished_all_groups(request, block_ids)"},
    base.KVConnectorTransferResults: {"0.30": "finished_recving failed_recving"},
    KVConnectorOutput: {"0.28": "finished_recving kv_connector_worker_meta", "0.30": "failed_recving"},
    metrics.KVConnectorStats: {"0.28": "data"},
    metrics.KVConnectorPromMetrics: {
        "0.28": """__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            observe(transfer_stats_data, engine_idx)"""
    },
    create_metric_per_engine: {"0.28": "(metric, per_engine_labelvalues)"},
    BlockPool: {
        "0.28": """blocks num_gpu_blocks hash_block_size touch(blocks) free_blocks(ordered_blocks)
            reset_prefix_cache()"""
    },
    KVCacheBlocks: {"0.28": "get_block_ids()"},
    generate_block_hash_extra_keys: {"0.28": "(request, start_token_idx, end_token_idx, start_mm_idx)"},
    Request: {
        "0.28": """request_id num_tokens num_computed_tokens num_prompt_tokens all_token_ids
            kv_transfer_params skip_reading_prefix_cache lora_request trace_headers cache_salt
            block_hashes""",
        "0.31": "shared_prefix_boundary",
    },
    LoRARequest: {"0.28": "lora_name lora_path lora_int_id"},
    extract_trace_context: {"0.28": "(headers)"},
    instrument_manual: {"0.28": "(span_name, start_time, end_time, attributes, context)"},
    output.SchedulerOutput: {
        "0.28": "num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs",
        "0.29": "kv_connector_block_state",
    },
    output.NewRequestData: {"0.28": "req_id num_computed_tokens"},
    output.CachedRequestData: {"0.28": "req_ids num_computed_tokens"},
    output.KVConnectorBlockState: {"0.29": "boundary_state_offloads", "0.30": "get_block_ids(req_id)"},
    specs.KVCacheConfig: {"0.28": "num_blocks kv_cache_tensors kv_cache_groups", "0.29": "kv_cache_layout"},
    specs.KVCacheTensor: {"0.29": "layers layer_stride block_stride offset"},
    specs.KVCacheGroupSpec: {"0.28": "layer_names kv_cache_spec", "0.30": "host_resident enable_kv_transfer"},
    specs.KVCacheSpec: {
        "0.28": "block_size page_size_bytes",
        "0.29": "prefix_cacheable",
        "0.31": "prefix_replay_tokens",
    },
    specs.AttentionSpec: {"0.28": "dtype kv_quant_mode"},
    specs.MLAAttentionSpec: {"0.31": "max_tp_shards"},
    specs.get_kv_cache_spec_kind: {"0.31": "(kv_cache_spec)"},
    specs.SlidingWindowSpec: {"0.28": "sliding_window extra_retained_tokens"},
    specs.ChunkedLocalAttentionSpec: {"0.28": "attention_chunk_size"},
    specs.MambaSpec: {"0.28": "dtypes", "0.30": "real_page_size_bytes"},
    specs.UniformTypeKVCacheSpecs: {"0.28": "kv_cache_specs", "0.29": "first_spec"},
    CacheConfig: {
        "0.28": "block_size cache_dtype enable_prefix_caching mamba_cache_mode",
        "0.29": "prefix_cache_retention_interval",
    },
    ModelConfig: {"0.28": "is_hybrid"},
    SpeculativeConfig: {"0.28": "method draft_model_config draft_load_config uses_draft_kv_cache()"},
    VllmConfig: {"0.31": "num_prefill_lookahead_tokens use_v2_model_runner"},
    Platform: {"0.28": "is_cuda() get_device_capability(device_id)"},
    KVTransferConfig: {
        "0.28": """engine_id is_kv_producer is_kv_consumer kv_connector_extra_config
            kv_load_failure_policy"""
    },
}
"""For each class or function, the names that the connector uses, by the first version that has them, with
their arguments where vLLM passes or receives any. "0.28" stands for all earlier versions, too."""


def missing() -> list[str]:
    """The entries of USED that this vLLM lacks, as `Class.name(arguments)`."""
    return [
        f"{owner.__name__}{'' if used.startswith('(') else '.'}{used}"
        for owner, versions in USED.items()
        for names in versions.values()
        for used in re.findall(r"\w*\([^)]*\)|\w+", names)
        if not _has(owner, used)
    ]


def _has(owner: Any, used: str) -> bool:
    name, is_function, arguments = used.rstrip(")").partition("(")
    function = owner
    if name:
        try:
            function = inspect.getattr_static(owner, name)
        except AttributeError:
            return name in _fields(owner)
    if not is_function:
        return True
    function = getattr(function, "__func__", function)  # of a class method
    actual = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    expected = re.findall(r"\w+", arguments)
    return actual[: len(expected)] == expected


def _fields(owner: Any) -> set[str]:
    """The attributes that only instances have: annotated fields and names that `__init__` assigns."""
    names: set[str] = set()
    for ancestor in owner.__mro__:
        names.update(vars(ancestor).get("__annotations__", ()))
        code = getattr(vars(ancestor).get("__init__"), "__code__", None)
        names.update(code.co_names if code is not None else ())
    return names
