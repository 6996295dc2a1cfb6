"""What a user of a recurrent model should know about where its prompts can be resumed."""

from typing import TYPE_CHECKING

from lmcache_client.contract.geometry import RECURRENT, GroupSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
