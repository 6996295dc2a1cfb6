"""What the stand-in's own tests run in: processes whose driver is the stand-in."""

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from harness.paths import TESTS
from harness.processes import ChildProcess

import standin
from lmcache_kernels import driver as cuda
from lmcache_kernels.driver import CudaError, Driver

MIB = 1 << 20
LATE = 20_000
"""Microseconds that each operation is late, at most."""
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALISED, NO_DEVICE = 1, 2, 3, 100
DEVICE_UNAVAILABLE, INVALID_IMAGE, INVALID_CONTEXT = 46, 200, 201
ILLEGAL_ADDRESS, ALREADY_REGISTERED = 700, 712


_needed = pytest.mark.skipif(
    standin.COMPILER is None or standin.header() is None, reason="no C++ compiler, or no cuda.h"
)


def command(module: str, call: str) -> list[str]:
    code = f"import sys; sys.path.insert(0, {str(TESTS / 'service')!r}); import {module} as m; m.{call}"
    return [sys.executable, "-c", code]


def on_stand_in(**settings: object) -> Callable[[Callable[[], None]], Callable[[Path], None]]:
    """The test's body runs in a new process, after whose end only counters and memory may be left over.

    `settings` are as for `standin.environment`; `visible` becomes CUDA_VISIBLE_DEVICES.
    """

    def decorated(body: Callable[[], None]) -> Callable[[Path], None]:
        def test(tmp_path: Path) -> None:
            environment = standin.environment(tmp_path, **settings)
            if "visible" in settings:
                environment["CUDA_VISIBLE_DEVICES"] = str(settings["visible"])
            done = subprocess.run(
                command(body.__module__, f"{body.__name__}.body()"),
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            names = {path.name.split("-")[0] for path in tmp_path.iterdir()}
            assert names <= {"counters", "memory", "fail"}

        test.body = body  # type: ignore[attr-defined]
        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return _needed(test)

    return decorated


def entered(ordinal: int = 0) -> Driver:
    driver = Driver()
    driver.enter(driver.retain_context(ordinal))
    return driver


@contextlib.contextmanager
def refused(code: int) -> Iterator[None]:
    with pytest.raises(CudaError) as caught:
        yield
    assert caught.value.code == code, caught.value


def host_pages(num_bytes: int) -> np.ndarray:
    """Zeroed, and aligned as pages are."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def pinned(driver: Driver, num_bytes: int) -> np.ndarray:
    array = host_pages(num_bytes)
    driver.register_host(array.ctypes.data, num_bytes)
    return array


def filled(driver: Driver, num_bytes: int, value: int) -> int:
    address = driver.allocate(num_bytes)
    driver.write(address, bytes([value]) * num_bytes)
    return address


def memset(driver: Driver, address: int, value: int, num_bytes: int, stream: int) -> None:
    function = driver._library.cuMemsetD8Async
    function.argtypes = (ctypes.c_ulonglong, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
    assert function(address, value, num_bytes, stream) == 0


def keep_busy(driver: Driver, stream: int) -> None:
    """A fifth of a second, at LATE: who does not wait for what comes behind it is too early."""
    scratch = driver.allocate(4096)
    for _ in range(20):
        memset(driver, scratch, 0, 4096, stream)


def device_byte(address: int) -> int:
    """What is in the device's memory at this moment; no real driver tells."""
    return ctypes.c_ubyte.from_address(address).value


def batch(driver: Driver, pieces: list[tuple[int, int, int]], stream: int, order: int, first: int = 0) -> int:
    """cuMemcpyBatchAsync of (to, from, bytes) with every argument open: what it returned. The arrays are
    overwritten when it has."""
    arrays = np.array(pieces, np.uint64).reshape(-1, 3).T.copy()
    attributes = cuda._CopyAttributes(order)
    index, failed = ctypes.c_size_t(first), ctypes.c_size_t(99)
    code = driver._batch(
        *(row.ctypes.data for row in arrays),
        len(pieces),
        ctypes.byref(attributes),
        ctypes.byref(index),
        1,
        ctypes.byref(failed),
        stream,
    )
    arrays[:] = 0
    return int(code)


def counted(pid: int = 0) -> standin.Counters:
    """Of this process, or of another."""
    return standin.counters(Path(os.environ["CUDA_STANDIN_DIR"]), pid or os.getpid())


class Exporter:
    """Another process, with memory on the device of `visible[0]`: filled with 7."""

    def __init__(self, visible: str = "0") -> None:
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        self.process = ChildProcess("exporter", command("standin.child", "export()"), variables, pipes=True)
        uuid, handle, inner, self.address = self.process.stdout.readline().decode().split()
        self.uuid, self.handle, self.inner_handle = map(bytes.fromhex, (uuid, handle, inner))

    def ask(self, what: str) -> str:
        self.process.say(what)
        return self.process.stdout.readline().decode().strip()

    def kill(self) -> None:
        self.process.kill()


def export() -> None:
    """What runs in an Exporter."""
    driver = entered()
    address = filled(driver, 3 * MIB, 7)
    handles = (driver.ipc_handle(address).hex(), driver.ipc_handle(address + 3 * MIB - 1).hex())
    print(driver.uuid(0).hex(), *handles, address, flush=True)
    for line in sys.stdin:
        if line == "read\n":
            print(driver.read(address + MIB, 4).hex(), flush=True)
        else:
            driver.free(address)
            print("freed", flush=True)
