"""The resume point against vLLM's own prefix cache: its coordinators, on its own block pool.

`chunk_size` is the unified block size here, and a chunk of a group is present if and only if vLLM has
cached every block that an object of it would hold. Then:

* Both find the same point when objects are complete or absent, whatever else vLLM has cached. vLLM's
  fixed point only shrinks and still finds the largest point, because what a group needs never moves back
  as the point grows; so the non-monotonic search cannot find more.
* With blocks cached at random, vLLM may resume later: it needs a part of an object, we all of it. Where
  an object is one block (every group has the unified block size), the two are equal again.
* Left out of the comparison: a window of one token (vLLM asks for a block that it does not need), a
  chunked-local span that is no multiple of the block size (vLLM may then skip the check of an earlier
  span), and its hits inside a Mamba block (`allow_partial_hash_hits`), which end at no block boundary.
"""

import itertools
import math
import os
import warnings
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_client.contract.geometry import CHUNKED_LOCAL, FULL, KINDS, RECURRENT, SLIDING_WINDOW, GroupSpec
from lmcache_client.contract.hits import resume_point

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from vllm.v1 import kv_cache_interface as vllm_specs
    from vllm.v1.core.kv_cache_coordinator import (
        HybridKVCacheCoordinator,
        UnitaryKVCacheCoordinator,
        get_kv_cache_coordinator,
    )

    from lmcache_client.connector.translate import group_specs

HASH_BLOCK_SIZE = 2


def spec_of(group, dcp_size=1):
    """The same group in vLLM's words. Every other window, by its length, is one of MLA, and so is full
    attention with some sizes of blocks. Each of `dcp_size` ranks has a part of a full block, and all of any
    other."""
    heads = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    if group.kind == FULL:
        kind = vllm_specs.MLAAttentionSpec if group.block_size % 8 else vllm_specs.FullAttentionSpec
        return kind(block_size=group.block_size // dcp_size, **heads)
    if group.kind == SLIDING_WINDOW:
        kind = vllm_specs.SlidingWindowMLASpec if group.window % 2 else vllm_specs.SlidingWindowSpec
        sizes = {"block_size": group.block_size, "sliding_window": group.window}
        return kind(**sizes, dcp_sharded=dcp_size == 1, **heads)
    if group.kind == CHUNKED_LOCAL:
        return vllm_specs.ChunkedLocalAttentionSpec(
            block_size=group.block_size, attention_chunk_size=group.window, **heads
        )
    return vllm_specs.MambaSpec(
        block_size=group.block_size, shapes=((1,),), dtypes=(torch.float16,), mamba_cache_mode="align"
    )


def unified_block_size(groups):
    return math.lcm(*(group.block_size for group in groups))


def vllm_hit(groups, cached, total_tokens, limit_tokens, dcp_size=1):
    """(resume point, per group the positions of the blocks to reuse), by vLLM itself.

    `cached` has, per group, a flag per block. Of the specs, the connector must make these groups.
    """
    config = vllm_specs.KVCacheConfig(
        num_blocks=1 + sum(map(len, cached)),
        kv_cache_tensors=[],
        kv_cache_groups=[
            vllm_specs.KVCacheGroupSpec([f"layer {number}"], spec_of(group, dcp_size))
            for number, group in enumerate(groups)
        ],
    )
    shapes = [(group.kind, group.block_size, group.window) for group in groups]
    assert [(each.kind, each.block_size, each.window) for each in group_specs(config, dcp_size)] == shapes
    hash_block_size = groups[0].block_size if len(groups) == 1 else HASH_BLOCK_SIZE
    coordinator = get_kv_cache_coordinator(
        config,
        max_model_len=total_tokens,
        max_in_flight_tokens=total_tokens,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=dcp_size,
        pcp_world_size=1,
        scheduler_block_size=unified_block_size(groups),
        hash_block_size=hash_block_size,
        allow_partial_hash_hits=False,
    )
    expected_type = UnitaryKVCacheCoordinator if len(groups) == 1 else HybridKVCacheCoordinator
    assert type(coordinator) is expected_type
    hashes = [number.to_bytes(32, "big") for number in range(total_tokens // hash_block_size)]
    pool, request = coordinator.block_pool, SimpleNamespace(block_hashes=hashes)
    for number, (group, flags) in enumerate(zip(groups, cached, strict=True)):
        blocks = pool.get_new_blocks(len(flags))
        pool.cache_full_blocks(request, blocks, 0, len(flags), group.block_size, number, list(flags))
    found, hit_tokens, _ = coordinator.find_longest_cache_hit(hashes, limit_tokens)
    positions = [[nth for nth, block in enumerate(blocks) if not block.is_null] for blocks in found]
    return hit_tokens, positions


def present_chunks(groups, cached, total_tokens):
    chunk_size = unified_block_size(groups)
    return [
        [
            all(flags[block] for block in group.stored_blocks(index, chunk_size))
            for index in range(total_tokens // chunk_size)
        ]
        for group, flags in zip(groups, cached, strict=True)
    ]


def can_resume(groups, cached, resume_tokens):
    return all(
        flags[block]
        for group, flags in zip(groups, cached, strict=True)
        for block in group.needed_blocks(resume_tokens)
    )


def our_hit(groups, cached, total_tokens, limit_tokens):
    present = present_chunks(groups, cached, total_tokens)
    return resume_point(groups, unified_block_size(groups), present, 0, limit_tokens)


@st.composite
def models(draw, one_block_size=False, kinds=KINDS):
    """Groups that vLLM can serve together."""
    kinds = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    # vLLM wants every group to have the block size of a chunked-local one.
    common = draw(st.sampled_from((4, 6, 8)))
    uneven = CHUNKED_LOCAL not in kinds and not one_block_size and len(kinds) > 1
    groups = []
    for kind in kinds:
        block_size = draw(st.sampled_from((4, 6, 8, 12))) if uneven else common
        window = 0
        if kind == SLIDING_WINDOW:
            # Around whole blocks, where the number of needed blocks changes.
            window = max(2, block_size * draw(st.integers(0, 6)) + draw(st.integers(-1, 2)))
        elif kind == CHUNKED_LOCAL:
            window = block_size * draw(st.integers(1, 5))
        groups.append(GroupSpec(kind, block_size, window, "", ()))
    return tuple(groups)


@st.composite
def cases(draw, model, whole_objects):
    """(groups, per group which blocks are cached, total tokens, limit tokens)"""
    groups = draw(model)
    chunk_size = unified_block_size(groups)
    chunks = draw(st.integers(1, 8))
    total_tokens = chunks * chunk_size
    cached = []
    for group in groups:
        # All of it, a lot of it, or some of it: else several groups together hardly ever hit.
        likely = st.sampled_from(draw(st.sampled_from(((True,), (True,) * 5 + (False,), (True, False)))))
        blocks = total_tokens // group.block_size
        flags = draw(st.lists(likely, min_size=blocks, max_size=blocks))
        for index in range(chunks if whole_objects else 0):
            # An object is there or not; of what no object holds, vLLM may have anything.
            present = draw(likely)
            for block in group.stored_blocks(index, chunk_size):
                flags[block] = present
        cached.append(flags)
    limit_tokens = draw(st.just(total_tokens - 1) | st.integers(0, total_tokens))
    return groups, cached, total_tokens, limit_tokens


@pytest.mark.parametrize(
    ("kind", "windows"),
    [
        (SLIDING_WINDOW, (2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 20, 21, 22)),
        (CHUNKED_LOCAL, (4, 8, 12, 16, 20)),
        (RECURRENT, (0,)),
        (FULL, (0,)),
    ],
)
def test_both_agree_on_every_chain_of_five_blocks(kind, windows):
    full = GroupSpec(FULL, 4, 0, "", ())
    for window, flags in itertools.product(windows, itertools.product((True, False), repeat=5)):
        group = GroupSpec(kind, 4, window, "", ())
        assert our_hit((group,), [flags], 20, 20) == vllm_hit((group,), [flags], 20, 20)[0]
        case = (full, group), [(True,) * 5, flags], 20, 20
        assert our_hit(*case) == vllm_hit(*case)[0]


@settings(max_examples=600, deadline=None)
@given(
    cases(models(), whole_objects=True)
    # An object is one block there.
    | cases(models(one_block_size=True), whole_objects=False)
)
def test_both_find_the_same_resume_point(case):
    hit_tokens, _ = vllm_hit(*case)
    assert our_hit(*case) == hit_tokens


@settings(max_examples=400, deadline=None)
@given(cases(models(), whole_objects=False))
def test_half_an_object_may_do_for_vllm_but_what_we_find_is_valid(case):
    groups, _, _, limit_tokens = case
    hit_tokens, positions = vllm_hit(*case)
    ours = our_hit(*case)
    assert ours <= hit_tokens
    assert can_resume(*case[:2], ours)
    points = range(0, limit_tokens + 1, unified_block_size(groups))
    assert hit_tokens == max(point for point in points if can_resume(*case[:2], point))
    # So the blocks that a load fills are those which vLLM then reads, no more and no less.
    assert not hit_tokens or positions == [list(group.needed_blocks(hit_tokens)) for group in groups]


@settings(max_examples=400, deadline=None)
@given(cases(models(kinds=(FULL, SLIDING_WINDOW, RECURRENT)), whole_objects=True))
def test_both_find_the_same_resume_point_where_two_ranks_divide_the_tokens_of_full_blocks(case):
    """Of windows and states, every rank has all tokens."""
    assert our_hit(*case) == vllm_hit(*case, dcp_size=2)[0]


FULL_OF_4 = GroupSpec(FULL, 4, 0, "", ())
STATES = (FULL_OF_4, GroupSpec(RECURRENT, 8, 0, "", ()))
SOME_STATES = [[True] * 8, [False, False, True, False]]


@pytest.mark.parametrize(
    ("case", "theirs", "ours"),
    [
        # A window of one token needs nothing, although vLLM asks for a block.
        (((GroupSpec(SLIDING_WINDOW, 4, 1, "", ()),), [[True, False, False]], 12, 12), 4, 12),
        # vLLM stops at 4 tokens, the first block boundary before the span of tokens 6 to 11, without looking
        # at block 0, which a resume there reads.
        (((FULL_OF_4, GroupSpec(CHUNKED_LOCAL, 4, 6, "", ())), [[True] * 2, [False] * 2], 8, 8), 4, 0),
        # A hybrid model with a snapshot at the end of the prompt: not monotonic, and equal.
        ((STATES, SOME_STATES, 32, 32), 24, 24),
        ((STATES, SOME_STATES, 32, 24), 24, 24),
        ((STATES, SOME_STATES, 32, 23), 0, 0),
    ],
)
def test_where_both_end_in_cases_that_were_worked_out_by_hand(case, theirs, ours):
    assert vllm_hit(*case)[0] == theirs
    assert our_hit(*case) == ours
