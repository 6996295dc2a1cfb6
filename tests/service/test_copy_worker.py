"""The copy thread: every job ends once, loads overtake, nothing is copied after the end."""

import concurrent.futures
import queue
import threading

import numpy as np
import pytest

from lmcache_server.transfer.base import CopyError
from lmcache_server.transfer.plan import Pieces
from lmcache_server.transfer.worker import SLICE_BYTES, CopyWorker

TIMEOUT_S = 10.0


def slices_of(name, count):
    """Pieces of `count` slices; the address says whose they are."""
    address = np.full(count, name, np.uint64)
    return Pieces(address, address, np.full(count, SLICE_BYTES, np.uint64))


class Job:
    def __init__(self, load, build):
        self.load, self.build = load, build

    def after(self):
        pass


class Harness:
    """A worker, and the memory that it copies, whose copies wait to be let through, one slice at a time."""

    bases = ()
    lost = False

    def __init__(self):
        self.alive = True
        self.copied = []
        self.started = queue.Queue()
        self.gate = threading.Semaphore(0)
        self.ended = queue.Queue()
        self.fail_with = None
        self.calls = []
        self.worker = CopyWorker("copy-test", self, lambda: self.alive, self)

    def open(self):
        return [b"nonce"]

    def finish(self, *, load):
        self.calls.append(("finished", load, len(self.copied)))

    def close(self):
        self.calls.append("closed")

    def copy(self, part, *, load):
        self.started.put(int(part.local[0]))
        assert self.gate.acquire(timeout=TIMEOUT_S)
        if self.fail_with is not None:
            raise self.fail_with
        self.copied.append(int(part.local[0]))

    # -- the event loop that the worker sees ------------------------------------------------------

    def create_future(self):
        return concurrent.futures.Future()

    def call_soon_threadsafe(self, function, *arguments):
        function(*arguments)

    # -- what tests ask ---------------------------------------------------------------------------

    def submit(self, name, count, *, load, build=None):
        end = self.worker.submit(Job(load, build or (lambda: slices_of(name, count))))
        end.add_done_callback(lambda future: self.ended.put((name, *future.result())))

    def wait_for_slice(self):
        return self.started.get(timeout=TIMEOUT_S)

    def wait_for_end(self):
        return self.ended.get(timeout=TIMEOUT_S)


@pytest.fixture
def harness():
    it = Harness()
    yield it
    it.gate.release(1000)
    it.worker.close().result(TIMEOUT_S)
    it.worker._thread.join(TIMEOUT_S)
    assert not it.worker._thread.is_alive()


def test_a_load_overtakes_a_long_store(harness):
    harness.submit(1, 4, load=False)
    harness.wait_for_slice()
    harness.submit(2, 1, load=False)
    harness.submit(3, 2, load=True)
    harness.gate.release(7)
    ends = [harness.wait_for_end() for _ in range(3)]
    assert [name for name, _, _ in ends] == [3, 1, 2]
    assert harness.copied == [1, 3, 3, 1, 1, 1, 2]


def test_jobs_of_a_kind_keep_their_order(harness):
    harness.submit(1, 1, load=True)
    harness.wait_for_slice()
    for name in (2, 3, 4):
        harness.submit(name, 1, load=True)
    harness.gate.release(4)
    assert [harness.wait_for_end()[0] for _ in range(4)] == [1, 2, 3, 4]


def test_an_end_says_how_many_bytes_were_copied(harness):
    harness.gate.release(3)
    harness.submit(1, 3, load=False)
    assert harness.wait_for_end() == (1, None, 3 * SLICE_BYTES)


def test_nothing_is_copied_once_the_process_is_dead(harness):
    harness.submit(1, 3, load=True)
    harness.wait_for_slice()
    harness.alive = False
    harness.gate.release(3)
    name, error, num_bytes = harness.wait_for_end()
    assert (name, num_bytes, harness.copied) == (1, SLICE_BYTES, [1])
    assert isinstance(error, CopyError)


def test_a_failed_copy_fails_its_job_and_no_other(harness):
    harness.fail_with = CopyError("broken")
    harness.gate.release(3)
    harness.submit(1, 2, load=False)
    assert str(harness.wait_for_end()[1]) == "broken"
    harness.fail_with = None
    harness.submit(2, 2, load=False)
    assert harness.wait_for_end() == (2, None, 2 * SLICE_BYTES)


def test_a_job_that_cannot_be_planned_fails_and_the_thread_lives(harness):
    def explode():
        raise RuntimeError("no plan")

    harness.submit(1, 0, load=True, build=explode)
    assert str(harness.wait_for_end()[1]) == "no plan"
    harness.gate.release()
    harness.submit(2, 1, load=True)
    assert harness.wait_for_end()[:2] == (2, None)


def test_closing_finishes_the_slice_and_fails_the_rest(harness):
    harness.submit(1, 3, load=False)
    harness.submit(2, 1, load=False)
    harness.wait_for_slice()
    harness.submit(3, 1, load=True)
    ended = harness.worker.close()
    with pytest.raises(concurrent.futures.TimeoutError):
        ended.result(0.2)  # the slice that is being copied has not ended
    harness.gate.release(100)
    ended.result(TIMEOUT_S)
    ends = {name: error for name, error, _ in (harness.wait_for_end() for _ in range(3))}
    assert sorted(ends) == [1, 2, 3]
    assert all(isinstance(error, CopyError) for error in ends.values())
    assert harness.copied == [1]


def test_a_job_for_a_closed_worker_fails_at_once(harness):
    harness.worker.close().result(TIMEOUT_S)
    harness.submit(1, 1, load=True)
    assert isinstance(harness.wait_for_end()[1], CopyError)


def test_what_is_where_the_nonce_should_be_is_told_once(harness):
    assert harness.worker.opened.result(TIMEOUT_S) == (None, [b"nonce"])


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
    harness.gate.release(5)
    harness.submit(1, 2, load=True)
    harness.wait_for_end()
    assert harness.calls == [("finished", True, 2)]
    harness.fail_with = CopyError("broken")
    harness.submit(2, 1, load=False)
    harness.wait_for_end()
    assert harness.calls[1:] == [("finished", False, 2)]
    harness.worker.close().result(TIMEOUT_S)
    assert harness.calls[2:] == ["closed"]
