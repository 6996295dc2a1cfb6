"""The chunk size of a model: a multiple of its unified block size, chosen by the user or by `auto`."""

import math
from collections.abc import Sequence

from lmcache_client.contract.geometry import MAX_CHUNK_TOKENS, RECURRENT, GeometryError, GroupSpec

AUTO_CHUNK_TOKENS = 256
"""`--chunk-size auto` picks at least this many tokens if no group is recurrent."""


def unified_block_size(groups: Sequence[GroupSpec]) -> int:
    """The least common multiple of the groups' block sizes, in tokens."""
    return math.lcm(*(group.block_size for group in groups))


def resolve_chunk_size(chunk_size: int | None, groups: Sequence[GroupSpec]) -> int:
    """The chunk size in tokens for a model with these groups; `None` means `auto`.

    Raises GeometryError unless an explicit chunk size is a multiple of the unified block size.
    """
    unified = unified_block_size(groups)
    if unified > MAX_CHUNK_TOKENS:
        raise GeometryError(
            f"the block sizes of this model's groups have no common multiple up to {MAX_CHUNK_TOKENS}: "
            "start vLLM with another --block-size"
        )
    if chunk_size is None:
        if any(group.kind == RECURRENT for group in groups):
            # vLLM may keep a state at any block boundary. Requests resume only at chunk boundaries, so a
            # chunk is one unified block.
            return unified
        return unified * math.ceil(AUTO_CHUNK_TOKENS / unified)
    if chunk_size % unified:
        below = chunk_size // unified * unified
        raise GeometryError(
            f"chunk size {chunk_size} is not a multiple of this model's unified block size {unified}: "
            f"start the server without --chunk-size, or with {below + unified}"
            + (f" (or {below})" if below else "")
        )
    return chunk_size


def chunk_size_warning(chunk_size: int, groups: Sequence[GroupSpec]) -> str:
    """A warning if `chunk_size` loses resume points of a recurrent model, otherwise an empty string."""
    unified = unified_block_size(groups)
    factor = chunk_size // unified
    if factor < 2 or not any(group.kind == RECURRENT for group in groups):
        return ""
    return (
        f"chunk size {chunk_size} is {factor} times the unified block size {unified} of a recurrent model: "
        "vLLM keeps its state at the last block boundary of a prompt, but requests cannot resume at "
        f"{factor - 1} of {factor} such boundaries; --chunk-size auto keeps them all"
    )
