"""L1: the one piece of host memory that holds every stored page."""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.errors import StartError
from lmcache_server.host import preflight
from lmcache_server.host.machine import available_bytes, memory_info
from lmcache_server.host.units import GB_BYTES

if TYPE_CHECKING:
    from lmcache_server.l1.file import L1File
    from lmcache_server.transfer.pins import Pins

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""What one thread populates at a time; closing waits for a piece."""
UNIT_BYTES = 8 * PIECE_BYTES
"""What one thread takes on, and what is pinned for GPUs at a time."""
MAX_FILL_THREADS = 4
FILL_NICENESS = 10

_MADV_POPULATE_WRITE = 23
_MAP_HUGETLB = 0x40000

_libc = ctypes.CDLL(None, use_errno=True)
for _function in (_libc.mlock, _libc.munlock):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class L1Memory:
    """One mapping of whole frames: anonymous and usable at once, or of a file and usable as far as `fill` has
    come.

    Populating a page never changes what is in it, so copies need not wait for it; it only spares them the
    cost of the first touch.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        hugetlb: bool = False,
        file: "L1File | None" = None,
    ) -> None:
        """Maps `size_bytes`, rounded down to whole frames.

        Raises StartError when the machine, its cgroup or its pool of huge pages has not as much.
        """
        self.num_frames = size_bytes // FRAME_BYTES
        self.num_bytes = self.num_frames * FRAME_BYTES
        if not self.num_frames:
            raise StartError(f"--l1-size-gb must give at least one frame of {FRAME_BYTES} bytes")
        self.file = file
        self.pins: Pins | None = None
        self.is_in_use = False
        """A copy that never ended may still read or write here: the mapping then goes with the process."""
        """Set before `fill`, where GPUs are to be served."""
        if file is not None:
            self._mapping = _map_file(file)
        else:
            self._mapping = _map_hugetlb(self.num_bytes) if hugetlb else _map(self.num_bytes)
        # The self-test's process is forked: copying the page tables of all this would stop the loop for
        # seconds, and what is pinned would be copied whole.
        self._mapping.madvise(mmap.MADV_DONTFORK)
        self.base_address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._lock = threading.Lock()
        self._next_offset = 0
        self._populated_bytes = 0
        self._closing = False
        self._threads: list[threading.Thread] = []

    @property
    def populated_bytes(self) -> int:
        """How much of it the background threads have populated so far; of a file, what has its space."""
        return self._populated_bytes

    @property
    def pinned_bytes(self) -> int:
        return self.pins.pinned_bytes if self.pins is not None else 0

    def fill(
        self,
        usable_frames: int = 0,
        grow: Callable[[int], object] = lambda _frames: None,
    ) -> None:
        """Backs it with memory in the background, and pins it where there are GPUs.

        A file first takes its space, without which a write to the mapping could end the process: its first
        `usable_frames` frames have theirs, and `grow(frames)` says, in another thread, that so many more can
        be used.
        """
        count = 1 if self.file is not None else max(1, min(MAX_FILL_THREADS, (os.cpu_count() or 1) // 2))
        for number in range(count):
            arguments = (number, usable_frames * FRAME_BYTES, grow)
            thread = threading.Thread(
                target=self._fill, args=arguments, name=f"l1-fill-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Stops what goes on in the background."""
        with self._lock:
            self._closing = True
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Stops what goes on in the background and unmaps, unless a copy that hangs may still use it."""
        self.stop()
        if not self.is_in_use:
            self._mapping.close()

    def _fill(self, number: int, usable_bytes: int, grow: Callable[[int], object]) -> None:
        # On Linux this is the niceness of this thread alone: engines and copies come first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), FILL_NICENESS)
        pins = self.pins
        pin = pins is not None and pins.prepare(number)
        # Populating a file on a disk would read all of it, and write all of it back.
        populate = self.file is None or self.file.in_memory
        while (unit := self._take_unit()) is not None:
            for offset in range(unit, min(unit + UNIT_BYTES, self.num_bytes), PIECE_BYTES):
                end = min(offset + PIECE_BYTES, self.num_bytes)
                if self._closing or not self._take_space(max(offset, usable_bytes), end, grow):
                    return
                if populate and (failure := _populate_piece(self.base_address + offset, end - offset)):
                    logger.warning(
                        "L1 is not populated beforehand but on first use: %(reason)s",
                        {"reason": os.strerror(failure)},
                    )
                    populate = False
                if populate or self.file is not None:
                    with self._lock:
                        self._populated_bytes += end - offset
            if pin and pins is not None:
                pin = pins.pin_unit(unit // UNIT_BYTES)

    def _take_unit(self) -> int | None:
        with self._lock:
            unit = self._next_offset
            self._next_offset += UNIT_BYTES
        return unit if unit < self.num_bytes and not self._closing else None

    def _take_space(self, start: int, end: int, grow: Callable[[int], object]) -> bool:
        """Bytes of a file that have no space yet get it; False if there is none."""
        if self.file is None or start >= end:
            return True
        try:
            self.file.allocate(start, end - start)
        except OSError as error:
            logger.error(
                "L1 has %(size_gb).2f of %(wanted_gb).2f GB and gets no more: no space for %(path)s "
                "(%(reason)s); free some and start again, or ask for less with --l1-size-gb",
                {
                    "size_gb": start / GB_BYTES,
                    "wanted_gb": self.num_bytes / GB_BYTES,
                    "path": self.file.path,
                    "reason": error.strerror,
                },
            )
            return False
        grow((end - start) // FRAME_BYTES)
        return True


def _populate_piece(address: int, size_bytes: int) -> int:
    """Gives every page of the piece memory without changing its content; returns 0 or an errno.

    Writing to the pages from here would race with copies; the kernel does it without.
    """
    if _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE) == 0:
        return 0
    failure = ctypes.get_errno()
    if failure != errno.EINVAL:
        return failure
    # Before Linux 5.14: locking populates too, as far as RLIMIT_MEMLOCK allows.
    if _libc.mlock(address, size_bytes) or _libc.munlock(address, size_bytes):
        return ctypes.get_errno()
    return 0


def _map(num_bytes: int) -> mmap.mmap:
    preflight.require(preflight.memory(num_bytes, 0, *available_bytes()))
    return _advised(_anonymous(num_bytes, 0))


def _map_file(file: "L1File") -> mmap.mmap:
    try:
        return _advised(file.map())
    except OSError as error:
        raise StartError(f"the system refuses to map --l1-path {file.path}: {error.strerror}") from error


def _advised(mapping: mmap.mmap) -> mmap.mmap:
    with contextlib.suppress(OSError):  # a kernel built without transparent huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


def _map_hugetlb(num_bytes: int) -> mmap.mmap:
    info = memory_info()
    page_bytes = info.get("Hugepagesize", 2 << 20)
    try:
        return _anonymous(-(-num_bytes // page_bytes) * page_bytes, _MAP_HUGETLB)
    except OSError as error:
        preflight.require(preflight.huge_pages(info, num_bytes))
        raise StartError(
            f"the system refuses its huge pages ({error.strerror}): leave out --l1-hugetlb"
        ) from error


def _anonymous(num_bytes: int, flags: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    except OSError as error:
        if flags:
            raise
        raise StartError(
            f"the system refuses a mapping of {num_bytes / GB_BYTES:.2f} GB ({error.strerror}): "
            "ask for less with --l1-size-gb, or raise 'ulimit -v' or vm.overcommit_memory"
        ) from error
