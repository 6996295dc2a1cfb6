"""Translates vLLM's KV cache configuration into the contract's groups, regions and model tag.

Interfaces: vLLM's v1/kv_cache_interface.py (KVCacheConfig, KVCacheTensor and the specs).
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
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
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from lmcache_client.connector.support import UnsupportedError
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
    from vllm.config import VllmConfig

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
FULL_SPECS = (FullAttentionSpec, MLAAttentionSpec)
"""Only these exact types: their subclasses (sinks with their own blocks, scratch states, …) need more."""


def layer_spec(spec: KVCacheSpec, layer: str = "") -> KVCacheSpec:
    """The spec of one layer of a group, or of any layer if no name is given."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[layer] if layer else spec.first_spec
    return spec


def group_specs(config: KVCacheConfig) -> tuple[GroupSpec, ...]:
    """The groups without regions and tags, which is enough to know what a resume needs.

    Raises UnsupportedError for a group that this project does not restore.
    """
    return tuple(_group(group.kv_cache_spec, "", ()) for group in config.kv_cache_groups)


def block_bytes(config: KVCacheConfig) -> tuple[int, ...]:
    """The bytes of one block of each group, in the first worker."""
    return tuple(
        sum(_page_bytes(layer_spec(group.kv_cache_spec, layer)) for layer in group.layer_names)
        for group in config.kv_cache_groups
    )


def _group(group_spec: KVCacheSpec, tag: str, regions: tuple[Region, ...]) -> GroupSpec:
    kind, window = _kind(layer_spec(group_spec))
    return GroupSpec(kind, group_spec.block_size, window, tag, regions, _is_replicated(group_spec))


def _is_replicated(group_spec: KVCacheSpec) -> bool:
    """Whether every tensor-parallel rank holds all of this group's KV. vLLM only says so for MLA. For
    grouped-query attention with fewer heads than ranks, it does not say which ranks hold the same."""
    uniform = isinstance(group_spec, UniformTypeKVCacheSpecs)
    specs = group_spec.kv_cache_specs.values() if uniform else (group_spec,)
    return all(type(spec) is MLAAttentionSpec and spec.max_tp_shards == 1 for spec in specs)


def _kind(spec: KVCacheSpec) -> tuple[str, int]:
    if type(spec) in FULL_SPECS:
        return FULL, 0
    if type(spec) is SlidingWindowSpec:
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
            buffer = buffers.index(_buffer(kv_caches[layer]))
            page_bytes = min(_page_bytes(layer_spec(spec_of[layer], layer)), tensor.block_stride)
            offset = tensor.offset + index * tensor.layer_stride
            regions[layer] = Region(buffer, offset, tensor.block_stride, page_bytes)
            _check_view(layer, kv_caches[layer], config.num_blocks, regions[layer])
    return regions


def _check_view(layer: str, view: torch.Tensor, num_blocks: int, region: Region) -> None:
    """Raises UnsupportedError if a layer's view disagrees with `region`. Only views whose first dimension is
    blocks are checked."""
    if not view.stride(0) or view.shape[0] != num_blocks:
        return
    offset, stride_bytes = view.data_ptr() - _buffer(view)[0], view.stride(0) * view.element_size()
    if (offset, stride_bytes) != (region.offset, region.stride_bytes):
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
    details: dict[str, Any] = {
        "revision": model.revision,
        "dtype": model.dtype,
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "quantization": model.quantization,
        "configuration": _digest(model.hf_config),
        "weights": weights_mark(model.model) or getattr(model.hf_config, "_commit_hash", ""),
        # The layout inside a page depends on the version of vLLM and, on a CPU, on the instruction set.
        "vllm": VLLM_VERSION,
        "processor": torch.backends.cpu.get_cpu_capability() if device == "cpu" else "",
        "device": device,
        "load_format": load.load_format,
        # Dummy weights depend only on the seed.
        "seed": model.seed if str(load.load_format) == "dummy" else "",
        # The rotary embedding longrope chooses its factors by this length.
        "max_model_len": model.max_model_len if "longrope" in str(model.hf_config) else "",
    }
    return ModelTag(
        model.model,
        tuple((name, str(value)) for name, value in sorted(details.items())),
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
    )


def weights_mark(model: str) -> str:
    """A digest that changes when the weights in a directory or file are replaced; empty for a hub's model.

    It covers the names, sizes and times of the files; reading them would take as long as loading the model.
    """
    path = Path(model)
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        return ""
    stats = [(file.name, file.stat()) for file in files if file.suffix in WEIGHTS]
    return hashlib.sha256(repr([(name, s.st_size, s.st_mtime_ns) for name, s in stats]).encode()).hexdigest()


def _digest(hf_config: Any) -> str:
    plain = json.dumps(hf_config.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(plain.encode()).hexdigest()
