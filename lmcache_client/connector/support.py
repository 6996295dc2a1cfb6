"""Checks what vLLM, a model and its settings support, corrects a fault of vLLM and advises on settings."""

import contextlib
import logging
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from vllm import __version__ as VLLM_VERSION
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from lmcache_client.connector.log import logger
from lmcache_client.connector.vllm_surface import missing
from lmcache_client.contract.admission import stored_factor
from lmcache_client.contract.geometry import RECURRENT, GroupSpec
from lmcache_client.contract.messages import Joined
from lmcache_client.contract.version import INSTALL_VLLM, VERSION, untested

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

UNSPLIT_BLOCK_SIZES = (16, 32, 64)
UNSHARED = "a KV cache group that vLLM does not share between requests"


class UnsupportedError(Exception):
    """The cache is not proven to restore this version, model or setting exactly. The message is a noun phrase
    that completes "this engine is not cached, because it has …"."""


def check_vllm(allow_untested: bool) -> None:
    """Raises UnsupportedError if this vLLM lacks anything that the connector uses, or if it is a version that
    the tests do not run, unless `allow_untested`."""
    reason = untested(VLLM_VERSION)
    if reason and not allow_untested:
        raise UnsupportedError(reason)
    if names := missing():
        raise UnsupportedError(
            f"vLLM {VLLM_VERSION}, which lacks {', '.join(names)}: install a version that "
            f"lmcache-mp {VERSION} supports ({INSTALL_VLLM}) or a newer lmcache-mp"
        )


def layer_specs(spec: "KVCacheSpec") -> "Collection[KVCacheSpec]":
    """The specs of a group's layers: one for all of them, or one for each."""
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def block_tokens(spec: "KVCacheSpec", dcp_size: int) -> int:
    """The tokens that one block of a group covers. With decode context parallelism, the ranks divide those of
    a sharded group among them, and each holds `spec.block_size` of every block."""
    return int(spec.block_size * (dcp_size if spec.dcp_sharded else 1))


def shared_groups(config: "KVCacheConfig", dcp_size: int) -> tuple[tuple[int, ...], list[int]]:
    """The indexes of the groups whose blocks later requests use, and the tokens of a block in each group.

    Two kinds are left out, because vLLM fills them anew for each request: a ring of keys that are not
    compressed yet, which no request needs where it resumes, and windows that vLLM computes again after a hit
    (`Scheduler._mark_prefix_replay`). Raises UnsupportedError if another group is not shared, or if the
    block size of one that is left out does not divide the unified block size of the others.
    """
    shared = []
    for index, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        if group.host_resident or not group.enable_kv_transfer:
            raise UnsupportedError(UNSHARED)
        is_ring = all(isinstance(layer, CircularBufferSpec) for layer in layer_specs(spec))
        if spec.prefix_cacheable:
            shared.append(index)
        elif not is_ring and not spec.prefix_replay_tokens:
            raise UnsupportedError(UNSHARED)
    sizes = [block_tokens(group.kv_cache_spec, dcp_size) for group in config.kv_cache_groups]
    if math.lcm(*(sizes[index] for index in shared)) % math.lcm(*sizes):
        # vLLM's scheduler cuts a hit to a multiple of all block sizes.
        raise UnsupportedError(f"{UNSHARED}, with blocks of another size ({', '.join(map(str, sizes))})")
    return tuple(shared), sizes


def check_supported(vllm_config: "VllmConfig", groups: tuple[GroupSpec, ...], sizes: Sequence[int]) -> None:
    """Raises UnsupportedError if the cache is not proven to restore this model with these settings exactly.
    vLLM's groups have blocks of these sizes; `groups` are those that it shares between requests."""
    device = vllm_config.device_config.device_type
    if device not in ("cpu", "cuda"):
        raise UnsupportedError(f"its KV cache on a {device} device, which this version does not copy")
    draft = vllm_config.speculative_config
    if draft is not None and draft.method == "draft_model" and len(sizes) > 1:
        # vLLM gives the draft model the blocks of the first group, so it overwrites pages of the model.
        raise UnsupportedError("a draft model beside a model with several KV cache groups")
    is_v41 = len(sizes) > len(groups) and vllm_config.model_config.hf_config.model_type == "deepseek_v41"
    if is_v41 and not vllm_config.use_v2_model_runner:
        # Hashes of earlier tokens are then in no KV cache group.
        raise UnsupportedError("DeepSeek-V4.1 in vLLM's V1 runner: set VLLM_USE_V2_MODEL_RUNNER=1")
    if any(group.kind == RECURRENT for group in groups):
        cache = vllm_config.cache_config
        if cache.mamba_cache_mode != "align":
            raise UnsupportedError(
                f"recurrent layers with mamba_cache_mode={cache.mamba_cache_mode!r}: "
                "keep prefix caching enabled (before vLLM 0.33, also set --mamba-cache-mode align)"
            )
        if damages_pages(cache, groups, sizes):
            raise UnsupportedError(
                "recurrent layers that vLLM resumes inside a block, where it damages pages: leave out "
                "--prefix-match-unit and decode context parallelism"
            )
        if vllm_config.num_prefill_lookahead_tokens > 1:
            # vLLM then offers a state only in a step after the one that made it.
            raise UnsupportedError("several MTP modules on a model with recurrent layers")
        if draft is not None and VLLM_VERSION.startswith("0.31."):
            # Its CPU build cannot run one, so no test has.
            raise UnsupportedError("speculative decoding on a model with recurrent layers before vLLM 0.32")
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 and draft is not None:
        # vLLM's V1 model runner does not call `wait_for_save` on every pipeline stage, and that call starts
        # the stores.
        raise UnsupportedError("speculative decoding together with pipeline parallelism")
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        # Each of its processes has a scheduler, and steps only its own worker.
        raise UnsupportedError("vLLM's external launcher, in which each process decides alone")
    if parallel.prefill_context_parallel_size > 1:
        raise UnsupportedError("prefill context parallelism: set --prefill-context-parallel-size 1")


def damages_pages(cache: "CacheConfig", groups: Sequence[GroupSpec], sizes: Sequence[int]) -> bool:
    """Whether vLLM resumes recurrent layers inside a block, from a copy without the end of attention's pages
    (copy_kv_cache_blocks_inplace). What it computes from that must reach no other engine."""
    unit = cache.prefix_match_unit or math.gcd(*sizes)
    windows = [group.window for group in groups if group.block_size > unit]
    return bool(windows) and not any(windows) and not cache.get_resolved_kv_cache_layout().is_block_outermost


def can_resume(vllm_config: "VllmConfig", config: "KVCacheConfig") -> bool:
    """Whether the engine can resume in the middle of a prompt.

    With neither chunked prefill nor prefix caching, a backend may silently attend only to the new tokens.
    vLLM's MLA backends for CPUs do so even if both are enabled. They also fail with vLLM's own prefix cache.
    """
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    layers = [spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec for spec in specs]
    is_mla = any(isinstance(layer, MLAAttentionSpec | SlidingWindowMLASpec) for layer in layers)
    if is_mla and vllm_config.device_config.device_type == "cpu":
        return False
    return bool(
        vllm_config.scheduler_config.enable_chunked_prefill or vllm_config.cache_config.enable_prefix_caching
    )


def preferred_layout(vllm_config: "VllmConfig") -> str | None:
    """A KV cache layout that keeps one block of all layers contiguous, for copies over a GPU's bus; None
    where vLLM may not be able to start with it."""
    # In such a layout vLLM cannot split a block for its attention kernels, and raises if it must. No backend
    # for CUDA splits blocks of these sizes. Those of hybrid models are larger, and their pages long enough.
    if vllm_config.model_config.is_hybrid or vllm_config.cache_config.block_size not in UNSPLIT_BLOCK_SIZES:
        return None
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method == "extract_hidden_states":
        return None  # vLLM enlarges all blocks until one page holds the hidden states of a token
    capability = None
    with contextlib.suppress(Exception):  # under Ray, the engine's core may see no GPU
        if current_platform.is_cuda():
            capability = current_platform.get_device_capability()
    if capability is None:
        return None
    # On compute capability 10, FlashInfer supports only one such layout. Elsewhere it accepts any.
    return "BLHNC" if capability.major == 10 else "BLNHC"


def restore_block_size(vllm_config: "VllmConfig", groups: tuple[GroupSpec, ...]) -> int:
    """Corrects a fault of vLLM before 0.33 that leaves recurrent models without states to resume at.

    An engine core in a process of its own checks its configuration again when it is built, which on a CPU
    resets `block_size` to the default. The scheduler uses it to choose where steps end, so no state would lie
    at the end of a block. Returns the wrong size, or 0 if the size was right.
    """
    configured = vllm_config.cache_config.block_size
    correct = min(group.block_size for group in groups)
    if configured == correct or not any(group.kind == RECURRENT for group in groups):
        return 0
    vllm_config.cache_config.block_size = correct
    return int(configured)


def on_joined(
    vllm_config: "VllmConfig",
    groups: tuple[GroupSpec, ...],
    block_bytes: Sequence[int],
    store_everything: bool,
    joined: Joined,
) -> str:
    """Logs how much of this model the server's memory holds. Returns how to let requests resume at every
    chunk, and what that costs; empty if they do so already.

    `block_bytes` has the bytes of one block of each group.
    """
    gigabytes, longest = joined.l1_bytes / (1 << 30), vllm_config.model_config.max_model_len
    if joined.l1_bytes:
        is_small = joined.capacity_tokens < longest
        logger.log(
            logging.WARNING if is_small else logging.INFO,
            "lmcache: the server's %.4g GB have room for about %s tokens of this model%s",
            gigabytes,
            f"{joined.capacity_tokens:,}",
            f", less than one prompt of {longest:,}: start it with a larger --l1-size-gb" if is_small else "",
        )
    wanted = vllm_config.cache_config.kv_offloading_size
    if wanted is not None and 0 < gigabytes < wanted:
        logger.warning(
            "lmcache: --kv-offloading-size asks for %.4g GB, but the server has %.4g: start it with "
            "--l1-size-gb %.4g",
            *(wanted, gigabytes, wanted),
        )
    if not any(group.kind == RECURRENT for group in groups):
        return ""
    settings, chunk_size = list[str](), joined.chunk_size
    if vllm_config.cache_config.prefix_cache_retention_interval == 0:
        settings.append(f"--prefix-cache-retention-interval {chunk_size}")
    # vLLM offers a state only at the end of a step.
    if vllm_config.scheduler_config.max_num_batched_tokens >= 2 * chunk_size:
        settings.append(f"--max-num-batched-tokens below {2 * chunk_size}")
    factor = stored_factor(groups, block_bytes, chunk_size)
    if factor and not store_everything:
        settings.append('"lmcache.mp.store_everything": true')
    if not settings:
        return ""
    memory = f"about {factor:.1f} times the memory in the server, " if factor else ""
    return (
        "this model has recurrent layers, so a request resumes where an earlier prompt ended or where two "
        f"earlier prompts parted. To let it resume at every {chunk_size} tokens, set {', '.join(settings)}. "
        f"This costs {memory}room in vLLM's own cache, and time, because steps are smaller"
    )
