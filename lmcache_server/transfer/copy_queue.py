"""The copy worker: one thread per lane of a registered memory, which runs the copies that it is given."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lmcache_server.transfer.base import CopyError, Mapping, Opened, Outcome
from lmcache_server.transfer.jobs import CopyJob

_Waiting = tuple[CopyJob, "asyncio.Future[Outcome]"]


class _Begun(NamedTuple):
    """A job whose copies are begun; with an `error` only some are. `wait` waits for them, and may raise."""

    job: CopyJob
    future: "asyncio.Future[Outcome]"
    error: Exception | None
    num_bytes: int
    wait: Callable[[], object]


class CopyWorker:
    """Copies for one registered memory, in threads of its own.

    `opened` is set when opening the memory has succeeded or failed. `ended` is set when the memory is no
    longer mapped or copied. `alive` is called before each slice. All futures belong to `loop`, which never
    waits for the threads: a copy that hangs blocks only those who await it.
    """

    def __init__(
        self, name: str, mapping: Mapping, alive: Callable[[], bool], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.opened: asyncio.Future[Opened] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._mapping = mapping
        self._is_late = len(mapping.lanes) > 1
        self._alive = alive
        self._loop = loop
        self._jobs: dict[bool, deque[_Waiting]] = {True: deque(), False: deque()}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def bases(self) -> Sequence[int]:
        return self._mapping.bases

    @property
    def lost(self) -> bool:
        return self._mapping.lost

    def submit(self, job: CopyJob) -> "asyncio.Future[Outcome]":
        """Queues a job; returns a future of how it ends. If the worker is closing, the job fails."""
        future: asyncio.Future[Outcome] = self._loop.create_future()
        with self._changed:
            if not self._closing:
                self._jobs[job.load].append((job, future))
                self._changed.notify_all()
                return future
        future.set_result(Outcome(_ended(), 0))
        return future

    def close(self) -> "asyncio.Future[None]":
        """Fails waiting jobs and ends the thread after the slice that is being copied. Returns `ended`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        return self.ended

    # -- in the threads ---------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            opened = Opened(None, self._mapping.open())
        except Exception as error:  # any error must reach the worker that registered
            opened = Opened(_bare(error), [])
        self._resolve(self.opened, opened)
        first, *others = self._mapping.lanes
        threads = [
            threading.Thread(None, self._work_off, f"{self._thread.name}-stores", (lane,), daemon=True)
            for lane in others
        ]
        for thread in threads:
            thread.start()
        self._work_off(first)
        for thread in threads:
            thread.join()
        self._mapping.close()
        self._resolve(self.ended, None)

    def _work_off(self, lane: Sequence[bool]) -> None:
        begun: _Begun | None = None
        while True:
            waiting = self._next(lane, wait=begun is None)
            if waiting is None and begun is None:
                return
            if begun is not None and (waiting is None or waiting[0].checksums or self._mapping.may_pin):
                self._end(begun)
                begun = None
            if waiting is not None:
                # A job's first slices are enqueued behind the last ones of the job before.
                begun = self._begin(*waiting, begun)

    def _next(self, lane: Sequence[bool], *, wait: bool) -> _Waiting | None:
        """The next job of this lane, loads first; None if there is none, with `wait` at the end."""
        with self._changed:
            while True:
                for load in lane:
                    if self._jobs[load]:
                        return self._jobs[load].popleft()
                if self._closing or not wait:
                    return None
                self._changed.wait()

    def _begin(self, job: CopyJob, future: "asyncio.Future[Outcome]", before: _Begun | None) -> _Begun | None:
        """Begins the copies of a job, and ends the job before it in time."""
        error: Exception | None = None
        num_bytes = 0
        try:
            for slice_bytes, copy in self._mapping.copies(job.build(), load=job.load):
                if not (job.load or self._is_late):
                    self._let_loads_overtake()
                if self._closing or not self._alive():
                    raise _ended()
                copy()
                num_bytes += slice_bytes
                if before is not None:
                    self._end(before)
                    before = None
        except Exception as failure:  # any error must reach the owner of the job
            error = _bare(failure)
        if before is not None:
            self._end(before)
        begun = _Begun(job, future, error, num_bytes, self._mapping.begun(load=job.load))
        if self._is_late and not job.checksums:
            return begun
        self._end(begun)
        return None

    def _end(self, begun: _Begun) -> None:
        """Waits for the job's copies: frames and blocks are reused after it."""
        job, future, error, num_bytes, wait = begun
        try:
            wait()
            if error is None:
                job.after()
        except Exception as failure:  # any error must reach the owner of the job
            error = error or _bare(failure)
        self._resolve(future, Outcome(error, num_bytes))

    def _let_loads_overtake(self) -> None:
        while (waiting := self._next((True,), wait=False)) is not None:
            self._begin(*waiting, None)

    def _resolve(self, future: "asyncio.Future[Any]", result: object) -> None:
        def resolve() -> None:
            if not future.done():
                future.set_result(result)

        # If the thread hung until the server had ended, the loop is closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(resolve)


def _bare(error: Exception) -> Exception:
    """The error without its traceback: its frames hold the job, so the two would keep each other alive."""
    return error.with_traceback(None)


def _ended() -> CopyError:
    return CopyError("the session of this memory has ended")
