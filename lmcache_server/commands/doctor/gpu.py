"""`lmcache doctor --gpu`: does on each GPU what the server does for an engine, with the memory of a child
process, and says at which step it fails."""

import ctypes
import hashlib
import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lmcache_client.contract.endpoint import lending_path
from lmcache_kernels.driver import CudaError, Driver
from lmcache_kernels.page_copy import KernelError, PageCopy, compiled
from lmcache_server.commands.doctor.verdicts import UNLOCK
from lmcache_server.host.preflight import FAIL, OK, WARN, Check
from lmcache_server.transfer.base import CopyError
from lmcache_server.transfer.lent import lent

NUM_BYTES = 64 << 20
PIECE_BYTES = 64 << 10
ANSWER_S = 60.0
_ENGINE = f"""
import hashlib, sys
from lmcache_client.memory.lending import Lender
from lmcache_kernels.driver import CudaError, Driver
try:
    driver, ordinal = Driver(), int(sys.argv[1])
    driver.enter(driver.retain_context(ordinal))
    for line in sys.stdin:
        if line == "handle\\n":
            address = driver.allocate({NUM_BYTES})
            answer = driver.ipc_handle(address).hex()
        elif line == "descriptor\\n":
            address = driver.allocate_shareable({NUM_BYTES}, ordinal)
            answer = driver.export_descriptor(address)
            Lender([answer]).listen()
        else:
            answer = hashlib.sha256(driver.read(address, {NUM_BYTES})).hexdigest()
        if len(line) > 1:
            driver.write(address, bytes({NUM_BYTES}))
        print(answer, flush=True)
except CudaError as error:
    print("error", error, flush=True)
"""
"""In the place of an engine: makes memory of the kind that it reads. For each empty line, prints a digest of
the last one."""

SLEEP_MODE = "memory of sleep mode"
UNCACHED = "start vLLM without --enable-sleep-mode and --enable-cumem-allocator, or it runs uncached"

DEVICE_UNAVAILABLE = 46
RESET_MODE = "nvidia-smi -c 0  (the compute mode lets no further process use this GPU)"

_U64 = NDArray[np.uint64]


class _Trial:
    """One GPU, with a child that has memory there. The steps must be made in the order of `steps`; each
    returns what it found."""

    def __init__(self, driver: Driver, ordinal: int, stack: ExitStack) -> None:
        self.steps: list[tuple[str, Callable[[], str], str]] = [
            ("context", self._context, "free device memory (--gpu-memory-utilization of vLLM)"),
            ("memory of an engine", self._export, "free device memory (--gpu-memory-utilization of vLLM)"),
            ("open it", self._open, "run doctor as the server is run; containers: --pid=host, --gpus all"),
            ("pin memory", self._pin, UNLOCK),
            ("copy", partial(self._copy_both_ways, self._single), ""),
            ("copy in batches", partial(self._copy_both_ways, self._batch), ""),
            ("copy by kernel", self._kernel, "leave out --gpu-kernel"),
            (SLEEP_MODE, self._sleep_mode, UNCACHED),
        ]
        self._driver, self._ordinal, self._stack = driver, ordinal, stack
        self._host = np.frombuffer(mmap.mmap(-1, NUM_BYTES), np.uint8)
        self._digest = hashlib.sha256(bytes(NUM_BYTES)).hexdigest()

    def _later(self, function: Callable[..., object], *arguments: int) -> None:
        """Gives back what a step took. If the GPU has failed, this fails, too, which says nothing new."""
        self._stack.enter_context(suppress(CudaError))
        self._stack.callback(function, *arguments)

    def _context(self) -> str:
        self._driver.enter(self._driver.retain_context(self._ordinal))
        self._stream = self._driver.create_stream()
        self._later(self._driver.destroy_stream, self._stream)
        free, total = self._driver.memory_info()
        return f"{free >> 20} of {total >> 20} MiB are free"

    def _export(self) -> str:
        command = [sys.executable, "-c", _ENGINE, str(self._ordinal)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        watch = threading.Timer(ANSWER_S, child.kill)
        watch.start()
        self._stack.callback(child.wait)
        self._stack.callback(child.kill)
        self._stack.callback(watch.cancel)
        self._child = child
        self._handle = bytes.fromhex(self._answer("handle"))
        return ""

    def _answer(self, question: str = "") -> str:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with suppress(BrokenPipeError):  # it has said why it ended
            print(question, file=self._child.stdin, flush=True)
        line = self._child.stdout.readline().strip()
        if not line or line.startswith("error"):
            raise CopyError(f"in the process of the engine: {line or 'it has ended'}")
        return line

    def _open(self) -> str:
        self._address = self._driver.open_handle(self._handle)
        self._later(self._driver.close_handle, self._address)
        return ""

    def _pin(self) -> str:
        address = self._host.ctypes.data
        self._driver.register_host(address, NUM_BYTES)
        self._later(self._driver.unregister_host, address)
        return f"{NUM_BYTES >> 20} MiB"

    def _copy_both_ways(self, copy: Callable[[int, int], None]) -> str:
        host, times = self._host.ctypes.data, []
        for to, at in ((host, self._address), (self._address, host)):
            if to == host:
                ctypes.memset(host, 0xA5, NUM_BYTES)
            else:
                self._host[:] = np.random.default_rng().integers(0, 256, NUM_BYTES, np.uint8)
            started_s = time.perf_counter()
            copy(to, at)
            self._driver.synchronize(self._stream)
            times.append(f"{NUM_BYTES / (time.perf_counter() - started_s) / 1e9:.1f} GB/s")
            digest = hashlib.sha256(self._host.data).hexdigest()
            if to == host and digest != self._digest:
                raise CopyError("other bytes arrived from the GPU than were there")
            self._digest = digest
        if self._answer() != self._digest:
            raise CopyError("other bytes arrived on the GPU than were sent")
        return f"{times[0]} from the GPU, {times[1]} to it"

    def _single(self, to: int, at: int) -> None:
        self._driver.copy(to, at, NUM_BYTES, self._stream)

    def _batch(self, to: int, at: int) -> None:
        batch = self._driver.batch(*_pieces(to, at), in_order=to != self._address)  # as the server copies
        batch(0, NUM_BYTES // PIECE_BYTES, self._stream)

    def _kernel(self) -> str:
        try:
            image = compiled(self._driver.compute_capability(self._ordinal))
        except KernelError:
            return "not tried, because there is no cupy to compile it"
        kernel = PageCopy(self._driver, self._driver.load_kernel(image, "page_copy"))
        self._later(kernel.close)

        def launch(to: int, at: int) -> None:
            destination, source, length = _pieces(to, at)
            kernel.launch(source, destination, length, self._stream)

        return self._copy_both_ways(launch)

    def _sleep_mode(self) -> str:
        self._stack.callback(lending_path(self._child.pid).unlink, missing_ok=True)
        descriptor = int(self._answer("descriptor"))
        with lent(self._child.pid, descriptor) as copy:
            self._address = self._driver.map_descriptor(copy, NUM_BYTES, self._ordinal)
        self._later(self._driver.unmap, self._address, NUM_BYTES)
        self._digest = hashlib.sha256(bytes(NUM_BYTES)).hexdigest()
        return self._copy_both_ways(self._single)


def _pieces(to: int, at: int) -> tuple[_U64, _U64, _U64]:
    """Destinations, sources and lengths of copies that are NUM_BYTES together."""
    starts = np.arange(0, NUM_BYTES, PIECE_BYTES, np.uint64)
    return starts + np.uint64(to), starts + np.uint64(at), np.full_like(starts, PIECE_BYTES)


def try_gpus(driver: Driver) -> Iterator[Check]:
    """Tries every GPU of `driver`, one step after the other, up to the first that fails."""
    for ordinal in range(driver.num_devices()):
        name = f"GPU {driver.pci_bus_id(ordinal)}"
        with ExitStack() as stack:
            for what, step, fix in _Trial(driver, ordinal, stack).steps:
                started_s = time.perf_counter()
                try:
                    found = step()
                except (CudaError, OSError, CopyError) as error:
                    is_taken = isinstance(error, CudaError) and error.code == DEVICE_UNAVAILABLE
                    verdict = WARN if what == SLEEP_MODE else FAIL
                    yield Check(f"{name}, {what}", verdict, str(error), RESET_MODE if is_taken else fix)
                    break
                milliseconds = 1000 * (time.perf_counter() - started_s)
                yield Check(f"{name}, {what}", OK, f"{found}{', ' if found else ''}{milliseconds:.0f} ms")
