"""The frame pool: no frame is lost or given twice, and objects get few runs."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_server.core.pool import FramePool, Runs, count_frames


def frames_of(runs: Runs) -> list[int]:
    return [frame for start, count in runs for frame in range(start, start + count)]


def test_what_is_set_aside_is_given_to_nobody_until_it_is_back():
    pool = FramePool(20)
    first, second = pool.allocate(4), pool.allocate(6)
    assert (first, second) == (((0, 4),), ((4, 6),))
    pool.set_aside(((2, 6), (15, 100)))
    assert pool.free_frames == 5
    pool.check_integrity()
    pool.free(first)
    pool.free(second)
    pool.check_integrity()
    assert (pool.free_frames, count_frames(tuple(pool.aside))) == (9, 11)
    runs = pool.allocate(9)
    assert sorted(frames_of(runs)) == [0, 1, 8, 9, 10, 11, 12, 13, 14]
    assert pool.allocate(1) is None
    pool.set_aside(((0, 1),))
    pool.free(runs)
    assert pool.free_frames == 19
    pool.set_aside(((20, 1),))
    pool.grow(2)
    assert pool.free_frames == 21
    pool.set_aside(())
    assert pool.allocate(20) == ((0, 20),)
    pool.check_integrity()


def test_neighbours_merge_and_a_hole_of_the_right_size_is_filled_before_a_larger_run_is_cut():
    pool = FramePool(5)
    pool.grow(4)
    first, middle, last = (pool.allocate(3) for _ in range(3))
    for runs in (first, last, middle):
        pool.free(runs)
    assert pool.free_runs() == ((0, 9),)
    hole = pool.allocate(2)
    pool.allocate(2)
    pool.free(hole)
    assert pool.allocate(2) == hole


def test_a_pool_of_a_hundred_gigabytes_takes_no_memory_for_each_frame():
    tracemalloc.start()
    pool = FramePool(100 * 2**30 // 2**16)
    assert pool.allocate(1_600_000) == ((0, 1_600_000),)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000


def test_senseless_sizes_and_frames_that_are_not_taken_are_refused():
    for taken in (((0, 4), (3, 1)), ((2, 2), (2, 2)), ((9, 2),), ((3, 0),), ((-1, 2),), ((0, 1 << 60),)):
        with pytest.raises(ValueError):
            FramePool.around(10, [taken])
    pool = FramePool(4)
    runs = pool.allocate(4)
    for others in (((0, 0),), ((-1, 2),), ((3, 2),)):
        with pytest.raises(ValueError, match="not in this pool"):
            pool.free(others)
    pool.free(runs)
    with pytest.raises(AssertionError, match="free already"):
        pool.free(runs)
    with pytest.raises(ValueError, match="at least one frame"):
        pool.allocate(0)
    with pytest.raises(ValueError, match="cannot grow"):
        FramePool(-1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("allocate", "free", "grow")), st.integers(1, 20))))
def test_every_frame_has_one_owner_at_any_time(steps):
    pool = FramePool()
    owned: list[Runs] = []
    for step, number in steps:
        if step == "grow":
            pool.grow(number)
        elif step == "free" and owned:
            pool.free(owned.pop(number % len(owned)))
        elif step == "allocate":
            free = pool.free_frames
            runs = pool.allocate(number)
            assert (runs is None) == (number > free)
            if runs is not None:
                assert count_frames(runs) == number
                owned.append(runs)
        pool.check_integrity()
        frames = [frame for runs in (*owned, pool.free_runs()) for frame in frames_of(runs)]
        assert sorted(frames) == list(range(pool.total_frames))
        assert pool.largest_free_run() == max((count for _, count in pool.free_runs()), default=0)


@settings(max_examples=200)
@given(st.integers(0, 60), st.lists(st.integers(1, 9)), st.randoms(use_true_random=False))
def test_a_pool_around_what_is_taken_has_the_same_free_frames(total, sizes, random):
    pool = FramePool(total)
    taken = [runs for size in sizes if (runs := pool.allocate(size)) is not None]
    while taken and random.random() < 0.7:
        pool.free(taken.pop(random.randrange(len(taken))))
    again = FramePool.around(total, taken)
    again.check_integrity()
    assert (again.total_frames, again.free_frames) == (total, pool.free_frames)
    assert sorted(again.free_runs()) == sorted(pool.free_runs())
