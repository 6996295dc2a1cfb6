"""Decode context parallelism (DCP) on a CPU, for which vLLM has no attention that can do it.

Here each rank keeps the tokens that vLLM's kernel for GPUs would give it (v1/worker/block_table.py).
Attention gathers the pages of all ranks of the DCP group, brings the tokens into their order and computes
with torch. So vLLM's own scheduler, block pool, block tables and planning do what they do on GPUs. In the
engine's process and its workers only.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

PAD_SLOT = -1


def supply(interleave: int) -> None:
    """Call before the engine is made; its workers are forked from this process. `interleave` is the engine's
    cp_kv_cache_interleave_size."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.block_table import BlockTable

    from lmcache_client.connector import support

    BlockTable.compute_slot_mapping = _compute_slot_mapping
    CPUAttentionBackendImpl.can_return_lse_for_decode = True  # vLLM refuses to start without
    CPUAttentionBackendImpl.supports_dcp = True
    CPUAttentionBackendImpl.interleave = interleave
    CPUAttentionBackendImpl.do_kv_cache_update = _write
    CPUAttentionBackendImpl.forward = _forward
    # With DCP, vLLM resumes inside blocks of hybrid models. Its copy of them is mended here.
    gpu_model_runner.copy_kv_cache_blocks_inplace = _copy
    support.damages_pages = lambda *_: False


def _compute_slot_mapping(table: Any, num_reqs: int, starts: torch.Tensor, positions: torch.Tensor) -> None:
    """Where this rank keeps each token, or PAD_SLOT for those of other ranks."""
    size, dcp, interleave = table.block_size, table.dcp_world_size, table.cp_kv_cache_interleave_size
    lengths = torch.diff(starts[: num_reqs + 1]).to(torch.int64)
    rows = torch.repeat_interleave(torch.arange(num_reqs), lengths)
    tokens = positions[: len(rows)]
    block, offset = tokens // (size * dcp), tokens % (size * dcp)
    local = offset // (dcp * interleave) * interleave + offset % interleave
    slots = table.block_table.gpu[rows, block].to(torch.int64) * size + local
    is_own = offset // interleave % dcp == table.dcp_rank
    table.slot_mapping.gpu.fill_(PAD_SLOT)
    table.slot_mapping.gpu[: len(rows)] = torch.where(is_own, slots, PAD_SLOT)


def _copy(views: Iterable[torch.Tensor], num_blocks: int, copies: Sequence[Any]) -> None:
    """All bytes of these blocks, also where views of different lengths begin at the same place."""
    for view in views:
        blocks = view.unflatten(0, (num_blocks, -1))
        for source, target in copies:
            blocks[target] = blocks[source]


def _write(
    _: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Into pages of (heads, tokens, key and value)."""
    own = slots >= 0
    block, at = slots[own] // cache.shape[2], slots[own] % cache.shape[2]
    cache[block, :, at] = torch.cat([key, value], dim=-1)[: len(slots)][own].to(cache.dtype)


def _forward(
    impl: Any,
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    metadata: Any,
    output: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    if metadata is None:
        return output
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        if start == end:
            continue
        tokens = _gathered(cache, metadata.block_table[row], lengths[row], impl.interleave)
        keys, values = (each.repeat_interleave(impl.num_queries_per_kv, 0) for each in tokens.chunk(2, -1))
        first = lengths[row] - (end - start)
        mask = torch.ones(end - start, lengths[row], dtype=torch.bool).tril(first)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[start:end].transpose(0, 1), keys, values, attn_mask=mask, scale=impl.scale
        )
        output[start:end] = attended.transpose(0, 1).view_as(output[start:end])
    return output


def _gathered(cache: torch.Tensor, table: torch.Tensor, length: int, interleave: int) -> torch.Tensor:
    """The keys and values of a request's first `length` tokens, from all ranks: (heads, tokens, both)."""
    from vllm.distributed import get_dcp_group

    group, size = get_dcp_group(), cache.shape[2]
    dcp = group.world_size
    pages = cache[table[: -(-length // (size * dcp))].to(torch.int64)]
    of_all = group.all_gather(pages.unsqueeze(0).contiguous(), dim=0)
    of_all = of_all.unflatten(3, (size // interleave, interleave))
    # (rank, block, head, turn, token, both) into the order of the tokens
    return of_all.permute(2, 1, 3, 0, 4, 5).flatten(1, 4)[:, :length]
