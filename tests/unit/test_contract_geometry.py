"""Sizes and needs: what an object holds suffices for every resume point that may ask for it. Resume points
agree with their definition."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from lmcache_client.contract import chunk_size
from lmcache_client.contract import geometry as contract
from lmcache_client.contract.geometry import CHUNKED_LOCAL, FULL, RECURRENT, SLIDING_WINDOW, GroupSpec
from lmcache_client.contract.hits import resume_point


def group(kind, block_size, window=0, regions=()):
    return GroupSpec(kind, block_size, window, "", tuple(regions))


@st.composite
def groups(draw, block_sizes=(1, 2, 4, 16, 48), most_window=200):
    kind = draw(st.sampled_from(contract.KINDS))
    window = draw(st.integers(1, most_window)) if kind in (SLIDING_WINDOW, CHUNKED_LOCAL) else 0
    return group(kind, draw(st.sampled_from(block_sizes)), window)


@settings(deadline=None)
@given(groups(), st.integers(1, 5), st.integers(1, 12), st.integers(0, 20))
def test_objects_hold_every_block_that_a_resume_needs_and_no_other(spec, factor, chunks, computed_blocks):
    chunk_size = spec.block_size * factor
    objects = [spec.stored_blocks(index, chunk_size) for index in range(chunks)]
    for index, stored in enumerate(objects):
        inside = range(index * factor, (index + 1) * factor)
        assert set(stored) == set(inside).intersection(spec.needed_blocks((index + 1) * chunk_size))
    computed_tokens = spec.block_size * computed_blocks
    assume(computed_tokens < chunks * chunk_size)
    assert set().union(*objects).issuperset(spec.needed_blocks(chunks * chunk_size, computed_tokens))


@settings(deadline=None)
@given(groups(), st.integers(0, 40), st.integers(0, 40))
def test_what_the_engine_holds_itself_is_not_needed(spec, resume_blocks, computed_blocks):
    resume, computed = resume_blocks * spec.block_size, computed_blocks * spec.block_size
    needed = spec.needed_blocks(resume, computed)
    assert set(needed) == {block for block in spec.needed_blocks(resume) if block >= computed_blocks}
    assert needed.stop == resume_blocks


@settings(deadline=None)
@given(groups(), st.integers(0, 1000), st.integers(0, 1000))
def test_the_first_needed_token_never_moves_back(spec, tokens, more_tokens):
    """The search of hits.py rests on it."""
    assert spec.first_needed_token(tokens) <= spec.first_needed_token(tokens + more_tokens)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (group(FULL, 16), range(0, 4)),
        (group(SLIDING_WINDOW, 16, 17), range(3, 4)),
        (group(SLIDING_WINDOW, 16, 18), range(2, 4)),
        (group(SLIDING_WINDOW, 16, 1000), range(0, 4)),
        (group(SLIDING_WINDOW, 16, 1), range(4, 4)),
        (group(CHUNKED_LOCAL, 16, 48), range(3, 4)),
        (group(CHUNKED_LOCAL, 16, 32), range(4, 4)),
        (group(CHUNKED_LOCAL, 16, 40), range(2, 4)),
        (group(RECURRENT, 16), range(3, 4)),
    ],
)
def test_what_a_resume_at_64_tokens_needs(spec, expected):
    assert spec.needed_blocks(64) == expected
    assert spec.needed_blocks(0) == range(0)


ATTENTION, ONE_PAGE = group(FULL, 16), (contract.Region(0, 0, 1, 1),)
PRIMES = [group(FULL, size) for size in (4099, 4111)]


@pytest.mark.parametrize(
    ("impossible", "message"),
    [
        (lambda: group("linear", 16, 0), "a group's kind is one of full, "),
        (lambda: group(FULL, 0, 0), "a block holds 1 to "),
        (lambda: group(FULL, 1 << 30, 0), "a block holds 1 to "),
        (lambda: group(FULL, 16, 8), "window 8 does not fit a group of kind full"),
        (lambda: group(RECURRENT, 16, 8), "window 8 does not fit"),
        (lambda: group(SLIDING_WINDOW, 16, 0), "window 0 does not fit"),
        (lambda: group(CHUNKED_LOCAL, 16, -1), "window -1 does not fit"),
        (lambda: contract.Geometry((), 8), "1 to 64 KV cache groups"),
        (lambda: contract.Geometry((ATTENTION,) * (contract.MAX_GROUPS + 1), 8), "1 to 64"),
        (lambda: contract.Geometry((ATTENTION,), 1), "2 to .* blocks, not 1"),
        (lambda: chunk_size.resolve_chunk_size(None, PRIMES), r"no common multiple up to .*--block-size"),
        (lambda: chunk_size.resolve_chunk_size(1 << 20, PRIMES), r"no common multiple up to .*--block-size"),
    ],
)
def test_what_is_impossible_is_refused(impossible, message):
    with pytest.raises(contract.GeometryError, match=message):
        impossible()


def test_regions_are_counted_over_all_groups():
    half = group(FULL, 16, regions=ONE_PAGE * (contract.MAX_REGIONS // 2))
    contract.Geometry((half, half), 8)
    with pytest.raises(contract.GeometryError, match=f"at most {contract.MAX_REGIONS} regions"):
        contract.Geometry((half, half, group(FULL, 16, regions=ONE_PAGE)), 8)


def test_sizes_of_a_hybrid_model():
    regions = (contract.Region(0, 0, 400, 100), contract.Region(1, 50, 400, 30))
    geometry = contract.Geometry((group(FULL, 16, regions=regions), group(RECURRENT, 48)), 10)
    assert chunk_size.unified_block_size(geometry.groups) == 48
    assert geometry.groups[0].block_bytes == 130
    assert geometry.groups[1].block_bytes == 0


PAGES = contract.Region(buffer=0, offset=10, stride_bytes=100, page_bytes=50)


@pytest.mark.parametrize(
    ("change", "buffer_bytes", "message"),
    [
        ({}, (959,), "ends at byte 960, beyond its buffer of 959 bytes"),
        ({"offset": 11}, (960,), "ends at byte 961"),
        ({"buffer": 1}, (960,), "does not describe pages of an exported buffer"),
        ({}, (), "does not describe pages"),
        ({"stride_bytes": 49}, (960,), "does not describe pages"),
        ({"page_bytes": 0}, (960,), "a page has 1 to"),
        ({"page_bytes": 1 << 40, "stride_bytes": 1 << 41}, (1 << 60,), "a page has 1 to"),
    ],
)
def test_pages_may_reach_the_last_byte_of_a_buffer_and_no_further(change, buffer_bytes, message):
    contract.Geometry((group(FULL, 16, regions=[PAGES]),), 10).check_buffers((960,))
    geometry = contract.Geometry((group(FULL, 16, regions=[structs.replace(PAGES, **change)]),), 10)
    with pytest.raises(contract.GeometryError, match=message):
        geometry.check_buffers(buffer_bytes)


@settings(deadline=None)
@given(st.lists(groups(), min_size=1, max_size=4))
def test_auto_is_the_smallest_valid_size_from_256_tokens_on_unless_states_end_inside_it(specs):
    unified = math.lcm(*(spec.block_size for spec in specs))
    size = chunk_size.resolve_chunk_size(None, specs)
    assert size % unified == 0
    assert chunk_size.AUTO_CHUNK_TOKENS == 256
    recurrent = any(spec.kind == RECURRENT for spec in specs)
    assert size == unified if recurrent else size - unified < chunk_size.AUTO_CHUNK_TOKENS <= size
    assert chunk_size.chunk_size_warning(size, specs) == ""


def test_a_chunk_size_that_does_not_fit_is_refused_with_the_fix_and_one_that_loses_points_gets_a_warning():
    specs = [group(FULL, 16), group(FULL, 48)]
    asked = r"chunk size 100 is not .* size 48: start the server without --chunk-size, or with 144 \(or 96\)"
    with pytest.raises(contract.GeometryError, match=asked):
        chunk_size.resolve_chunk_size(100, specs)
    asked = "unified block size 48: start the server without --chunk-size, or with 48"
    with pytest.raises(contract.GeometryError, match=asked):
        chunk_size.resolve_chunk_size(20, specs)
    recurrent = [group(FULL, 16), group(RECURRENT, 48)]
    assert chunk_size.resolve_chunk_size(144, recurrent) == 144
    assert "2 of 3 such boundaries" in chunk_size.chunk_size_warning(144, recurrent)
    assert chunk_size.chunk_size_warning(48, recurrent) == ""
    assert chunk_size.chunk_size_warning(256, [group(FULL, 16)]) == ""


# -- resume points, tried out one by one ---------------------------------------------------------------------


def first_needed_token(spec, resume_tokens):
    """Section "what a group needs", written down a second time."""
    if spec.kind == FULL:
        return 0
    if spec.kind == SLIDING_WINDOW:
        return resume_tokens - spec.window + 1
    if spec.kind == CHUNKED_LOCAL:
        return resume_tokens - resume_tokens % spec.window
    return resume_tokens - 1


def can_resume(specs, chunk_size, present, computed_tokens, resume_tokens):
    """Token by token: whoever needs a token needs the whole block, and so the object it is in."""
    for spec, flags in zip(specs, present, strict=True):
        for token in range(resume_tokens):
            block = token // spec.block_size
            touched = any(
                max(first_needed_token(spec, resume_tokens), computed_tokens) <= each < resume_tokens
                for each in range(block * spec.block_size, (block + 1) * spec.block_size)
            )
            if touched and not flags[token // chunk_size]:
                return False
    return True


def naive_resume_point(specs, chunk_size, present, computed_tokens, limit_tokens):
    chunks = len(present[0])
    points = [
        point
        for point in range(chunk_size, chunks * chunk_size + 1, chunk_size)
        if computed_tokens < point <= limit_tokens
        and can_resume(specs, chunk_size, present, computed_tokens, point)
    ]
    return max(points, default=0)


@st.composite
def chains(draw):
    """(groups, chunk size, presence, computed tokens, limit tokens)"""
    specs = draw(st.lists(groups((2, 4, 8), 40), min_size=1, max_size=4))
    chunk_size = 8 * draw(st.integers(1, 3))
    chunks = draw(st.integers(0, 6))
    flags = st.lists(st.sampled_from((True, True, True, False)), min_size=chunks, max_size=chunks)
    present = [draw(flags) for _ in specs]
    return specs, chunk_size, present, 8 * draw(st.integers(0, 10)), draw(st.integers(0, 7 * chunk_size))


@settings(max_examples=400, deadline=None)
@given(chains())
def test_the_resume_point_is_the_largest_that_works(chain):
    assert resume_point(*chain) == naive_resume_point(*chain)


def test_a_chain_of_many_misses_is_searched_quickly():
    specs = [group(FULL, 16), group(SLIDING_WINDOW, 16, 512), group(RECURRENT, 16)]
    chunks = 1 << 16
    alternating = bytes([1, 0] * (chunks // 2))
    present = [bytes([1]) * chunks, alternating, alternating]
    assert resume_point(specs, 16, present, 0, 16 * chunks) == 16
