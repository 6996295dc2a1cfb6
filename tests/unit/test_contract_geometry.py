"""Sizes and needs: what an object holds suffices for every resume point that may ask for it."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from lmcache_client.contract import geometry as contract
from lmcache_client.contract.geometry import (
    CHUNKED_LOCAL,
    FULL,
    KINDS,
    RECURRENT,
    SLIDING_WINDOW,
    Geometry,
    GeometryError,
    GroupSpec,
    Region,
    chunk_size_warning,
    resolve_chunk_size,
)


def group(kind, block_size, window=0, regions=()):
    return GroupSpec(kind, block_size, window, "", tuple(regions))


@st.composite
def groups(draw):
    kind = draw(st.sampled_from(KINDS))
    window = draw(st.integers(1, 200)) if kind in (SLIDING_WINDOW, CHUNKED_LOCAL) else 0
    return group(kind, draw(st.sampled_from((1, 2, 4, 16, 48))), window)


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
    ("spec", "resume_tokens", "expected"),
    [
        (group(FULL, 16), 64, range(0, 4)),
        (group(SLIDING_WINDOW, 16, 17), 64, range(3, 4)),
        (group(SLIDING_WINDOW, 16, 18), 64, range(2, 4)),
        (group(SLIDING_WINDOW, 16, 1000), 64, range(0, 4)),
        (group(SLIDING_WINDOW, 16, 1), 64, range(4, 4)),
        (group(CHUNKED_LOCAL, 16, 48), 64, range(3, 4)),
        (group(CHUNKED_LOCAL, 16, 32), 64, range(4, 4)),
        (group(CHUNKED_LOCAL, 16, 40), 64, range(2, 4)),
        (group(RECURRENT, 16), 64, range(3, 4)),
        (group(RECURRENT, 16), 0, range(0, 0)),
    ],
)
def test_needed_blocks(spec, resume_tokens, expected):
    assert spec.needed_blocks(resume_tokens) == expected


ATTENTION, ONE_PAGE = group(FULL, 16), (Region(0, 0, 1, 1),)
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
        (lambda: Geometry((), 8), "1 to 64 KV cache groups"),
        (lambda: Geometry((ATTENTION,) * (contract.MAX_GROUPS + 1), 8), "1 to 64"),
        (lambda: Geometry((ATTENTION,), 1), "2 to .* blocks, not 1"),
        (lambda: resolve_chunk_size(None, PRIMES), r"no common multiple up to .*--block-size"),
        (lambda: resolve_chunk_size(1 << 20, PRIMES), r"no common multiple up to .*--block-size"),
    ],
)
def test_what_is_impossible_is_refused(impossible, message):
    with pytest.raises(GeometryError, match=message):
        impossible()


def test_regions_are_counted_over_all_groups():
    half = group(FULL, 16, regions=ONE_PAGE * (contract.MAX_REGIONS // 2))
    Geometry((half, half), 8)
    with pytest.raises(GeometryError, match=f"at most {contract.MAX_REGIONS} regions"):
        Geometry((half, half, group(FULL, 16, regions=ONE_PAGE)), 8)


def test_sizes_of_a_hybrid_model():
    regions = (Region(0, 0, 400, 100), Region(1, 50, 400, 30))
    geometry = Geometry((group(FULL, 16, regions=regions), group(RECURRENT, 48)), 10)
    assert contract.unified_block_size(geometry.groups) == 48
    assert geometry.groups[0].block_bytes == 130
    assert geometry.groups[1].block_bytes == 0


PAGES = Region(buffer=0, offset=10, stride_bytes=100, page_bytes=50)


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
    Geometry((group(FULL, 16, regions=[PAGES]),), 10).check_buffers((960,))
    geometry = Geometry((group(FULL, 16, regions=[structs.replace(PAGES, **change)]),), 10)
    with pytest.raises(GeometryError, match=message):
        geometry.check_buffers(buffer_bytes)


@settings(deadline=None)
@given(st.lists(groups(), min_size=1, max_size=4))
def test_auto_is_the_smallest_valid_size_from_256_tokens_on_unless_states_end_inside_it(specs):
    unified = math.lcm(*(spec.block_size for spec in specs))
    size = resolve_chunk_size(None, specs)
    assert size % unified == 0
    assert contract.AUTO_CHUNK_TOKENS == 256
    recurrent = any(spec.kind == RECURRENT for spec in specs)
    assert size == unified if recurrent else size - unified < contract.AUTO_CHUNK_TOKENS <= size
    assert chunk_size_warning(size, specs) == ""


def test_a_chunk_size_that_does_not_fit_is_refused_with_the_fix():
    specs = [group(FULL, 16), group(FULL, 48)]
    asked = r"chunk size 100 is not .* size 48: start the server without --chunk-size, or with 144 \(or 96\)"
    with pytest.raises(GeometryError, match=asked):
        resolve_chunk_size(100, specs)
    asked = "unified block size 48: start the server without --chunk-size, or with 48"
    with pytest.raises(GeometryError, match=asked):
        resolve_chunk_size(20, specs)


def test_a_chunk_size_that_loses_resume_points_gets_a_warning():
    recurrent = [group(FULL, 16), group(RECURRENT, 48)]
    assert resolve_chunk_size(144, recurrent) == 144
    assert "2 of 3 such boundaries" in chunk_size_warning(144, recurrent)
    assert chunk_size_warning(48, recurrent) == ""
    assert chunk_size_warning(256, [group(FULL, 16)]) == ""
