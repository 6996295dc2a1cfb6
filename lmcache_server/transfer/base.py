"""The hands: a thread per registered device memory that works off copies. It decides nothing."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_server.transfer.host import CopyError
from lmcache_server.transfer.plan import Pieces, slices

SLICE_BYTES = 32 << 20
"""Loads overtake stores, and an end is noticed, between slices of this size."""


@dataclass
class CopyJob:
    """A load (L1 to engine) or a store (engine to L1).

    `build` gives the pieces, and `after` follows when every byte was copied; both run in the copy thread
    and may raise. `on_done` is called exactly once, through the worker's `call_soon`, with None when all
    went well, else with what happened, and the bytes copied.
    """

    load: bool
    build: Callable[[], Pieces]
    on_done: Callable[[Exception | None, int], None]
    after: Callable[[], None] | None = None


class CopyWorker:
    """One thread that copies for one registered memory.

    `copy(pieces, load=...)` moves bytes and raises CopyError. `alive` is asked before each slice.
    `call_soon(function, *arguments)` hands a call to the event loop from any thread.
    """

    def __init__(
        self,
        name: str,
        copy: Callable[..., None],
        alive: Callable[[], bool],
        call_soon: Callable[..., object],
    ) -> None:
        self._copy = copy
        self._alive = alive
        self._call_soon = call_soon
        self._loads: deque[CopyJob] = deque()
        self._stores: deque[CopyJob] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        """Never blocks. On a worker that is closing the job fails."""
        with self._changed:
            if not self._closing:
                (self._loads if job.load else self._stores).append(job)
                self._changed.notify()
                return
        self._call_soon(job.on_done, _ended(), 0)

    def close(self) -> None:
        """Fail what waits. When this returns, no byte of the memory is being copied any more."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._loads or self._stores or self._closing):
                    self._changed.wait()
                if not (self._loads or self._stores):
                    return
                job = self._loads.popleft() if self._loads else self._stores.popleft()
            self._run(job)

    def _run(self, job: CopyJob) -> None:
        error: Exception | None = None
        num_bytes = 0
        try:
            for part in slices(job.build(), SLICE_BYTES):
                if not job.load:
                    self._let_loads_overtake()
                if self._closing or not self._alive():
                    raise _ended()
                self._copy(part, load=job.load)
                num_bytes += part.num_bytes
            if job.after is not None:
                job.after()
        except Exception as failure:  # whatever it is, the job's owner must hear of it
            error = failure
        self._call_soon(job.on_done, error, num_bytes)

    def _let_loads_overtake(self) -> None:
        while True:
            with self._changed:
                if not self._loads:
                    return
                job = self._loads.popleft()
            self._run(job)


def _ended() -> CopyError:
    return CopyError("the session of this memory has ended")
