"""What the driver's calls look like to ctypes, held by a C++ compiler against every cuda.h at hand."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import standin

from lmcache_kernels import driver as cuda
from lmcache_server.commands.doctor import devices, gpu
from lmcache_server.transfer import gpus
from lmcache_server.transfer.cuda import REMEDIES

HEADERS = sorted(
    {
        path.resolve()
        for directory in map(Path, [*sys.path, "/usr/local"])
        for pattern in (
            "triton/backends/nvidia/include/cuda.h",
            "nvidia/*/include/cuda.h",
            "cuda*/include/cuda.h",
        )
        for path in directory.glob(pattern)
        if "cuGetProcAddress_v2" in path.read_text()  # CUDA 12.0, the oldest that is served
    }
)

BEGINNING = """
#define __CUDA_API_VERSION_INTERNAL 1
#include <cuda.h>
#include <cstddef>
#include <type_traits>
template <class F> struct Call;
template <class R, class... A> struct Call<R (*)(A...)> {
    static constexpr size_t count = sizeof...(A);
    static constexpr size_t sizes[] = {sizeof(A)...};
    static constexpr bool pointers[] = {std::is_pointer_v<A>...};
};
"""
BATCH = """
#if CUDA_VERSION >= 12080
#undef cuMemcpyBatchAsync
static_assert(std::is_same_v<decltype(&cuMemcpyBatchAsync), CUresult (*)(CUdeviceptr*, CUdeviceptr*, size_t*,
    size_t, CUmemcpyAttributes*, size_t*, size_t, size_t*, CUstream)>, "as for CUDA 12.8");
%s
#endif
"""
CONSTANTS = {
    "CU_STREAM_NON_BLOCKING": cuda.NON_BLOCKING,
    "CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING": cuda._BLOCKING_SYNC_NO_TIMING,
    "CU_CTX_SCHED_BLOCKING_SYNC": cuda._SCHED_BLOCKING_SYNC,
    "CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP": cuda._PORTABLE_DEVICEMAP,
    "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": cuda._LAZY_PEER_ACCESS,
    "CU_POINTER_ATTRIBUTE_BUFFER_ID": cuda._BUFFER_ID,
    "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL": cuda._ORDINAL,
    "CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE": cuda._LEGACY_IPC,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_MODE": cuda._COMPUTE_MODE,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": cuda._COMPUTE_MAJOR,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": cuda._COMPUTE_MINOR,
    "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": cuda._HOST_POINTER,
    "CU_STREAM_CAPTURE_MODE_RELAXED": cuda._CAPTURE_RELAXED,
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": cuda._POSIX_DESCRIPTOR,
    "CU_MEM_LOCATION_TYPE_DEVICE": cuda._ON_DEVICE,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": cuda._READ_AND_WRITE,
    "sizeof(CUmemAccessDesc)": ctypes.sizeof(cuda._Access),
    "offsetof(CUmemAccessDesc, location.type)": cuda._Access.location_type.offset,
    "offsetof(CUmemAccessDesc, location.id)": cuda._Access.ordinal.offset,
    "offsetof(CUmemAccessDesc, flags)": cuda._Access.flags.offset,
    "CU_IPC_HANDLE_SIZE": cuda.HANDLE_BYTES,
    "sizeof(CUuuid)": cuda.UUID_BYTES,
    "sizeof(CUipcMemHandle)": ctypes.sizeof(cuda._IpcHandle),
}
BATCH_CONSTANTS = {
    "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": cuda._STREAM_ORDER,
    "CU_MEMCPY_SRC_ACCESS_ORDER_ANY": cuda._ANY_ORDER,
    "sizeof(CUmemcpyAttributes)": ctypes.sizeof(cuda._CopyAttributes),
    "offsetof(CUmemcpyAttributes, srcAccessOrder)": cuda._CopyAttributes.source_order.offset,
    "offsetof(CUmemcpyAttributes, srcLocHint)": cuda._CopyAttributes.hints.offset,
    "offsetof(CUmemcpyAttributes, flags)": cuda._CopyAttributes.flags.offset,
}
RESULTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_NOT_INITIALIZED": 3,
    "CUDA_ERROR_DEVICE_UNAVAILABLE": gpu.DEVICE_UNAVAILABLE,
    "CUDA_ERROR_NO_DEVICE": gpus._NO_DEVICE,
    "CUDA_ERROR_SYSTEM_NOT_READY": 802,
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": 803,
    "CUDA_ERROR_UNKNOWN": 999,
}
MODES = {"CU_COMPUTEMODE_PROHIBITED": 2, "CU_COMPUTEMODE_EXCLUSIVE_PROCESS": 3}


def assertions(signatures: dict[str, tuple[Any, ...]], constants: dict[str, int]) -> Iterator[str]:
    for expression, value in constants.items():
        yield f'static_assert(({expression}) == {value}, "{expression}");'
    for name, arguments in signatures.items():
        call = f"Call<decltype(&{name})>"
        yield f'static_assert({call}::count == {len(arguments)}, "{name}");'
        for index, kind in enumerate(arguments):
            points = kind in (ctypes.c_void_p, ctypes.c_char_p) or hasattr(kind, "contents")
            yield f'static_assert({call}::sizes[{index}] == {ctypes.sizeof(kind)}, "{name}, {index}");'
            yield f'static_assert({call}::pointers[{index}] == {str(points).lower()}, "{name}, {index}");'


def compiled(header: Path, signatures: dict[str, tuple[Any, ...]], constants: dict[str, int]) -> str:
    """The compiler's errors."""
    batch = BATCH % "\n".join(assertions({}, BATCH_CONSTANTS))
    text = "\n".join([BEGINNING, *assertions(signatures, constants), batch])
    command = [str(standin.COMPILER), "-std=c++17", "-fsyntax-only", f"-I{header.parent}", "-xc++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False).stderr


def described() -> dict[str, tuple[Any, ...]]:
    by_value = (ctypes.POINTER(cuda._U64), cuda._IpcHandle, ctypes.c_uint)
    return {**cuda.signatures(), "cuIpcOpenMemHandle_v2": by_value}


@pytest.mark.skipif(standin.COMPILER is None or not HEADERS, reason="no C++ compiler, or no cuda.h")
@pytest.mark.parametrize("header", HEADERS, ids=str)
def test_calls_structures_and_constants_are_those_of_the_header(header: Path) -> None:
    assert compiled(header, described(), {**CONSTANTS, **RESULTS, **MODES}) == ""


def test_every_code_that_has_a_remedy_is_held_against_the_header() -> None:
    with_remedy = {*REMEDIES, *gpus.START_REMEDIES, gpu.DEVICE_UNAVAILABLE, gpus._NO_DEVICE}
    assert with_remedy == set(RESULTS.values())
    assert set(devices._MODES) == set(MODES.values())


@pytest.mark.skipif(standin.COMPILER is None or not HEADERS, reason="no C++ compiler, or no cuda.h")
def test_a_wrong_one_is_found() -> None:
    narrow = {"cuMemFree_v2": (ctypes.c_uint,)}
    assert "cuMemFree_v2, 0" in compiled(HEADERS[0], narrow, {})
    assert "cuInit" in compiled(HEADERS[0], {"cuInit": ()}, {})
    assert "CU_IPC_HANDLE_SIZE" in compiled(HEADERS[0], {}, {"CU_IPC_HANDLE_SIZE": 63})
