"""The hands: a thread per registered memory that works off copies. It decides nothing."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Mapping(Protocol):
    """A worker's memory, for the one thread that copies it."""

    @property
    def bases(self) -> Sequence[int]:
        """Where its buffers are for a copy, once it is open."""

    @property
    def lost(self) -> bool:
        """No copy will ever succeed any more."""

    def open(self) -> list[bytes]:
        """Make it accessible; returns what is where the nonce should be. Raises CopyError."""

    def copy(self, pieces: Pieces, *, load: bool) -> None:
        """Copy, or only begin to. Raises CopyError."""

    def finish(self, *, load: bool) -> None:
        """Until everything that was begun in this direction has ended. Raises CopyError."""

    def close(self) -> None:
        """Give back what `open` took. Never raises."""


class CopyWorker:
    """One thread that copies for one registered memory.

    `opened` is called once, with an error or with what `mapping.open` returned. `alive` is asked before
    each slice. `call_soon(function, *arguments)` hands a call to the event loop from any thread.
    """

    def __init__(
        self,
        name: str,
        mapping: Mapping,
        opened: Callable[[Exception | None, list[bytes]], None],
        alive: Callable[[], bool],
        call_soon: Callable[..., object],
    ) -> None:
        self._mapping = mapping
        self._opened = opened
        self._alive = alive
        self._call_soon = call_soon
        self._loads: deque[CopyJob] = deque()
        self._stores: deque[CopyJob] = deque()
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

    def submit(self, job: CopyJob) -> None:
        """Never blocks. On a worker that is closing the job fails."""
        with self._changed:
            if not self._closing:
                (self._loads if job.load else self._stores).append(job)
                self._changed.notify()
                return
        self._call_soon(job.on_done, _ended(), 0)

    def close(self) -> None:
        """Fail what waits. When this returns, no byte of the memory is mapped or being copied any more."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        error, found = None, []
        try:
            found = self._mapping.open()
        except Exception as failure:  # the worker that registered must hear of it
            error = failure
        self._call_soon(self._opened, error, found)
        self._work_off()
        self._mapping.close()

    def _work_off(self) -> None:
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
            with self._finished(job.load):
                for part in slices(job.build(), SLICE_BYTES):
                    if not job.load:
                        self._let_loads_overtake()
                    if self._closing or not self._alive():
                        raise _ended()
                    self._mapping.copy(part, load=job.load)
                    num_bytes += part.num_bytes
            if job.after is not None:
                job.after()
        except Exception as failure:  # whatever it is, the job's owner must hear of it
            error = failure
        self._call_soon(job.on_done, error, num_bytes)

    @contextlib.contextmanager
    def _finished(self, load: bool) -> Iterator[None]:
        """Whatever happens, the end of a job comes after that of all its copies: then frames and blocks
        get other uses."""
        try:
            yield
        finally:
            self._mapping.finish(load=load)

    def _let_loads_overtake(self) -> None:
        while True:
            with self._changed:
                if not self._loads:
                    return
                job = self._loads.popleft()
            self._run(job)


def _ended() -> CopyError:
    return CopyError("the session of this memory has ended")
