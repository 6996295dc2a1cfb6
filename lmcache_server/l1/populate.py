"""Backs L1 with memory in the background: each unit is populated and pinned."""

import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator

from lmcache_server.l1.area import Backing, Grow
from lmcache_server.transfer.locked_memory import RETRY_S, LockedMemory

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""How much one thread populates at a time. `stop` waits for a piece."""
UNIT_BYTES = 8 * PIECE_BYTES
"""How much one thread claims, and how much is pinned for GPUs, at a time."""
MAX_THREADS = 4
NICENESS = 10
STOP_S = 5.0

_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
for _function in (_libc.mlock, _libc.munlock):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Populator:
    """Threads that go through the `num_bytes` at `address` unit by unit. A `backing` has only one thread, and
    becomes usable in order."""

    def __init__(
        self, address: int, num_bytes: int, backing: Backing | None, grow: Grow, locked: LockedMemory | None
    ) -> None:
        self._address = address
        self._num_bytes = num_bytes
        self._backing = backing
        self._grow = grow
        # Populating what lies on a disk would read and rewrite all of it.
        self._populate = backing is None or backing.in_memory
        self._locked = locked
        self._lock = threading.Lock()
        self._next_offset = 0
        self._stopping = threading.Event()
        count = 1 if backing is not None else max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"l1-fill-{number}", daemon=True)
            for number in range(count)
        ]
        self.populated_bytes = 0
        """The bytes of L1 that have memory so far or, of a backing, are usable."""
        self.failure = ""
        """Why one of the threads has ended, if that was an error."""

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """Stops the threads; the first call waits for them up to STOP_S. Returns whether all have ended: one
        may hang in a call of a GPU's driver."""
        end_s = time.monotonic() + STOP_S * (not self._stopping.is_set())
        self._stopping.set()
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, number: int) -> None:
        try:
            self._fill(number)
        except BaseException as error:
            self.failure = f"a thread that fills L1 has ended ({error!r})"
            raise  # into the log, with its traceback

    def _fill(self, number: int) -> None:
        # On Linux this is the niceness of this thread alone: engines and copies come first. Only root may
        # lower a niceness again.
        if os.getpriority(os.PRIO_PROCESS, thread := threading.get_native_id()) < NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
        for unit in self._units():
            locked = self._locked
            if locked is not None and not locked.prepare(unit // UNIT_BYTES):
                locked = None
            for offset in range(unit, min(unit + UNIT_BYTES, self._num_bytes), PIECE_BYTES):
                end = min(offset + PIECE_BYTES, self._num_bytes)
                if self._stopping.is_set() or not self._take(offset, end):
                    return
                self._back(offset, end)
            if locked is not None:
                locked.pin_unit(unit // UNIT_BYTES)
        # A GPU may appear or give a context later than at the start of the machine.
        while number == 0 and self._locked is not None and not self._locked.pin_rest():
            if self._stopping.wait(RETRY_S):
                return

    def _units(self) -> Iterator[int]:
        """Claims unit after unit for this thread; yields their offsets."""
        while not self._stopping.is_set():
            with self._lock:
                unit = self._next_offset
                self._next_offset += UNIT_BYTES
            if unit >= self._num_bytes:
                return
            yield unit

    def _take(self, start: int, end: int) -> bool:
        return self._backing is None or self._backing.take(start, end, self._grow)

    def _back(self, start: int, end: int) -> None:
        if self._populate and (failure := _populate_piece(self._address + start, end - start)):
            reason = {"reason": os.strerror(failure)}
            logger.warning("L1 is populated on first use, not in advance: %(reason)s", reason)
            self._populate = False
        if self._populate or self._backing is not None:
            with self._lock:
                self.populated_bytes += end - start


def _populate_piece(address: int, size_bytes: int) -> int:
    """Gives every page of the piece memory without changing its content; returns 0 or an errno.

    Writing to the pages from here would race with copies, so the kernel does it.
    """
    if _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE) == 0:
        return 0
    failure = ctypes.get_errno()
    if failure != errno.EINVAL:
        return failure
    # Before Linux 5.14, locking populates instead, as far as RLIMIT_MEMLOCK allows.
    if _libc.mlock(address, size_bytes) or _libc.munlock(address, size_bytes):
        return ctypes.get_errno()
    return 0
