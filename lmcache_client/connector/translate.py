"""Translates vLLM's KV cache configuration into the contract's groups, regions and model tag.

Interfaces: vLLM's v1/kv_cache_interface.py (KVCacheConfig, KVCacheTensor and the specs).
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from vllm import __version__ as VLLM_VERSION
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from lmcache_client.connector.support import UnsupportedError
from lmcache_client.connector.weights import fingerprint, local_path
from lmcache_client.contract.geometry import (
    CHUNKED_LOCAL,
    FULL,
    RECURRENT,
    SLIDING_WINDOW,
    Geometry,
    GroupSpec,
    Region,
)
from lmcache_client.contract.keys import ModelTag

if TYPE_CHECKING:
    from vllm.config import LoadConfig, LoRAConfig, ModelConfig, VllmConfig

FROM_FILES = (
    "auto",
    "hf",
    "safetensors",
    "pt",
    "mistral",
    "gguf",
    "bitsandbytes",
    "npcache",
    "fastsafetensors",
)
"""The load formats that read nothing but the files of the model's directory."""
NOT_CONTENT = ("_name_or_path", "_commit_hash", "transformers_version")
"""Entries of a configuration that say where it lies and who read it."""
FULL_SPECS = (FullAttentionSpec, MLAAttentionSpec)
"""Only these exact types: their subclasses (sinks with their own blocks, scratch states, …) need more."""


def layer_spec(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    """The spec of one layer of a group."""
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def layer_specs(spec: KVCacheSpec) -> Collection[KVCacheSpec]:
    """The specs of a group's layers: one for all of them, or one for each."""
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def group_specs(config: KVCacheConfig) -> tuple[GroupSpec, ...]:
    """The groups without regions and tags, which is enough to know what a resume needs.

    They come from each group's first layer, because vLLM shows the scheduler no other. Raises
    UnsupportedError for a group that this project does not restore.
    """
    firsts = [next(iter(layer_specs(group.kv_cache_spec))) for group in config.kv_cache_groups]
    return tuple(_group(first, "", ()) for first in firsts)


def block_bytes(config: KVCacheConfig) -> tuple[int, ...]:
    """The bytes of one block of each group, in the first worker."""
    return tuple(
        sum(_page_bytes(layer_spec(group.kv_cache_spec, layer)) for layer in group.layer_names)
        for group in config.kv_cache_groups
    )


def event_kinds(config: KVCacheConfig) -> tuple[str, ...]:
    """What vLLM's KV events call each group."""
    return tuple(get_kv_cache_spec_kind(group.kv_cache_spec).value for group in config.kv_cache_groups)


def _group(group_spec: KVCacheSpec, tag: str, regions: tuple[Region, ...]) -> GroupSpec:
    kinds = {_kind(spec): type(spec).__name__ for spec in layer_specs(group_spec)}
    if len(kinds) > 1:
        raise UnsupportedError(f"layers that differ in one KV cache group ({', '.join(kinds.values())})")
    ((kind, window),) = kinds
    return GroupSpec(kind, group_spec.block_size, window, tag, regions, _is_replicated(group_spec))


def _is_replicated(group_spec: KVCacheSpec) -> bool:
    """Whether every tensor-parallel rank holds all of this group's KV. vLLM 0.31 to 0.33 only say so for MLA:
    for grouped-query attention with fewer heads than ranks, their kv_tp_replicas is 1, too."""
    specs = layer_specs(group_spec)
    return all(type(spec) is MLAAttentionSpec and spec.max_tp_shards == 1 for spec in specs)


def _kind(spec: KVCacheSpec) -> tuple[str, int]:
    if type(spec) in FULL_SPECS:
        return FULL, 0
    if type(spec) in (SlidingWindowSpec, SlidingWindowMLASpec):  # vLLM has one manager for both
        return SLIDING_WINDOW, spec.sliding_window + spec.extra_retained_tokens
    if type(spec) is ChunkedLocalAttentionSpec:
        return CHUNKED_LOCAL, spec.attention_chunk_size
    if type(spec) is MambaSpec:
        return RECURRENT, 0
    if isinstance(spec, CrossAttentionSpec):
        raise UnsupportedError("cross-attention layers")
    raise UnsupportedError(f"KV cache groups of type {type(spec).__name__}")


def geometry(
    vllm_config: "VllmConfig", config: KVCacheConfig, kv_caches: "dict[str, torch.Tensor]"
) -> tuple[Geometry, tuple[tuple[int, int], ...]]:
    """The worker's geometry and its buffers as (address, bytes).

    `kv_caches` are the views of the layers; their storage holds the pages as `config` describes. Raises
    UnsupportedError.
    """
    layers_in_order = [layer for tensor in config.kv_cache_tensors for layer in tensor.layers]
    buffers = list(dict.fromkeys(_buffer(kv_caches[layer]) for layer in layers_in_order))
    regions = _regions(config, kv_caches, buffers)
    groups = []
    for group in config.kv_cache_groups:
        layers = [layer for layer in group.layer_names if layer in regions]
        tag = _group_tag(vllm_config, config, group.kv_cache_spec, layers, kv_caches)
        groups.append(_group(group.kv_cache_spec, tag, merged([regions[layer] for layer in layers])))
    return Geometry(tuple(groups), config.num_blocks), tuple(buffers)


def _buffer(view: torch.Tensor) -> tuple[int, int]:
    storage = view.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _regions(
    config: KVCacheConfig, kv_caches: "dict[str, torch.Tensor]", buffers: list[tuple[int, int]]
) -> dict[str, Region]:
    """The region that holds the pages of each layer, by the layer's name."""
    regions = {}
    spec_of = {layer: group.kv_cache_spec for group in config.kv_cache_groups for layer in group.layer_names}
    for tensor in config.kv_cache_tensors:
        for index, layer in enumerate(tensor.layers):
            if layer not in spec_of:  # of a group that is left out
                continue
            buffer = buffers.index(_buffer(kv_caches[layer]))
            page_bytes = _page_bytes(layer_spec(spec_of[layer], layer))
            offset = tensor.offset + index * tensor.layer_stride
            regions[layer] = Region(buffer, offset, tensor.block_stride, page_bytes)
            _check_view(layer, kv_caches[layer], config, regions[layer])
    return regions


def _check_view(layer: str, view: torch.Tensor, config: KVCacheConfig, region: Region) -> None:
    """Raises UnsupportedError unless the bytes of each block lie together in a layer's view, at the place
    that `region` says. Several rows of the view (kernel blocks) may make up a block."""
    rows, rest = divmod(view.shape[0], config.num_blocks)
    block = view[:rows]
    last = sum((size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True))
    if last + 1 != block.numel():
        raise UnsupportedError(
            f"the KV cache layout {config.kv_cache_layout}, which scatters the bytes of a block: start vLLM "
            "with VLLM_KV_CACHE_LAYOUT=LBNHC (or LBHNC, if the attention backend does not accept LBNHC)"
        )
    offset, stride_bytes = view.data_ptr() - _buffer(view)[0], rows * view.stride(0) * view.element_size()
    is_there = not rest and (offset, stride_bytes) == (region.offset, region.stride_bytes)
    if not is_there or block.nbytes > region.page_bytes:
        raise UnsupportedError(f"layer {layer}, whose memory is not where vLLM's configuration says")


def merged(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Joins regions whose pages are adjacent in every block, because longer pages are copied faster."""
    result: list[Region] = []
    for region in regions:
        last = result[-1] if result else None
        end = last.offset + last.page_bytes if last else 0
        if last and region == replace(last, offset=end, page_bytes=region.page_bytes):
            result[-1] = replace(last, page_bytes=last.page_bytes + region.page_bytes)
        else:
            result.append(region)
    return tuple(result)


def _page_bytes(spec: KVCacheSpec) -> int:
    """The used bytes of a page. Recurrent pages are often padded to at least twice their size."""
    return int(spec.real_page_size_bytes if isinstance(spec, MambaSpec) else spec.page_size_bytes)


def _group_tag(
    vllm_config: "VllmConfig",
    config: KVCacheConfig,
    group_spec: KVCacheSpec,
    layers: list[str],
    kv_caches: "dict[str, torch.Tensor]",
) -> str:
    context = vllm_config.compilation_config.static_forward_context
    parts = [f"layout={config.kv_cache_layout}"]
    for layer in layers:
        spec = layer_spec(group_spec, layer)
        backend = context[layer].get_attn_backend().get_name() if layer in context else ""
        kernel_blocks = kv_caches[layer].shape[0]
        if kernel_blocks % config.num_blocks == 0:
            kernel_blocks //= config.num_blocks
        dtypes = ",".join(map(str, spec.dtypes)) if isinstance(spec, MambaSpec) else str(spec.dtype)
        quant = str(spec.kv_quant_mode) if isinstance(spec, AttentionSpec) else ""
        part = f"{backend}/{type(spec).__name__}/{dtypes}/{quant}/{kernel_blocks}"
        if part != parts[-1]:
            parts.append(part)
    return ";".join(parts)


def model_tag(vllm_config: "VllmConfig") -> ModelTag:
    """Everything apart from the geometry that must match before two engines may share pages."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    load, device = vllm_config.load_config, vllm_config.device_config.device_type
    is_dummy = str(load.load_format) == "dummy"
    details: dict[str, Any] = {
        "dtype": model.dtype,
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "quantization": model.quantization,
        "configuration": _digest(model.hf_config),
        "weights": _weights_mark(vllm_config, model, load) if not is_dummy else "",
        # The layout inside a page depends on the version of vLLM and, on a CPU, on the instruction set.
        "vllm": VLLM_VERSION,
        "processor": torch.backends.cpu.get_cpu_capability() if device == "cpu" else "",
        "device": device,
        "load_format": load.load_format,
        # Dummy weights depend only on the seed.
        "seed": model.seed if is_dummy else "",
        "code": model.code_revision or "",
        "adapters": _application(vllm_config.lora_config, model.dtype),
        # The rotary embedding longrope chooses its factors by this length.
        "max_model_len": model.max_model_len if "longrope" in str(model.hf_config) else "",
    }
    if drafter := _drafter(vllm_config):
        details |= {"drafter": drafter, "lookahead": vllm_config.num_prefill_lookahead_tokens}
    return ModelTag(
        model.model,
        tuple((name, str(value)) for name, value in sorted(details.items())),
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
    )


def _drafter(vllm_config: "VllmConfig") -> str:
    """The drafter; empty if there is none that has a KV cache."""
    speculation = vllm_config.speculative_config
    if speculation is None or not speculation.uses_draft_kv_cache():
        return ""
    model, load = speculation.draft_model_config, speculation.draft_load_config or vllm_config.load_config
    if model is None:
        return str(speculation.method)
    weights, configuration = _weights_mark(vllm_config, model, load), _digest(model.hf_config)
    return f"{speculation.method} {weights} {configuration} {model.dtype} {model.quantization}"


def _weights_mark(vllm_config: "VllmConfig", model: "ModelConfig", load: "LoadConfig") -> str:
    """Changes with the weights, and is the same on every machine that has the same files, at whatever path.
    Nobody can see what else a loader reads: such weights are the engine's own."""
    if not model.model_weights and str(load.load_format) in FROM_FILES:
        path = local_path(model.model, model.revision, load.download_dir)
        if path is not None and (mark := fingerprint(path)):
            return mark
    return f"of engine {vllm_config.kv_transfer_config.engine_id}"


def _application(lora: "LoRAConfig | None", dtype: object) -> str:
    """Where adapters are applied and how precisely; empty if everywhere and as the model."""
    if lora is None or (not lora.target_modules and lora.lora_dtype in ("auto", dtype)):
        return ""
    return f"{sorted(lora.target_modules or ())} {lora.lora_dtype}"


def _digest(hf_config: Any) -> str:
    """Of the configuration without what depends on where it lies and on who read it."""
    plain = json.dumps(_content(hf_config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(plain.encode()).hexdigest()


def _content(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _content(part) for name, part in value.items() if name not in NOT_CONTENT}
