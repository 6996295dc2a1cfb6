"""Paths of a copy: every byte by exactly one, large pieces by the copy engine, many small by the kernel."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_client.contract.geometry import Region
from lmcache_server.transfer.paths import MIN_KERNEL_PIECES, SMALL_BYTES, batches
from lmcache_server.transfer.plan import ObjectCopy, Pieces, pieces

L1_ADDRESS, ENGINE_ADDRESS = 1 << 40, 1 << 44


def as_pieces(rows) -> Pieces:
    return Pieces(*(np.array([row[side] for row in rows], dtype=np.uint64) for side in range(3)))


def rows(found: Pieces) -> list[tuple[int, int, int]]:
    return [tuple(int(value) for value in row) for row in zip(*found, strict=True)]


def moves(found: Pieces) -> list[tuple[int, int]]:
    """(L1 address, engine address) of every single byte."""
    return [(local + i, remote + i) for local, remote, length in rows(found) for i in range(length)]


def joined(found: Pieces) -> list[tuple[int, int, int]]:
    """The same pieces from the definition: joined with the one before where both sides go on."""
    result = []
    for local, remote, length in rows(found):
        if result and (local, remote) == tuple(result[-1][side] + result[-1][2] for side in (0, 1)):
            result[-1] = (*result[-1][:2], result[-1][2] + length)
        else:
            result.append((local, remote, length))
    return result


@st.composite
def piece_lists(draw):
    """Pieces with and without gaps before them, on each side alone and on both."""
    steps = st.tuples(st.integers(1, 12), st.sampled_from([0, 0, 3]), st.sampled_from([0, 0, 5]))
    local, remote, result = L1_ADDRESS, ENGINE_ADDRESS, []
    count = draw(st.integers(0, 60))
    for length, local_gap, remote_gap in draw(st.lists(steps, min_size=count, max_size=count)):
        local, remote = local + local_gap, remote + remote_gap
        result.append((local, remote, length))
        local, remote = local + length, remote + length
    return as_pieces(result)


@given(piece_lists(), st.integers(0, 40), st.integers(1, 30))
@settings(max_examples=300, deadline=None)
def test_every_byte_goes_once_by_the_path_of_its_piece(whole, small_bytes, max_batch_pieces):
    found = list(batches(whole, small_bytes=small_bytes, max_batch_pieces=max_batch_pieces))
    assert sorted(move for batch in found for move in moves(batch.pieces)) == sorted(moves(whole))
    assert all(0 < len(batch.pieces.length) <= max_batch_pieces for batch in found)
    expected = joined(whole)
    small = [piece for piece in expected if piece[2] < small_bytes]
    if len(small) < MIN_KERNEL_PIECES:
        small = []
    assert [row for batch in found if batch.by_kernel for row in rows(batch.pieces)] == small
    by_engine = [row for batch in found if not batch.by_kernel for row in rows(batch.pieces)]
    assert by_engine == [piece for piece in expected if piece not in small]


@given(piece_lists(), st.lists(st.integers(0, 400), max_size=4))
@settings(max_examples=300, deadline=None)
def test_no_piece_lies_over_a_border(whole, places):
    """Though pieces that touch there are joined."""
    borders = np.array(sorted({L1_ADDRESS + place for place in places}), np.uint64)
    found = [row for batch in batches(whole, borders=borders) for row in rows(batch.pieces)]
    expected = []
    for local, remote, length in joined(whole):
        start = 0
        for border in [*borders.tolist(), local + length]:
            if start < border - local <= length:
                expected.append((local + start, remote + start, border - local - start))
                start = border - local
    assert sorted(found) == sorted(expected)


def copies_of(regions, block_ids):
    page = ObjectCopy(((0, 64),), len(block_ids), 0, block_ids)
    return list(batches(pieces(page, regions, (ENGINE_ADDRESS,), L1_ADDRESS, 64 << 10)))


def test_blocks_in_a_row_of_a_cache_with_the_block_outermost_are_one_piece_for_the_copy_engine():
    whole_block = (Region(0, 0, 16 << 10, 16 << 10),)
    (batch,) = copies_of(whole_block, tuple(range(5, 37)))
    assert not batch.by_kernel
    assert batch.pieces.length.tolist() == [32 * (16 << 10)]


def test_scattered_small_pages_are_one_launch_of_the_kernel():
    planes = tuple(Region(0, plane << 20, 16 << 10, 16 << 10) for plane in range(2))
    (batch,) = copies_of(planes, tuple(range(1, 64, 2)))
    assert batch.by_kernel
    assert batch.pieces.length.tolist() == [16 << 10] * 64


def test_the_limits_of_a_small_piece_and_of_a_launch():
    def by_kernel(page_bytes, num_pages):
        scattered = tuple(range(1, 2 * num_pages, 2))
        (batch,) = copies_of((Region(0, 0, page_bytes, page_bytes),), scattered)
        return batch.by_kernel

    assert by_kernel(SMALL_BYTES - 1, MIN_KERNEL_PIECES)
    assert not by_kernel(SMALL_BYTES, MIN_KERNEL_PIECES)
    assert not by_kernel(SMALL_BYTES - 1, MIN_KERNEL_PIECES - 1)


def test_nothing_to_copy_is_no_batch():
    assert not list(batches(as_pieces([])))
