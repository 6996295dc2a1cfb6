"""Pieces of a copy: every byte of every page is moved exactly once, between the right two places."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_client.contract.geometry import Region
from lmcache_server.transfer.plan import ObjectCopy, Pieces, join, merged, pieces, pieces_of_all, slices

FRAME_BYTES = 16
L1_ADDRESS = 1 << 40


def moves(found: Pieces) -> list[tuple[int, int]]:
    """(L1 address, engine address) of every single byte, in the order of the pieces."""
    return [
        (int(local) + i, int(remote) + i)
        for local, remote, length in zip(*found, strict=True)
        for i in range(int(length))
    ]


def expected_moves(page: ObjectCopy, regions, bases) -> list[tuple[int, int]]:
    """The same from the definition of the byte order, byte by byte."""
    l1_bytes = [
        L1_ADDRESS + frame * FRAME_BYTES + i
        for start, count in page.runs
        for frame in range(start, start + count)
        for i in range(FRAME_BYTES)
    ]
    result, region_start = [], 0
    for region in regions:
        for k, block in enumerate(page.block_ids, page.first_page):
            inside = region_start + k * region.page_bytes
            remote = bases[region.buffer] + region.offset + block * region.stride_bytes
            result += [(l1_bytes[inside + i], remote + i) for i in range(region.page_bytes)]
        region_start += page.num_blocks * region.page_bytes
    return result


@st.composite
def cases(draw):
    regions = tuple(
        Region(draw(st.integers(0, 1)), draw(st.integers(0, 50)), size + draw(st.integers(0, 9)), size)
        for size in draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    )
    num_blocks = draw(st.integers(1, 6))
    first_page = draw(st.integers(0, num_blocks))
    block_ids = draw(st.lists(st.integers(1, 30), max_size=num_blocks - first_page, unique=True))
    num_frames = -(-num_blocks * sum(region.page_bytes for region in regions) // FRAME_BYTES)
    runs, frame = [], 0
    while sum(count for _, count in runs) < num_frames:
        frame += draw(st.integers(0, 3))
        count = draw(st.integers(1, num_frames - sum(count for _, count in runs)))
        runs.append((frame, count))
        frame += count
    runs = draw(st.permutations(runs))
    return ObjectCopy(tuple(runs), num_blocks, first_page, tuple(block_ids)), regions, (1 << 44, 1 << 45)


@given(cases())
@settings(max_examples=300, deadline=None)
def test_every_byte_goes_where_the_byte_order_says(case):
    page, regions, bases = case
    found = pieces(page, regions, bases, L1_ADDRESS, FRAME_BYTES)
    assert all(array.dtype == np.uint64 for array in found)
    assert moves(found) == expected_moves(page, regions, bases)
    assert all(found.length > 0)


@given(cases(), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), max_size=6))
@settings(max_examples=200, deadline=None)
def test_objects_together_give_the_moves_of_each(case, others):
    """Of one shape and of others, in one run of frames and in several."""
    page, regions, bases = case
    frames = sum(count for _, count in page.runs)
    pages = [page]
    for number, (first, count, whole) in enumerate(others):
        ids = tuple(range(1 + number, 1 + number + min(count, page.num_blocks - min(first, page.num_blocks))))
        runs = ((100 * number, frames),) if whole else page.runs
        pages.append(ObjectCopy(runs, page.num_blocks, min(first, page.num_blocks), ids))
    found = pieces_of_all(pages, regions, bases, L1_ADDRESS, FRAME_BYTES)
    assert all(array.dtype == np.uint64 for array in found)
    assert sorted(moves(found)) == sorted(
        move for each in pages for move in expected_moves(each, regions, bases)
    )


@given(st.lists(cases(), min_size=1, max_size=3), st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_slices_keep_every_piece_and_their_order(several, slice_bytes):
    whole = join([pieces(*case, L1_ADDRESS, FRAME_BYTES) for case in several])
    parts = slices(whole.length, slice_bytes)
    assert [place for first, last, _ in parts for place in range(first, last)] == list(
        range(len(whole.length))
    )
    start = 0
    for first, last, num_bytes in parts:
        sizes = [int(length) for length in whole.length[first:last]]
        assert sum(sizes) == num_bytes > 0
        assert (start + num_bytes - sizes[-1]) // slice_bytes == start // slice_bytes, (
            "all begin in one slice"
        )
        start += num_bytes
        assert start == int(whole.length.sum()) or start // slice_bytes != (start - num_bytes) // slice_bytes


def test_nothing_has_no_slices():
    assert slices(np.zeros(0, np.uint64), 8) == []


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), max_size=20))
def test_merging_a_side_keeps_its_bytes_and_leaves_no_neighbours(steps):
    addresses, lengths, at = [], [], 1000
    for gap, length in steps:
        at += gap
        addresses.append(at)
        lengths.append(length)
        at += length
    length, address = merged(np.array(lengths, np.uint64), np.array(addresses, np.uint64))
    single = [a + i for a, n in zip(addresses, lengths, strict=True) for i in range(n)]
    assert [int(a) + i for a, n in zip(address, length, strict=True) for i in range(int(n))] == single
    assert not any(address[1:] == address[:-1] + length[:-1])


def test_pages_beyond_the_object_are_an_error_not_a_write_into_the_next_one():
    region = (Region(0, 0, 16, 16),)
    right, short = ObjectCopy(((0, 2),), 2, 0, (5, 6)), ObjectCopy(((2, 1),), 2, 0, (5, 6))
    for page in (ObjectCopy(((0, 4),), 2, 1, (5, 6)), short):
        with pytest.raises(AssertionError):
            pieces(page, region, (0,), L1_ADDRESS, FRAME_BYTES)
    with pytest.raises(AssertionError):
        pieces_of_all([right, short], region, (0,), L1_ADDRESS, FRAME_BYTES)
    # A shard without layers of a group moves nothing.
    assert pieces(short, (), (0,), L1_ADDRESS, FRAME_BYTES).num_bytes == 0
