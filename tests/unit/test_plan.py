"""Pieces of a copy: every byte of every page is moved once, between the right places and by one path, large
pieces by the copy engine and many small ones by the kernel. Each object has a digest."""

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_client.contract.geometry import Region
from lmcache_server.transfer.cuda import MIN_KERNEL_PIECES, SMALL_BYTES, batches, joined
from lmcache_server.transfer.digest import DamagedError
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.jobs import LoadJob, StoreJob
from lmcache_server.transfer.locked_memory import LockedMemory
from lmcache_server.transfer.plan import (
    ObjectCopy,
    Pieces,
    adjacent,
    join,
    merged,
    pieces,
    pieces_of_all,
    slices,
)

FRAME_BYTES = 16
L1_ADDRESS, ENGINE_ADDRESS = 1 << 40, 1 << 44
SLICE_BYTES = 8 << 20


def rows(found: Pieces) -> list[tuple[int, int, int]]:
    return [tuple(int(value) for value in row) for row in zip(*found, strict=True)]


def moves(found: Pieces) -> list[tuple[int, int]]:
    """(L1 address, engine address) of every single byte, in the order of the pieces."""
    return [(local + i, remote + i) for local, remote, length in rows(found) for i in range(length)]


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
    found = pieces_of_all([(0, each) for each in pages], [regions], bases, L1_ADDRESS, FRAME_BYTES)
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
    sizes, starts = np.array(lengths, np.uint64), np.array(addresses, np.uint64)
    length, address = merged(adjacent(starts, sizes), sizes, starts)
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
        pieces_of_all([(0, right), (0, short)], [region], (0,), L1_ADDRESS, FRAME_BYTES)
    # A shard without layers of a group moves nothing.
    assert pieces(short, (), (0,), L1_ADDRESS, FRAME_BYTES).num_bytes == 0


# -- paths -----------------------------------------------------------------------------------------------


def as_pieces(rows) -> Pieces:
    return Pieces(*(np.array([row[side] for row in rows], dtype=np.uint64) for side in range(3)))


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
    locked, pinned = LockedMemory(Gpus(), L1_ADDRESS, 1200, unit_bytes), set[int]()
    locked.pin_unit = pinned.add  # type: ignore[method-assign,assignment]
    found = locked.ensure(whole)
    assert pinned == {(local - L1_ADDRESS) // unit_bytes for local, _ in moves(whole)}
    locked.pinned_bytes = 1200
    pinned.clear()
    assert rows(locked.ensure(whole)) == rows(found)
    assert not pinned, "all are"
    assert moves(found) == moves(whole)
    for local, _, length in rows(found):
        assert (local - L1_ADDRESS) // unit_bytes == (local + length - 1 - L1_ADDRESS) // unit_bytes


# -- digests ---------------------------------------------------------------------------------------------


@st.composite
def objects(draw):
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    num_blocks = draw(st.integers(1, 5))
    needed = -(-num_blocks * sum(sizes) // FRAME_BYTES)
    frames = draw(st.permutations(range(needed + 3)))[:needed]
    return sizes, num_blocks, tuple((frame, 1) for frame in frames)


@settings(max_examples=300)
@given(objects(), st.data())
def test_an_object_of_which_a_byte_has_changed_is_not_loaded(case, data):
    sizes, num_blocks, runs = case
    regions = [tuple(Region(0, 0, size, size) for size in sizes)]
    memory = np.random.default_rng(1).integers(0, 256, (max(f for f, _ in runs) + 1) * FRAME_BYTES, np.uint8)
    where = regions, (0,), int(memory.ctypes.data), FRAME_BYTES, lambda: None, True
    whole = ObjectCopy(runs, num_blocks, 0, tuple(range(1, num_blocks + 1)))
    store = StoreJob([(0, whole)], *where)
    store.after()
    num_bytes = num_blocks * sum(sizes)
    inside = np.concatenate([memory[f * FRAME_BYTES : (f + 1) * FRAME_BYTES] for f, _ in runs])[:num_bytes]
    assert store.digests == [xxhash.xxh3_128_digest(inside.tobytes())]

    first = data.draw(st.integers(0, num_blocks - 1))
    count = data.draw(st.integers(1, num_blocks - first))
    some = ObjectCopy(runs, num_blocks, first, tuple(range(1, count + 1)))

    def load(digests):
        return LoadJob([(0, whole), (0, some)], *where, stored=digests).build()

    def load_unchecked():
        return LoadJob([(0, whole), (0, some)], *where[:-1], False, stored=store.digests * 2).build()

    assert moves(load(store.digests * 2)) == moves(load_unchecked())
    at = data.draw(st.integers(0, num_bytes - 1))
    memory[runs[at // FRAME_BYTES][0] * FRAME_BYTES + at % FRAME_BYTES] ^= 1 << data.draw(st.integers(0, 7))
    for digests, part in ((store.digests * 2, 0), ([b"", *store.digests], 1), ([b"", b"1"], 1)):
        with pytest.raises(DamagedError, match="its stored pages have changed") as error:
            load(digests)
        assert error.value.part == part
    for unchecked in (load_unchecked(), load([b"", b""])):
        assert unchecked.num_bytes == num_bytes + count * sum(sizes)


def test_an_object_with_too_few_frames_is_not_loaded():
    regions = [(Region(0, 0, 10, 10),)]
    copy = ObjectCopy(((0, 1),), 2, 0, (1, 2))
    with pytest.raises(DamagedError, match="too few frames"):
        LoadJob([(0, copy)], regions, (0,), 0, FRAME_BYTES, lambda: None, False, stored=[b""]).build()
