"""Paths of a copy: every byte by exactly one, large pieces by the copy engine, many small by the kernel."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_client.contract.geometry import Region
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.paths import MIN_KERNEL_PIECES, SMALL_BYTES, batches, joined
from lmcache_server.transfer.pins import Pins
from lmcache_server.transfer.plan import ObjectCopy, Pieces, pieces

L1_ADDRESS, ENGINE_ADDRESS = 1 << 40, 1 << 44
SLICE_BYTES = 8 << 20


def as_pieces(rows) -> Pieces:
    return Pieces(*(np.array([row[side] for row in rows], dtype=np.uint64) for side in range(3)))


def rows(found: Pieces) -> list[tuple[int, int, int]]:
    return [tuple(int(value) for value in row) for row in zip(*found, strict=True)]


def moves(found: Pieces) -> list[tuple[int, int]]:
    """(L1 address, engine address) of every single byte."""
    return [(local + i, remote + i) for local, remote, length in rows(found) for i in range(length)]


def by_definition(found: Pieces, slice_bytes: int) -> list[tuple[int, int, int]]:
    """The same pieces: joined with the one before where both sides go on in one slice."""
    result, start, number = [], 0, -1
    for local, remote, length in rows(found):
        before, number = number, start // slice_bytes
        start += length
        goes_on = result and (local, remote) == tuple(result[-1][side] + result[-1][2] for side in (0, 1))
        if goes_on and number == before:
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
    once = joined(whole, SLICE_BYTES)
    found = list(batches(once, small_bytes=small_bytes, max_batch_pieces=max_batch_pieces))
    assert sorted(move for batch in found for move in moves(batch.pieces)) == sorted(moves(whole))
    assert all(0 < len(batch.pieces.length) <= max_batch_pieces for batch in found)
    expected = rows(once)
    small = [piece for piece in expected if piece[2] < small_bytes]
    if len(small) < MIN_KERNEL_PIECES:
        small = []
    assert [row for batch in found if batch.by_kernel for row in rows(batch.pieces)] == small
    by_engine = [row for batch in found if not batch.by_kernel for row in rows(batch.pieces)]
    assert by_engine == [piece for piece in expected if piece not in small]


@given(piece_lists(), st.integers(1, 100))
@settings(max_examples=300, deadline=None)
def test_pieces_are_joined_inside_their_slice(whole, slice_bytes):
    assert rows(joined(whole, slice_bytes)) == by_definition(whole, slice_bytes)


def copies_of(region_bytes, block_ids, regions=1):
    """(whether the kernel copies them, their lengths) of blocks, each of which has so many bytes in each of
    some regions."""
    planes = tuple(Region(0, plane << 20, region_bytes, region_bytes) for plane in range(regions))
    page = ObjectCopy(((0, 64),), len(block_ids), 0, block_ids)
    whole = pieces(page, planes, (ENGINE_ADDRESS,), L1_ADDRESS, 64 << 10)
    (batch,) = batches(joined(whole, SLICE_BYTES))
    return batch.by_kernel, batch.pieces.length.tolist()


def test_large_pieces_go_by_the_copy_engine_and_many_small_ones_by_one_launch_of_the_kernel():
    assert copies_of(16 << 10, tuple(range(5, 37))) == (False, [32 * (16 << 10)]), "blocks in a row are one"
    assert copies_of(16 << 10, tuple(range(1, 64, 2)), regions=2) == (True, [16 << 10] * 64)
    scattered = tuple(range(1, 2 * MIN_KERNEL_PIECES, 2))
    assert copies_of(SMALL_BYTES - 1, scattered)[0]
    assert not copies_of(SMALL_BYTES, scattered)[0]
    assert not copies_of(SMALL_BYTES - 1, scattered[1:])[0]
    assert not list(batches(as_pieces([])))


@given(piece_lists(), st.integers(1, 60))
@settings(max_examples=300, deadline=None)
def test_no_piece_lies_over_the_border_of_two_pinned_units(whole, unit_bytes):
    pins = Pins(Gpus(), L1_ADDRESS, 1200, unit_bytes)
    pins._pinned[:] = True
    found = pins.ensure(whole)
    assert moves(found) == moves(whole)
    for local, _, length in rows(found):
        assert (local - L1_ADDRESS) // unit_bytes == (local + length - 1 - L1_ADDRESS) // unit_bytes
