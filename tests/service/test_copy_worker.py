"""The copy thread: every job ends once, loads overtake, nothing is copied after the end."""

import concurrent.futures
import functools
import queue
import threading

import numpy as np
import pytest
from harness.waiting import PATIENCE_S

from lmcache_server.transfer.base import CopyError
from lmcache_server.transfer.copy_queue import CopyWorker
from lmcache_server.transfer.plan import Pieces, slices

SLICE_BYTES = 1 << 20
TIMEOUT_S = PATIENCE_S


def slices_of(name, count):
    """Pieces of `count` slices; the address says whose they are."""
    address = np.full(count, name, np.uint64)
    return Pieces(address, address, np.full(count, SLICE_BYTES, np.uint64))


class Job:
    def __init__(self, load, build, checksums=False):
        self.load, self.build, self.checksums = load, build, checksums

    def after(self):
        pass


class Harness:
    """A worker, and the memory that it copies, whose copies wait to be let through, one slice at a time."""

    bases = ()
    lost = may_pin = False
    lanes = ((True, False),)
    slice_bytes = {True: SLICE_BYTES, False: SLICE_BYTES}  # noqa: RUF012

    def __init__(self):
        self.alive = True
        self.copied, self.calls = [], []
        self.started, self.ended = queue.Queue(), queue.Queue()
        self.gates = dict.fromkeys((True, False), threading.Semaphore(0))
        self.fail_with = None
        self.worker = CopyWorker("copy-test", self, lambda: self.alive, self)

    def open(self):
        return [b"nonce"]

    def begun(self, *, load):
        return lambda: self.calls.append(("finished", load, len(self.copied)))

    def close(self):
        self.calls.append("closed")

    def copies(self, whole, *, load):
        for first, last, num_bytes in slices(whole.length, self.slice_bytes[load]):
            part = Pieces(*(array[first:last] for array in whole))
            yield num_bytes, lambda part=part: self.copy(part, load=load)

    def copy(self, part, *, load):
        self.started.put(int(part.local[0]))
        assert self.gates[load].acquire(timeout=TIMEOUT_S)
        if self.fail_with is not None:
            raise self.fail_with
        self.copied.append(int(part.local[0]))

    # -- the event loop that the worker sees ------------------------------------------------------

    create_future = staticmethod(concurrent.futures.Future)

    def call_soon_threadsafe(self, function, *arguments):
        function(*arguments)

    # -- what tests ask ---------------------------------------------------------------------------

    def submit(self, name, count, *, load, build=None, checksums=False):
        end = self.worker.submit(Job(load, build or (lambda: slices_of(name, count)), checksums))
        end.add_done_callback(lambda future: self.ended.put((name, *future.result())))

    def go_on(self, slices, load=True):
        self.gates[load].release(slices)

    def wait_for_slice(self):
        return self.started.get(timeout=TIMEOUT_S)

    def wait_for_end(self):
        return self.ended.get(timeout=TIMEOUT_S)

    def end(self):
        for load in (True, False):
            self.go_on(1000, load)
        self.worker.close().result(TIMEOUT_S)
        self.worker._thread.join(TIMEOUT_S)
        assert not self.worker._thread.is_alive()


class Late(Harness):
    """Its copies are begun at once and end when the test says so. Each direction has a lane."""

    lanes = ((True,), (False,))
    slice_bytes = {True: SLICE_BYTES, False: SLICE_BYTES // 4}  # noqa: RUF012

    def __init__(self):
        self.num_begun, self.num_ended = {True: 0, False: 0}, {True: 0, False: 0}
        super().__init__()
        self.gates[False] = threading.Semaphore(0)

    def copy(self, part, *, load):
        self.num_begun[load] += 1
        self.started.put((int(part.local[0]), load))
        # As on a GPU: with two under way, it waits for the first of them.
        self.finish(self.num_begun[load] - 1, load)

    def begun(self, *, load):
        return functools.partial(self.finish, self.num_begun[load], load)

    def finish(self, count, load):
        while self.num_ended[load] < count:
            assert self.gates[load].acquire(timeout=TIMEOUT_S)
            self.num_ended[load] += 1


@pytest.fixture
def harness():
    it = Harness()
    yield it
    it.end()


@pytest.fixture
def late():
    it = Late()
    yield it
    it.end()


def test_loads_overtake_a_long_store_and_jobs_of_a_kind_keep_their_order(harness):
    harness.submit(1, 4, load=False)
    harness.wait_for_slice()
    for name, count, load in ((2, 1, False), (3, 2, True), (4, 1, True), (5, 1, True)):
        harness.submit(name, count, load=load)
    harness.go_on(9)
    assert [harness.wait_for_end()[0] for _ in range(5)] == [3, 4, 5, 1, 2]
    assert harness.copied == [1, 3, 3, 4, 5, 1, 1, 1, 2]


def test_nothing_is_copied_once_the_process_is_dead(harness):
    harness.submit(1, 3, load=True)
    harness.wait_for_slice()
    harness.alive = False
    harness.go_on(3)
    name, error, num_bytes = harness.wait_for_end()
    assert (name, num_bytes, harness.copied) == (1, SLICE_BYTES, [1])
    assert isinstance(error, CopyError)


def test_a_copy_that_fails_or_cannot_be_planned_fails_its_job_and_no_other(harness):
    def explode():
        raise RuntimeError("no plan")

    harness.submit(1, 0, load=True, build=explode)
    assert str(harness.wait_for_end()[1]) == "no plan"
    harness.fail_with = CopyError("broken")
    harness.go_on(3)
    harness.submit(1, 2, load=False)
    assert str(harness.wait_for_end()[1]) == "broken"
    harness.fail_with = None
    harness.submit(2, 2, load=False)
    assert harness.wait_for_end() == (2, None, 2 * SLICE_BYTES)


def test_closing_finishes_the_slice_and_fails_the_rest(harness):
    harness.submit(1, 3, load=False)
    harness.submit(2, 1, load=False)
    harness.wait_for_slice()
    harness.submit(3, 1, load=True)
    ended = harness.worker.close()
    with pytest.raises(concurrent.futures.TimeoutError):
        ended.result(0.2)  # the slice that is being copied has not ended
    harness.go_on(100)
    ended.result(TIMEOUT_S)
    ends = {name: error for name, error, _ in (harness.wait_for_end() for _ in range(3))}
    assert sorted(ends) == [1, 2, 3]
    assert all(isinstance(error, CopyError) for error in ends.values())
    assert harness.copied == [1]


def test_memory_that_cannot_be_opened_is_told_and_closed():
    class Sealed(Harness):
        def open(self):
            raise CopyError("sealed")

    sealed = Sealed()
    error, found = sealed.worker.opened.result(TIMEOUT_S)
    assert (str(error), found, error.__traceback__) == ("sealed", [], None)
    sealed.worker.close().result(TIMEOUT_S)
    assert sealed.calls == ["closed"]


def test_every_end_comes_after_that_of_its_copies_and_the_memory_is_closed_last(harness):
    """A copy may only have begun when `copy` returns, and go on after another has failed."""
    assert harness.worker.opened.result(TIMEOUT_S) == (None, [b"nonce"])
    harness.go_on(5)
    harness.submit(1, 2, load=True)
    harness.wait_for_end()
    assert harness.calls == [("finished", True, 2)]
    harness.fail_with = CopyError("broken")
    harness.submit(2, 1, load=False)
    harness.wait_for_end()
    assert harness.calls[1:] == [("finished", False, 2)]
    harness.worker.close().result(TIMEOUT_S)
    assert harness.calls[2:] == ["closed"]
    harness.submit(3, 1, load=True)
    assert isinstance(harness.wait_for_end()[1], CopyError), "at once"


def test_loads_and_stores_are_under_way_at_the_same_time(late):
    late.submit(1, 1, load=False)
    assert late.wait_for_slice() == (1, False)
    late.submit(2, 1, load=True)
    assert late.wait_for_slice() == (2, True)
    late.go_on(1)
    assert late.wait_for_end() == (2, None, SLICE_BYTES)
    late.go_on(4, load=False)
    assert late.wait_for_end() == (1, None, SLICE_BYTES)


def test_the_next_job_is_enqueued_behind_the_last_one_that_is_still_under_way(late):
    late.submit(1, 2, load=True)
    assert late.wait_for_slice() == (1, True)
    assert late.wait_for_slice() == (1, True)
    late.submit(2, 1, load=True)
    late.submit(3, 1, load=True)
    late.go_on(1)
    assert late.wait_for_slice() == (2, True)
    assert late.ended.empty(), "half of the first is copied"
    late.go_on(1)
    assert late.wait_for_end()[0] == 1
    assert late.wait_for_slice() == (3, True)
    late.go_on(2)
    assert [late.wait_for_end()[0] for _ in range(2)] == [2, 3]


def test_the_end_of_a_job_does_not_wait_until_memory_of_the_next_one_is_pinned(late):
    late.may_pin = True
    pinned = threading.Event()
    late.submit(1, 2, load=True)
    assert [late.wait_for_slice() for _ in range(2)] == [(1, True)] * 2, "it waits for the first"
    late.submit(2, 0, load=True, build=lambda: pinned.wait(TIMEOUT_S) and slices_of(2, 1))
    late.go_on(2)
    assert late.wait_for_end() == (1, None, 2 * SLICE_BYTES)
    assert not pinned.is_set()
    pinned.set()
    late.go_on(1)
    assert late.wait_for_end() == (2, None, SLICE_BYTES)


def test_stores_go_in_smaller_slices_than_loads(late):
    """Between two of them, the engine's own small copies get their turn."""
    address = np.full(4, 1, np.uint64)
    small = Pieces(address, address, np.full(4, SLICE_BYTES // 4, np.uint64))
    for load, count in ((True, 1), (False, 4)):
        late.go_on(4, load)
        late.submit(1, 0, load=load, build=lambda: small)
        assert late.wait_for_end() == (1, None, SLICE_BYTES)
        assert late.num_begun[load] == count


def test_a_job_whose_bytes_are_read_is_not_mixed_with_others(late):
    """A digest takes long, and the job before would be reported late."""
    late.submit(1, 1, load=True)
    late.wait_for_slice()
    late.submit(2, 1, load=True, checksums=True)
    late.go_on(1)
    assert late.wait_for_end()[0] == 1
    late.go_on(1)
    assert late.wait_for_end() == (2, None, SLICE_BYTES)
