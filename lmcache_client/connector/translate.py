"""Translates vLLM's KV cache configuration into the contract's groups, regions and model tag.

Interfaces: vLLM's v1/kv_cache_interface.py (KVCacheConfig, KVCacheTensor and the specs).
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from vllm import __version__ as VLLM_VERSION
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs

from lmcache_client.connector.account import content, named, variables
from lmcache_client.connector.support import UnsupportedError, block_tokens, layer_specs
from lmcache_client.connector.weights import fingerprint, local_path, process_started_ns
from lmcache_client.contract.geometry import (
    CHUNKED_LOCAL,
    FULL,
    RECURRENT,
    SLIDING_WINDOW,
    Geometry,
    GroupSpec,
    Region,
)
from lmcache_client.contract.keys import Details, ModelTag

if TYPE_CHECKING:
    from vllm.config import LoadConfig, LoRAConfig, ModelConfig, VllmConfig

FROM_FILES = (
    *("auto", "hf", "safetensors", "pt", "mistral", "gguf", "bitsandbytes", "npcache"),
    "fastsafetensors",
)
"""The load formats that read nothing but the files of the model's directory."""
OTHER_SOURCES = ("audio_model_id", "text_model_id")
"""Entries of a configuration that name a model whose weights vLLM loads, too (Ultravox)."""
NOT_CONTENT = ("_name_or_path", "_commit_hash", "transformers_version")
"""Entries of a configuration that say where it lies and who read it."""
FULL_SPECS = (kv.FullAttentionSpec, kv.MLAAttentionSpec)
"""Only these exact types: their subclasses (sinks with their own blocks, scratch states, …) need more."""


def layer_spec(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    """The spec of one layer of a group."""
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def group_specs(config: KVCacheConfig, dcp_size: int) -> tuple[GroupSpec, ...]:
    """The groups without regions and tags, which is enough to know what a resume needs.

    They come from each group's first layer, because vLLM shows the scheduler no other. Raises
    UnsupportedError for a group that this project does not restore.
    """
    firsts = [next(iter(layer_specs(group.kv_cache_spec))) for group in config.kv_cache_groups]
    return tuple(_group(first, "", (), dcp_size) for first in firsts)


def block_bytes(config: KVCacheConfig) -> tuple[int, ...]:
    """The bytes of one block of each group, in the first worker."""
    return tuple(
        sum(_page_bytes(layer_spec(group.kv_cache_spec, layer)) for layer in group.layer_names)
        for group in config.kv_cache_groups
    )


def _group(group_spec: KVCacheSpec, tag: str, regions: tuple[Region, ...], dcp_size: int) -> GroupSpec:
    kinds = {_kind(spec): type(spec).__name__ for spec in layer_specs(group_spec)}
    if len(kinds) > 1:
        raise UnsupportedError(f"layers that differ in one KV cache group ({', '.join(kinds.values())})")
    ((kind, window),) = kinds
    tokens = block_tokens(group_spec, dcp_size)
    # Ranks that divide a block's tokens among them are no replicas.
    replicated = tokens == group_spec.block_size and _is_replicated(group_spec)
    return GroupSpec(kind, tokens, window, tag, regions, replicated)


def _is_replicated(group_spec: KVCacheSpec) -> bool:
    """Whether every tensor-parallel rank holds all heads of this group. vLLM 0.31 to 0.33 only say so for
    MLA: for grouped-query attention with fewer heads than ranks, their kv_tp_replicas is 1, too."""
    specs = layer_specs(group_spec)
    return all(type(spec) is kv.MLAAttentionSpec and spec.max_tp_shards == 1 for spec in specs)


def _kind(spec: KVCacheSpec) -> tuple[str, int]:
    if type(spec) in FULL_SPECS:
        return FULL, 0
    if type(spec) in (kv.SlidingWindowSpec, kv.SlidingWindowMLASpec):  # vLLM has one manager for both
        return SLIDING_WINDOW, spec.sliding_window + spec.extra_retained_tokens
    if type(spec) is kv.ChunkedLocalAttentionSpec:
        return CHUNKED_LOCAL, spec.attention_chunk_size
    if type(spec) is MambaSpec:
        return RECURRENT, 0
    if isinstance(spec, kv.CrossAttentionSpec):
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
    dcp_size = vllm_config.parallel_config.decode_context_parallel_size
    regions = _regions(config, kv_caches, buffers)
    groups = []
    for group in config.kv_cache_groups:
        layers = [layer for layer in group.layer_names if layer in regions]
        tag = _group_tag(vllm_config, config, group.kv_cache_spec, layers, kv_caches)
        own = merged([regions[layer] for layer in layers])
        groups.append(_group(group.kv_cache_spec, tag, own, dcp_size))
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
    kinds = {}
    for name in layers:
        spec, layer = layer_spec(group_spec, name), context.get(name)
        backend = layer.get_attn_backend().get_name() if layer is not None else ""
        kernel_blocks = kv_caches[name].shape[0]
        if kernel_blocks % config.num_blocks == 0:
            kernel_blocks //= config.num_blocks
        # On a CPU, the instructions that a layer uses decide the order of the numbers in a page.
        instructions = getattr(layer, "isa", "")
        fields = ", ".join(f"{field}={value}" for field, value in named(spec, _own(vllm_config)))
        kinds[name] = f"{backend}/{type(spec).__name__}/{fields}/{instructions}/{kernel_blocks}"
    # The digest says which layer is of which kind.
    return ";".join([f"layout={config.kv_cache_layout}", *dict.fromkeys(kinds.values()), _sha256(str(kinds))])


def weights(vllm_config: "VllmConfig", name: str = "") -> Details:
    """The details that say which weights these are: their `name`, or the digests of their files. These take a
    while."""
    if name:
        return (("weights", f"named {name}"),)
    own, load, speculation = _own(vllm_config), vllm_config.load_config, vllm_config.speculative_config
    marks = [("weights", _weights_mark(vllm_config.model_config, load, own))]
    if _drafter(vllm_config, own) and (model := speculation.draft_model_config) is not None:
        marks.append(("drafter.weights", _weights_mark(model, speculation.draft_load_config or load, own)))
    return tuple(marks)


def model_tag(vllm_config: "VllmConfig") -> ModelTag:
    """Everything apart from the geometry and the weights that must match before two engines may share
    pages."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    own, is_cpu = _own(vllm_config), vllm_config.device_config.device_type == "cpu"
    overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else {}
    file = overrides.get("quantization_config_file")
    details: dict[str, Any] = {
        "configuration": _digest(model.hf_config),
        # The layout inside a page depends on the version of vLLM and, on a CPU, on the instruction set.
        "vllm": VLLM_VERSION,
        "library": _loaded_library(),
        "processor": torch.backends.cpu.get_cpu_capability() if is_cpu else "",
        "fp8": current_platform.fp8_dtype(),  # AMD's GPUs have two
        "adapters": _application(vllm_config.lora_config, model.dtype),
        # The rotary embedding longrope chooses its factors by this length.
        "max_model_len": model.max_model_len if "longrope" in str(model.hf_config) else "",
        "quantization_config_file": content(file, own) if file else "",
        **dict(named(vllm_config, own)),
        **dict(variables(envs.environment_variables, own)),
        **_drafter(vllm_config, own),
    }
    return ModelTag(
        model.model,
        tuple((name, str(value)) for name, value in sorted(details.items()) if value != ""),
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
    )


def _drafter(vllm_config: "VllmConfig", own: str) -> dict[str, Any]:
    """What is named of a drafter that has a KV cache; nothing of others."""
    speculation = vllm_config.speculative_config
    if speculation is None or not speculation.uses_draft_kv_cache():
        return {}
    details = {
        "drafter": speculation.method,
        "lookahead": vllm_config.num_prefill_lookahead_tokens,
        **dict(named(speculation, own, "drafter.")),
    }
    if (model := speculation.draft_model_config) is not None:
        load = speculation.draft_load_config or vllm_config.load_config
        details |= {
            "drafter.configuration": _digest(model.hf_config),
            **dict(named(load, own, "drafter.load_config.")),
            **dict(named(model, own, "drafter.model_config.")),
        }
    return details


def _weights_mark(model: "ModelConfig", load: "LoadConfig", own: str) -> str:
    """Changes with the weights, and is the same on every machine that has the same files, at whatever path.
    Nobody can see what else a loader reads, nor what it has read of files that changed since: such weights
    are the engine's own."""
    if str(load.load_format) == "dummy":
        return f"dummy {model.seed}"
    others = (getattr(model.hf_config, entry, None) for entry in OTHER_SOURCES)
    sources = {**{name: None for name in others if name}, model.model: model.revision}
    if model.model_weights or str(load.load_format) not in FROM_FILES:
        return own
    places = [local_path(*source, load.download_dir, is_loaded=True) for source in sources.items()]
    marks = [fingerprint(place, process_started_ns(), deep=True) if place else "" for place in places]
    return " ".join(marks) if all(marks) else own


def _own(vllm_config: "VllmConfig") -> str:
    """Stands for what nobody can compare with another engine's, or an earlier life's of the same id."""
    transfer = vllm_config.kv_transfer_config
    return f"of engine {transfer.engine_id if transfer is not None else ''} {vllm_config.instance_id}"


def _loaded_library() -> str:
    """Which of its compiled libraries vLLM has loaded: on a CPU, it has one for each set of instructions."""
    maps = Path("/proc/self/maps").read_text(errors="replace")
    return " ".join(sorted(set(re.findall(r"/vllm/(_\w+)\.\S*so", maps))))


def _application(lora: "LoRAConfig | None", dtype: object) -> str:
    """Where adapters are applied and how precisely; empty if everywhere and as the model."""
    if lora is None or (not lora.target_modules and lora.lora_dtype in ("auto", dtype)):
        return ""
    return f"{sorted(lora.target_modules or ())} {lora.lora_dtype}"


def _digest(hf_config: Any) -> str:
    """Of the configuration without what depends on where it lies and on who read it."""
    return _sha256(json.dumps(_content(hf_config.to_dict()), sort_keys=True, default=str))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _content(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _content(part) for name, part in value.items() if name not in NOT_CONTENT}
