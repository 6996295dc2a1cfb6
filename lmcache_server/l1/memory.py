"""L1: one mapping of host memory that holds every stored page. Threads back it with memory as it runs."""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator

from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.errors import StartError
from lmcache_server.host import preflight
from lmcache_server.host.machine import available_bytes, memory_info
from lmcache_server.host.units import GB_BYTES
from lmcache_server.l1.area import Area, Backing, Grow, shared_memory
from lmcache_server.transfer.locked_memory import RETRY_S, LockedMemory

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""How much one thread populates at a time. `stop` waits for a piece."""
UNIT_BYTES = 8 * PIECE_BYTES
"""How much one thread claims, and how much is pinned for GPUs, at a time."""
MAX_THREADS = 4
NICENESS = 10
STOP_S = 5.0

_MAP_HUGETLB = 0x40000
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
for _function in (_libc.mlock, _libc.munlock):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class L1Memory:
    """A mapping of whole frames. Anonymous memory is usable at once, a backing as far as `fill` has come.

    Populating a page never changes its content, so copies need not wait for it. It only spares them the cost
    of the first touch.
    """

    def __init__(
        self, size_bytes: int, *, hugetlb: bool = False, backing: Backing | None = None, shared: bool = False
    ) -> None:
        """Maps `size_bytes`, rounded down to whole frames, `shared` so that others can map them, too.

        Raises StartError if the machine, its cgroup or its pool of huge pages does not have that much.
        """
        self.num_frames = size_bytes // FRAME_BYTES
        self.num_bytes = self.num_frames * FRAME_BYTES
        if not self.num_frames:
            raise StartError(f"--l1-size-gb must give at least one frame of {FRAME_BYTES} bytes")
        self.backing = backing
        self.locked: LockedMemory | None = None
        """Set by `fill` where GPUs are served."""
        self.is_in_use = False
        """Set if a copy that hangs may still read or write here: then `close` must not unmap."""
        self._descriptor = -1
        if backing is not None:
            self._mapping = backing.map()
        else:
            mapped = _map_hugetlb(self.num_bytes, shared) if hugetlb else _map(self.num_bytes, shared)
            self._descriptor, self._mapping = mapped
        with contextlib.suppress(OSError):  # a kernel built without transparent huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._mapping.madvise(mmap.MADV_DONTDUMP)
        # The self-test forks. Copying all these page tables would stop the loop for seconds, and the kernel
        # would copy all pinned memory.
        self._mapping.madvise(mmap.MADV_DONTFORK)
        self.base_address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        # Populating what lies on a disk would read and rewrite all of it.
        self._populate = backing is None or backing.in_memory
        self._lock = threading.Lock()
        self._next_offset = 0
        self._stopping = threading.Event()
        self._threads = list[threading.Thread]()
        self.populated_bytes = 0
        """The bytes of L1 that have memory so far or, of a backing, are usable."""
        self.failure = ""
        """Why one of the threads has ended, if that was an error."""

    @property
    def area(self) -> Area:
        """How another process maps the frames: those of a backing, or `shared` ones."""
        if self.backing is not None:
            return self.backing.area(self.base_address, self.num_bytes)
        return Area(self._descriptor, 0, self.base_address, self.num_bytes)

    @property
    def pinned_bytes(self) -> int:
        return self.locked.pinned_bytes if self.locked is not None else 0

    def check(self) -> None:
        """Raises CopyError if somebody has cut the backing short: to touch what is gone would end the server
        (SIGBUS)."""
        if self.backing is not None:
            self.backing.check()

    def fill(self, grow: Grow = lambda _frames: None, locked: LockedMemory | None = None) -> None:
        """Backs the mapping with memory in the background, unit by unit, and pins it if `locked` has GPUs.

        A backing has only one thread, and becomes usable in order, piece by piece. For each, the thread calls
        `grow(frames)`.
        """
        self._grow, self.locked = grow, locked
        count = 1 if self.backing is not None else max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"l1-fill-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """Stops the threads; the first call waits for them up to STOP_S, which is not for the event loop.
        Returns whether all have ended: one may hang in a call of a GPU's driver."""
        end_s = time.monotonic() + STOP_S * (not self._stopping.is_set())
        self._stopping.set()
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Stops the background threads and unmaps, unless one of them, or a copy, hangs and may still use the
        memory."""
        if self.stop() and not self.is_in_use:
            self._mapping.close()
            if self._descriptor >= 0:
                os.close(self._descriptor)

    # -- in the threads ---------------------------------------------------------------------------

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
            locked = self.locked
            if locked is not None and not locked.prepare(unit // UNIT_BYTES):
                locked = None
            for offset in range(unit, min(unit + UNIT_BYTES, self.num_bytes), PIECE_BYTES):
                end = min(offset + PIECE_BYTES, self.num_bytes)
                if self._stopping.is_set() or not self._take(offset, end):
                    return
                self._back(offset, end)
            if locked is not None:
                locked.pin_unit(unit // UNIT_BYTES)
        # A GPU may appear or give a context later than at the start of the machine.
        while number == 0 and self.locked is not None and not self.locked.pin_rest():
            if self._stopping.wait(RETRY_S):
                return

    def _units(self) -> Iterator[int]:
        """Claims unit after unit for this thread; yields their offsets."""
        while not self._stopping.is_set():
            with self._lock:
                unit = self._next_offset
                self._next_offset += UNIT_BYTES
            if unit >= self.num_bytes:
                return
            yield unit

    def _take(self, start: int, end: int) -> bool:
        return self.backing is None or self.backing.take(start, end, self._grow)

    def _back(self, start: int, end: int) -> None:
        if self._populate and (failure := _populate_piece(self.base_address + start, end - start)):
            reason = {"reason": os.strerror(failure)}
            logger.warning("L1 is populated on first use, not in advance: %(reason)s", reason)
            self._populate = False
        if self._populate or self.backing is not None:
            with self._lock:
                self.populated_bytes += end - start


def _map(num_bytes: int, shared: bool) -> tuple[int, mmap.mmap]:
    preflight.require(preflight.memory(num_bytes, 0, *available_bytes()))
    try:
        return _allocate(num_bytes, 0, shared)
    except OSError as error:
        raise StartError(
            f"the system refuses a mapping of {num_bytes / GB_BYTES:.2f} GB ({error.strerror}): "
            "ask for less with --l1-size-gb, or raise 'ulimit -v' or vm.overcommit_memory"
        ) from error


def _map_hugetlb(num_bytes: int, shared: bool) -> tuple[int, mmap.mmap]:
    info = memory_info()
    page_bytes = info.get("Hugepagesize", 2 << 20)
    try:
        return _allocate(-(-num_bytes // page_bytes) * page_bytes, _MAP_HUGETLB, shared)
    except OSError as error:
        preflight.require(preflight.huge_pages(info, num_bytes))
        reason = f"the system refuses to map huge pages ({error.strerror}): leave out --l1-hugetlb"
        raise StartError(reason) from error


def _allocate(num_bytes: int, flags: int, shared: bool) -> tuple[int, mmap.mmap]:
    """The descriptor, or -1, and the mapping. Raises OSError."""
    if shared:
        return shared_memory("lmcache-l1", num_bytes, os.MFD_HUGETLB if flags else 0)
    return -1, mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)


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
