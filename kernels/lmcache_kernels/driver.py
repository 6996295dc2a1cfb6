"""The parts of CUDA's driver API that this project needs, by ctypes.

The connector inside vLLM and the server both call the driver directly, so that a handle means the same on
both sides whatever the versions of torch, cupy and CUDA's runtime. The signatures are from the CUDA Toolkit
documentation, CUDA Driver API. They date from CUDA 12.0 or earlier; cuMemcpyBatchAsync is from CUDA 12.8.
"""

import ctypes
import functools
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HANDLE_BYTES = 64
UUID_BYTES = 16
NON_BLOCKING = 1
"""A flag of streams: not ordered with the legacy default stream."""

_BLOCKING_SYNC_NO_TIMING = 1 | 2
_SCHED_BLOCKING_SYNC = 4
_PORTABLE_DEVICEMAP = 1 | 2
_LAZY_PEER_ACCESS = 1
_BUFFER_ID, _ORDINAL, _LEGACY_IPC = 7, 9, 10
_COMPUTE_MODE, _COMPUTE_MAJOR, _COMPUTE_MINOR, _HOST_POINTER = 20, 75, 76, 91
_CAPTURE_RELAXED = 2
_BATCH_VERSION = 12080
_STREAM_ORDER, _ANY_ORDER = 1, 3
_POSIX_DESCRIPTOR, _PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 1, 3

_U64 = c_ulonglong
Numbers = NDArray[np.uint64]


def signatures() -> dict[str, tuple[Any, ...]]:
    """The types of the arguments of each function, from driver.json; `*` stands for a pointer."""
    table: dict[str, str] = json.loads(Path(__file__).with_name("driver.json").read_text())
    known = {each: getattr(ctypes, each.lstrip("*")) for text in table.values() for each in text.split()}
    types = {each: POINTER(known[each]) if each.startswith("*") else known[each] for each in known}
    return {name: tuple(types[each] for each in text.split()) for name, text in table.items()}


class CudaError(Exception):
    """A call to the driver failed with `code` (a CUresult)."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} (CUDA error {code})")
        self.code = code


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", c_ubyte * HANDLE_BYTES),)


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; both location hints stay empty."""

    _fields_ = (("source_order", c_int), ("hints", c_int * 4), ("flags", c_uint))


class _Access(ctypes.Structure):
    """CUmemAccessDesc: who may do what with a mapping."""

    _fields_ = (("location_type", c_int), ("ordinal", c_int), ("flags", c_int))


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp: what to allocate, and how it may be shared. The rest stays empty."""

    _fields_ = (
        *((name, c_int) for name in ("kind", "shared", "location_type", "ordinal")),
        ("rest", _U64 * 2),
    )


class Driver:
    """Calls to the driver, which raise CudaError. Contexts, streams and events are its own integer handles.

    Unless stated otherwise, a call uses the context that is current on the calling thread.
    """

    def __init__(self) -> None:
        """Raises OSError without a driver, AttributeError if it is older than CUDA 12, and CudaError if it
        has no GPU."""
        self._library = ctypes.CDLL("libcuda.so.1")
        for name, argument_types in signatures().items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = argument_types, c_int
        # The handle is the only argument in this API that is a structure passed by value.
        self._library.cuIpcOpenMemHandle_v2.argtypes = (POINTER(_U64), _IpcHandle, c_uint)
        self._call("cuInit", 0)
        self._batch = self._find_batch()

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            text = c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(name, code, (text.value or b"unknown error").decode())

    def _out(self, name: str, kind: type, *arguments: object) -> Any:
        """Calls `name` and returns the value that it stores through its first argument."""
        out = kind()
        self._call(name, ctypes.byref(out), *arguments)
        return out.value

    def version(self) -> int:
        """The newest CUDA version that the driver supports, as in 12080 for 12.8."""
        return int(self._out("cuDriverGetVersion", c_int))

    # -- devices and contexts ---------------------------------------------------------------------

    def num_devices(self) -> int:
        return int(self._out("cuDeviceGetCount", c_int))

    def uuid(self, ordinal: int) -> bytes:
        """The UUID_BYTES bytes that identify the device (or MIG instance) in every process."""
        uuid = ctypes.create_string_buffer(UUID_BYTES)
        self._call("cuDeviceGetUuid_v2", uuid, ordinal)
        return uuid.raw

    def pci_bus_id(self, ordinal: int) -> str:
        bus_id = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", bus_id, len(bus_id), ordinal)
        return bus_id.value.decode()

    def compute_capability(self, ordinal: int) -> str:
        """The digits of the architecture, as in "90" for `sm_90`."""
        major = self._out("cuDeviceGetAttribute", c_int, _COMPUTE_MAJOR, ordinal)
        return f"{major}{self._out('cuDeviceGetAttribute', c_int, _COMPUTE_MINOR, ordinal)}"

    def compute_mode(self, ordinal: int) -> int:
        """Which processes may use the device, as a CUcomputemode: 0 stands for all of them."""
        return int(self._out("cuDeviceGetAttribute", c_int, _COMPUTE_MODE, ordinal))

    def sees_host_pointers(self, ordinal: int) -> bool:
        """Whether kernels reach registered host memory at the address that the process uses for it."""
        return bool(self._out("cuDeviceGetAttribute", c_int, _HOST_POINTER, ordinal))

    def retain_context(self, ordinal: int) -> int:
        """The device's primary context of this process. A thread that waits in it sleeps."""
        self._call("cuDevicePrimaryCtxSetFlags_v2", ordinal, _SCHED_BLOCKING_SYNC)
        return int(self._out("cuDevicePrimaryCtxRetain", c_void_p, ordinal))

    def current_context(self) -> int:
        """The current context, or 0 if none is current."""
        return int(self._out("cuCtxGetCurrent", c_void_p) or 0)

    def enter(self, context: int) -> None:
        """Makes `context` current on this thread and keeps the thread and another thread's capture of a graph
        from disturbing each other."""
        self._call("cuCtxSetCurrent", context)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(c_int(_CAPTURE_RELAXED)))

    # -- memory -----------------------------------------------------------------------------------

    def ordinal_of(self, address: int) -> int:
        """The device that owns the memory at `address`."""
        return int(self._out("cuPointerGetAttribute", c_int, _ORDINAL, address))

    def has_ipc_handle(self, address: int) -> bool:
        """False for memory of the virtual memory API and of memory pools."""
        return bool(self._out("cuPointerGetAttribute", c_uint, _LEGACY_IPC, address))

    def buffer_id(self, address: int) -> int:
        """A number that all addresses of an allocation share, and no address of another has."""
        return int(self._out("cuPointerGetAttribute", _U64, _BUFFER_ID, address))

    def allocation(self, address: int) -> tuple[int, int]:
        """(first address, bytes) of the allocation that contains `address`."""
        base, num_bytes = _U64(), c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(num_bytes), address)
        return base.value, num_bytes.value

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, num_bytes: int) -> int:
        return int(self._out("cuMemAlloc_v2", _U64, num_bytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def ipc_handle(self, address: int) -> bytes:
        """The handle, of HANDLE_BYTES bytes, by which another process opens the allocation at `address`."""
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        self._call("cuIpcGetMemHandle", handle, address)
        return handle.raw

    def open_handle(self, handle: bytes) -> int:
        """Opens an allocation of another process and returns its address in this process."""
        by_value = _IpcHandle.from_buffer_copy(handle)
        return int(self._out("cuIpcOpenMemHandle_v2", _U64, by_value, _LAZY_PEER_ACCESS))

    def close_handle(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def export_descriptor(self, address: int) -> int:
        """A new file descriptor by which another process maps the allocation at `address`, which is of the
        virtual memory API (cuMemCreate). It keeps the allocation until it is closed."""
        handle, descriptor = self._out("cuMemRetainAllocationHandle", _U64, address), c_int(-1)
        try:
            self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _POSIX_DESCRIPTOR, 0)
        finally:
            self._call("cuMemRelease", handle)
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def allocate_shareable(self, num_bytes: int, ordinal: int) -> int:
        """The address of new memory of the virtual memory API, as vLLM's sleep mode has it, on the device
        `ordinal`. `num_bytes` is a multiple of 2 MiB. `unmap` frees it."""
        wanted = _Allocation(_PINNED, _POSIX_DESCRIPTOR, _ON_DEVICE, ordinal)
        handle = self._out("cuMemCreate", _U64, num_bytes, ctypes.byref(wanted), 0)
        return self._map(handle, num_bytes, ordinal)

    def map_descriptor(self, descriptor: int, num_bytes: int, ordinal: int) -> int:
        """Maps the allocation of another process that `descriptor` stands for and returns its address, for
        the device `ordinal`. The descriptor may be closed then. After an error, nothing of it is left."""
        handle = self._out("cuMemImportFromShareableHandle", _U64, descriptor, _POSIX_DESCRIPTOR)
        return self._map(handle, num_bytes, ordinal)

    def _map(self, handle: int, num_bytes: int, ordinal: int) -> int:
        with ExitStack() as undo:
            # The mapping keeps the allocation.
            undo.callback(self._call, "cuMemRelease", handle)
            address = int(self._out("cuMemAddressReserve", _U64, num_bytes, 0, 0, 0))
            with ExitStack() as unmap:
                unmap.callback(self._call, "cuMemAddressFree", address, num_bytes)
                self._call("cuMemMap", address, num_bytes, 0, handle, 0)
                unmap.callback(self._call, "cuMemUnmap", address, num_bytes)
                access = _Access(_ON_DEVICE, ordinal, _READ_AND_WRITE)
                self._call("cuMemSetAccess", address, num_bytes, ctypes.byref(access), 1)
                unmap.pop_all()
        return address

    def unmap(self, address: int, num_bytes: int) -> None:
        """Undoes `map_descriptor` or `allocate_shareable`."""
        self._call("cuMemUnmap", address, num_bytes)
        self._call("cuMemAddressFree", address, num_bytes)

    def read(self, address: int, num_bytes: int, stream: int = 0) -> bytes:
        """Reads a few bytes of device memory, after what `stream` has received so far."""
        data = ctypes.create_string_buffer(num_bytes)
        self._call("cuMemcpyDtoHAsync_v2", data, address, num_bytes, stream)
        self.synchronize(stream)
        return data.raw

    def write(self, address: int, data: bytes, stream: int = 0) -> None:
        """Writes a few bytes to device memory; on return, other processes see them, too."""
        self._call("cuMemcpyHtoDAsync_v2", address, data, len(data), stream)
        self.synchronize(stream)

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pins host memory for copies and kernels in every context of this process."""
        self._call("cuMemHostRegister_v2", address, num_bytes, _PORTABLE_DEVICEMAP)

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    # -- streams, events, copies ------------------------------------------------------------------

    def create_stream(self) -> int:
        return int(self._out("cuStreamCreateWithPriority", c_void_p, NON_BLOCKING, 0))

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def create_event(self) -> int:
        """An event for which a waiting thread sleeps."""
        return int(self._out("cuEventCreate", c_void_p, _BLOCKING_SYNC_NO_TIMING))

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def wait_for(self, event: int) -> None:
        """Waits until all work that its stream received before the event was recorded has completed."""
        self._call("cuEventSynchronize", event)

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueues one copy; the driver recognises host memory by its address."""
        self._call("cuMemcpyAsync", destination, source, num_bytes, stream)

    def batch(
        self, destination: Numbers, source: Numbers, length: Numbers, *, in_order: bool = True
    ) -> Callable[[int, int, int], None]:
        """Prepares copies. Returns a function of (first, last, stream), which enqueues those from number
        `first` to before `last`: in one call if the driver can (CUDA 12.8), otherwise one by one.

        The order of the copies is undefined. Without `in_order`, the sources may be read before the stream
        comes to the copies, so nothing in the stream may still write to them."""
        if self._batch is None:
            rows = list(zip(destination.tolist(), source.tolist(), length.tolist(), strict=True))

            def one_by_one(first: int, last: int, stream: int) -> None:
                for row in rows[first:last]:
                    self.copy(*row, stream)

            return one_by_one
        arrays = [np.ascontiguousarray(array, np.uint64) for array in (destination, source, length)]
        addresses = [array.ctypes.data for array in arrays]
        attributes = _CopyAttributes(_STREAM_ORDER if in_order else _ANY_ORDER)
        order = [ctypes.byref(attributes), ctypes.byref(c_size_t(0)), 1]

        def enqueue(first: int, last: int, stream: int) -> None:
            at = [address + first * arrays[0].itemsize for address in addresses]
            failed = c_size_t(-1)  # stays if the error is that of no single copy
            code = self._batch(*at, last - first, *order, ctypes.byref(failed), stream)
            if code:
                which = f" (copy {failed.value} of {last - first})" if failed.value < last - first else ""
                self._check(f"cuMemcpyBatchAsync{which}", code)

        return enqueue

    def _find_batch(self) -> Any:
        address, status, name = c_void_p(), c_int(), b"cuMemcpyBatchAsync"
        if os.environ.get("LMCACHE_MP_BATCHED_COPIES") == "0":
            return None
        code = self._library.cuGetProcAddress_v2(
            name, ctypes.byref(address), _BATCH_VERSION, 0, ctypes.byref(status)
        )
        if code or not address.value:
            return None
        kind = ctypes.CFUNCTYPE(
            c_int, *[c_void_p] * 3, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p
        )
        return kind(address.value)

    # -- kernels ----------------------------------------------------------------------------------

    def load_kernel(self, image: bytes, name: str) -> int:
        """The function `name` of a module (cubin or PTX), which stays loaded."""
        module = self._out("cuModuleLoadData", c_void_p, image)
        return int(self._out("cuModuleGetFunction", c_void_p, module, name.encode()))

    def launch(self, function: int, blocks: int, threads: int, stream: int, *arguments: Any) -> None:
        """Enqueues a kernel; `arguments` are ctypes values, read before this returns."""
        pointers = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)


def load() -> Driver | None:
    """The driver, or None unless this machine has one and this process can use a GPU. A driver that cannot
    start yet, as at boot, may start later."""
    try:
        return started()
    except (OSError, AttributeError, CudaError):
        return None


@functools.cache
def started() -> Driver:
    """The driver. Raises as Driver does; an error is not cached."""
    return Driver()
