"""Memory of CUDA's virtual memory API, as the allocator of vLLM's sleep mode makes it."""

import ctypes
from ctypes import byref, c_int, c_size_t, c_ubyte, c_ulonglong, c_ushort, c_void_p

from gpu_engine import loaded

from lmcache_kernels.driver import _Access

GRANULE = 2 << 20
PINNED = ON_DEVICE = POSIX_DESCRIPTOR = 1
READ_AND_WRITE = 3


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("ordinal", c_int),
        ("windows", c_void_p),
        ("compression", c_ubyte),
        ("direct", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class VirtualMemory:
    """One range of addresses, with zeroed memory behind it unless it sleeps. `parts` are the allocations that
    it consists of: expandable segments have many."""

    def __init__(self, num_bytes: int, *, shareable: bool = True, parts: int = 1, ordinal: int = 0) -> None:
        self.driver = loaded()
        self.num_bytes = -(-num_bytes // (parts * GRANULE)) * parts * GRANULE
        self._part_bytes = self.num_bytes // parts
        self._handle_types = POSIX_DESCRIPTOR if shareable else 0
        self._ordinal = ordinal
        library = self.driver._library
        library.cuMemCreate.argtypes = (c_void_p, c_size_t, c_void_p, c_ulonglong)
        self.address = int(self.driver._out("cuMemAddressReserve", c_ulonglong, self.num_bytes, 0, 0, 0))
        self._handles: list[int] = []
        self.wake()

    def wake(self) -> None:
        """New memory, at the same addresses."""
        wanted = _Properties(PINNED, self._handle_types, ON_DEVICE, self._ordinal)
        access = _Access(ON_DEVICE, self._ordinal, READ_AND_WRITE)
        for at in range(self.address, self.address + self.num_bytes, self._part_bytes):
            handle = self.driver._out("cuMemCreate", c_ulonglong, self._part_bytes, byref(wanted), 0)
            self.driver._call("cuMemMap", at, self._part_bytes, 0, handle, 0)
            self.driver._call("cuMemSetAccess", at, self._part_bytes, byref(access), 1)
            self._handles.append(handle)
            self.driver.write(at, bytes(self._part_bytes))

    def sleep(self) -> None:
        """Frees the memory; its content is lost."""
        for at in range(self.address, self.address + self.num_bytes, self._part_bytes):
            self.driver._call("cuMemUnmap", at, self._part_bytes)
            self.driver._call("cuMemRelease", self._handles.pop())

    def close(self) -> None:
        if self._handles:
            self.sleep()
        self.driver._call("cuMemAddressFree", self.address, self.num_bytes)


def allocate(num_bytes: int) -> tuple[int, VirtualMemory]:
    """For a GpuEngine; whoever closes the engine closes the memory."""
    memory = VirtualMemory(num_bytes)
    return memory.address, memory
