"""The copy worker: one thread per registered memory, which runs the copies that it is given."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_server.transfer.base import CopyError, CopyJob, Mapping, Opened, Outcome
from lmcache_server.transfer.plan import slices

SLICE_BYTES = 32 << 20
"""Between slices of this size, loads overtake stores and the end of a process is noticed."""

_Waiting = tuple[CopyJob, "asyncio.Future[Outcome]"]


class CopyWorker:
    """Copies for one registered memory, in a thread of its own.

    `opened` is set when opening the memory has succeeded or failed. `ended` is set when the memory is no
    longer mapped or copied. `alive` is called before each slice. All futures belong to `loop`, which never
    waits for the thread: a copy that hangs blocks only those who await it.
    """

    def __init__(
        self, name: str, mapping: Mapping, alive: Callable[[], bool], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.opened: asyncio.Future[Opened] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._mapping = mapping
        self._alive = alive
        self._loop = loop
        self._loads: deque[_Waiting] = deque()
        self._stores: deque[_Waiting] = deque()
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
                (self._loads if job.load else self._stores).append((job, future))
                self._changed.notify()
                return future
        future.set_result(Outcome(_ended(), 0))
        return future

    def close(self) -> "asyncio.Future[None]":
        """Fails waiting jobs and ends the thread after the slice that is being copied. Returns `ended`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        return self.ended

    # -- in the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            opened = Opened(None, self._mapping.open())
        except Exception as error:  # any error must reach the worker that registered
            opened = Opened(_bare(error), [])
        self._resolve(self.opened, opened)
        self._work_off()
        self._mapping.close()
        self._resolve(self.ended, None)

    def _work_off(self) -> None:
        while True:
            with self._changed:
                while not (self._loads or self._stores or self._closing):
                    self._changed.wait()
                if not (self._loads or self._stores):
                    return
                waiting = self._loads.popleft() if self._loads else self._stores.popleft()
            self._run(*waiting)

    def _run(self, job: CopyJob, future: "asyncio.Future[Outcome]") -> None:
        error: Exception | None = None
        num_bytes = 0
        try:
            try:
                for part in slices(job.build(), SLICE_BYTES):
                    if not job.load:
                        self._let_loads_overtake()
                    if self._closing or not self._alive():
                        raise _ended()
                    self._mapping.copy(part, load=job.load)
                    num_bytes += part.num_bytes
            finally:
                # Frames and blocks are reused after the job, so all its copies must end first.
                self._mapping.finish(load=job.load)
            job.after()
        except Exception as failure:  # any error must reach the owner of the job
            error = _bare(failure)
        self._resolve(future, Outcome(error, num_bytes))

    def _let_loads_overtake(self) -> None:
        while True:
            with self._changed:
                if not self._loads:
                    return
                waiting = self._loads.popleft()
            self._run(*waiting)

    def _resolve(self, future: "asyncio.Future[Any]", result: object) -> None:
        # If the thread hung until the server had ended, the loop is closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_set_result, future, result)


def _set_result(future: "asyncio.Future[Any]", result: object) -> None:
    if not future.done():
        future.set_result(result)


def _bare(error: Exception) -> Exception:
    """The error without its traceback: its frames hold the job, so the two would keep each other alive."""
    return error.with_traceback(None)


def _ended() -> CopyError:
    return CopyError("the session of this memory has ended")
