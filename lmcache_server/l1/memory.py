"""L1: one mapping of host memory that holds every stored page."""

import contextlib
import ctypes
import mmap
import os

from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.errors import StartError
from lmcache_server.host import preflight
from lmcache_server.host.machine import available_bytes, memory_info
from lmcache_server.host.units import GB_BYTES
from lmcache_server.l1.area import Area, Backing, Grow, shared_memory
from lmcache_server.l1.populate import Populator
from lmcache_server.transfer.locked_memory import LockedMemory

_MAP_HUGETLB = 0x40000


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
        self._populator: Populator | None = None

    @property
    def area(self) -> Area:
        """How another process maps the frames: those of a backing, or `shared` ones."""
        if self.backing is not None:
            return self.backing.area(self.base_address, self.num_bytes)
        return Area(self._descriptor, 0, self.base_address, self.num_bytes)

    @property
    def populated_bytes(self) -> int:
        """How much the background threads have populated so far, or, of a backing, how much is usable."""
        return self._populator.populated_bytes if self._populator is not None else 0

    @property
    def failure(self) -> str:
        """Why a background thread has ended before its time; empty if none has."""
        return self._populator.failure if self._populator is not None else ""

    @property
    def pinned_bytes(self) -> int:
        return self.locked.pinned_bytes if self.locked is not None else 0

    def check(self) -> None:
        """Raises CopyError if somebody has cut the backing short: to touch what is gone would end the server
        (SIGBUS)."""
        if self.backing is not None:
            self.backing.check()

    def fill(self, grow: Grow = lambda _frames: None, locked: LockedMemory | None = None) -> None:
        """Backs the mapping with memory in the background, and pins it if `locked` has GPUs.

        A backing becomes usable piece by piece. For each, the background thread calls `grow(frames)`.
        """
        self.locked = locked
        self._populator = Populator(self.base_address, self.num_bytes, self.backing, grow, locked)
        self._populator.start()

    def stop(self) -> bool:
        """As Populator.stop. Not for the event loop, because it waits."""
        return self._populator is None or self._populator.stop()

    def close(self) -> None:
        """Stops the background threads and unmaps, unless one of them, or a copy, hangs and may still use the
        memory."""
        if self.stop() and not self.is_in_use:
            self._mapping.close()
            if self._descriptor >= 0:
                os.close(self._descriptor)


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
