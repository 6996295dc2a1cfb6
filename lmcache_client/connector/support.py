"""What is refused, what vLLM gets wrong, and what to advise."""

from typing import TYPE_CHECKING

import torch
from vllm import __version__ as VLLM_VERSION
from vllm.v1.kv_cache_interface import MLAAttentionSpec, UniformTypeKVCacheSpecs

from lmcache_client.connector.surface import missing
from lmcache_client.contract.geometry import RECURRENT, GroupSpec
from lmcache_client.contract.version import INSTALL_VLLM, VERSION, untested

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class UnsupportedError(Exception):
    """A vLLM, a model or a setting that is not proven to be restored exactly; the message is a noun phrase
    that names it, as in "this engine is not cached, because it has …"."""


def check_vllm(untested_too: bool) -> None:
    """Raises UnsupportedError for a vLLM that lacks what the connector uses, and, unless `untested_too`, for
    one that the tests do not run."""
    reason = untested(VLLM_VERSION)
    if reason and not untested_too:
        raise UnsupportedError(reason)
    if gone := missing():
        raise UnsupportedError(
            f"vLLM {VLLM_VERSION}, which lacks {', '.join(gone)}: install a version that "
            f"lmcache-mp {VERSION} knows ({INSTALL_VLLM}) or a newer lmcache-mp"
        )


def check_supported(
    vllm_config: "VllmConfig", config: "KVCacheConfig", groups: tuple[GroupSpec, ...]
) -> None:
    """Raises UnsupportedError for what is not proven to be restored exactly; `groups` are the config's."""
    device = vllm_config.device_config.device_type
    if device not in ("cpu", "cuda"):
        raise UnsupportedError(f"its KV cache on a {device} device, which this version does not copy")
    for group in config.kv_cache_groups:
        if group.host_resident or not group.enable_kv_transfer or not group.kv_cache_spec.prefix_cacheable:
            raise UnsupportedError("a KV cache group that vLLM does not share between requests")
    if any(group.kind == RECURRENT for group in groups):
        mode = vllm_config.cache_config.mamba_cache_mode
        if mode != "align":
            raise UnsupportedError(
                f"recurrent layers with mamba_cache_mode={mode!r}: "
                "keep prefix caching enabled (before vLLM 0.33, also set --mamba-cache-mode align)"
            )
        if vllm_config.speculative_config is not None:
            raise UnsupportedError("speculative decoding on a model with recurrent layers")
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 and vllm_config.speculative_config is not None:
        # vLLM's first model runner does not call `wait_for_save`, where loads start, on all of these stages.
        raise UnsupportedError("speculative decoding together with pipeline parallelism")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise UnsupportedError("context parallelism")


def can_resume(vllm_config: "VllmConfig", config: "KVCacheConfig") -> bool:
    """Whether the engine computes a prompt from its middle on.

    With neither chunked prefill nor prefix caching a backend may attend to the new tokens alone, silently.
    vLLM's MLA backends for CPUs do so even with both, and go wrong with vLLM's own prefix cache, too.
    """
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    layers = [spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec for spec in specs]
    is_mla = any(isinstance(layer, MLAAttentionSpec) for layer in layers)
    if is_mla and vllm_config.device_config.device_type == "cpu":
        return False
    return bool(
        vllm_config.scheduler_config.enable_chunked_prefill or vllm_config.cache_config.enable_prefix_caching
    )


def preferred_layout(vllm_config: "VllmConfig") -> str | None:
    """A KV cache layout in which one block of all layers is one piece, for copies by the bus of a GPU."""
    if vllm_config.device_config.device_type != "cuda":
        return None
    # FlashInfer has one such layout alone on compute capability 10, and no preference elsewhere.
    return "BLHNC" if torch.cuda.get_device_capability()[0] == 10 else "BLNHC"


def restore_block_size(vllm_config: "VllmConfig", groups: tuple[GroupSpec, ...]) -> int:
    """Undo a fault of vLLM before 0.33 that leaves recurrent models without states to resume at.

    An engine core in a process of its own runs the checks of its configuration once more when it is
    built, and on a CPU they put `block_size` back to the default. By it the scheduler chooses where steps
    end, so that no state would lie at the end of a block. Returns the wrong size, or 0 if there was none.
    """
    found = vllm_config.cache_config.block_size
    right = min(group.block_size for group in groups)
    if found == right or not any(group.kind == RECURRENT for group in groups):
        return 0
    vllm_config.cache_config.block_size = right
    return int(found)


def granularity_advice(vllm_config: "VllmConfig", groups: tuple[GroupSpec, ...], chunk_size: int) -> str:
    """A sentence with the settings that give more resume points, or an empty string.

    vLLM publishes a recurrent state only at ends of its steps, and of those it keeps the last boundary
    of a prompt, unless it is told to keep more.
    """
    if not any(group.kind == RECURRENT for group in groups):
        return ""
    interval = vllm_config.cache_config.prefix_cache_retention_interval
    step = vllm_config.scheduler_config.max_num_batched_tokens
    advice = []
    if interval == 0:
        advice.append(f"--prefix-cache-retention-interval {chunk_size}")
    if step >= 2 * chunk_size:
        advice.append(f"--max-num-batched-tokens below {2 * chunk_size}")
    if not advice:
        return ""
    points = (
        f"every {max(step // chunk_size, 1) * chunk_size} tokens" if interval != 0 else "the end of a prompt"
    )
    return (
        "this model has recurrent layers, whose state can be resumed only where vLLM publishes it: with "
        f"these settings at {points}, which serves growing conversations; prompts that share a prefix "
        f"and then differ are served at every {chunk_size} tokens with {' and '.join(advice)}"
    )
