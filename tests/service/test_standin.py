"""The stand-in of CUDA's driver refuses what a driver would: memory, devices, contexts, processes.

See tests/support/standin/cuda.cpp; order is tested in test_standin_order.py.
"""

import concurrent.futures
import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
from harness.waiting import PATIENCE_S
from standin.child import (
    ALREADY_REGISTERED,
    DEVICE_UNAVAILABLE,
    INVALID_CONTEXT,
    INVALID_VALUE,
    MIB,
    NO_DEVICE,
    NOT_INITIALISED,
    OUT_OF_MEMORY,
    Exporter,
    counted,
    entered,
    host_pages,
    on_stand_in,
    refused,
)

from lmcache_client.contract.messages import Memory
from lmcache_kernels import driver as cuda
from lmcache_kernels.driver import CudaError, Driver
from lmcache_server.transfer.base import CopyError, NoAccessError
from lmcache_server.transfer.copy_queue import CopyWorker
from lmcache_server.transfer.cuda import CudaMapping
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.gpus import logger as gpus_logger
from lmcache_server.transfer.locked_memory import LockedMemory
from lmcache_server.transfer.plan import Pieces

# -- memory of other processes ---------------------------------------------------------------------------


@on_stand_in(devices=3, visible="2,1,0")
def test_memory_of_another_process_is_mapped_whatever_the_devices_are_called() -> None:
    exporter = Exporter(visible="1")
    driver = Driver()
    (ordinal,) = (each for each in range(3) if driver.uuid(each) == exporter.uuid)
    assert ordinal == 1
    driver.enter(driver.retain_context(0))
    with refused(INVALID_CONTEXT):
        driver.open_handle(exporter.handle)
    driver.enter(driver.retain_context(ordinal))
    address = driver.open_handle(exporter.inner_handle)
    assert address != int(exporter.address)
    assert driver.allocation(address + 3 * MIB) == (address, 4 * MIB), "the base, in whole granules"
    assert driver.ordinal_of(address) == ordinal
    assert driver.read(address, 3 * MIB) == bytes([7]) * (3 * MIB)
    driver.write(address + MIB, b"\x01\x02\x03\x04")
    assert exporter.ask("read") == "01020304"
    # Once more is the same place, and each of the two ends on its own.
    assert driver.open_handle(exporter.handle) == address
    assert counted().mappings == 1
    driver.close_handle(address)
    assert driver.read(address + MIB, 4) == b"\x01\x02\x03\x04"
    driver.close_handle(address)
    assert counted().mappings == 0
    with refused(INVALID_VALUE):
        driver.read(address, 1)
    with refused(INVALID_VALUE):
        driver.close_handle(address)
    exporter.kill()


@on_stand_in()
def test_mapped_memory_outlives_its_exporter_and_counts_until_it_is_closed() -> None:
    driver = entered()
    free_bytes = driver.memory_info()[0]
    for end in ("free", "kill"):
        exporter = Exporter()
        address = driver.open_handle(exporter.handle)
        if end == "free":
            assert exporter.ask("free") == "freed"
        exporter.kill()
        assert (counted(exporter.process.pid).contexts, counted().contexts) == (1, 1), "the dead are counted"
        assert driver.read(address, 3 * MIB) == bytes([7]) * (3 * MIB), end
        assert driver.memory_info()[0] == free_bytes - 4 * MIB
        driver.close_handle(address)
        assert driver.memory_info()[0] == free_bytes


@on_stand_in()
def test_a_handle_opens_nothing_that_was_freed_or_whose_process_is_dead_or_that_is_garbage() -> None:
    driver = entered()
    freed, dead = Exporter(), Exporter()
    freed.ask("free")
    dead.kill()
    for handle in (freed.handle, dead.handle, b"\xee" * 64, bytes(64)):
        with refused(INVALID_VALUE):
            driver.open_handle(handle)
    own = driver.allocate(MIB)
    with refused(INVALID_CONTEXT):
        driver.open_handle(driver.ipc_handle(own))
    assert driver.has_ipc_handle(own)
    assert counted().mappings == 0
    freed.kill()


# -- host memory -----------------------------------------------------------------------------------------


@on_stand_in(pin_limit=3 * MIB)
def test_copies_want_their_host_memory_in_one_registration() -> None:
    driver = entered()
    device, host, stream = driver.allocate(2 * MIB), host_pages(4 * MIB), driver.create_stream()
    at = host.ctypes.data
    with refused(INVALID_VALUE):
        driver.copy(device, at, MIB, stream)
    driver.register_host(at, MIB)
    driver.register_host(at + MIB, MIB)
    driver.copy(device, at + MIB, MIB, stream)
    driver.synchronize(stream)
    with refused(INVALID_VALUE):
        driver.copy(device, at + MIB // 2, MIB, stream)
    with refused(ALREADY_REGISTERED):
        driver.register_host(at + MIB // 2, MIB)
    with refused(OUT_OF_MEMORY):
        driver.register_host(at + 2 * MIB, 2 * MIB)
    assert counted().registered_bytes == 2 * MIB
    driver.unregister_host(at + MIB)
    assert counted().registered_bytes == MIB
    with refused(INVALID_VALUE):
        driver.copy(device, at, MIB + 1, stream)
    with refused(INVALID_VALUE):
        driver.copy(device + 2 * MIB - 1, at, 2, stream)
    # The others take any memory.
    data = bytes(range(256)) * 16
    driver.write(device, data)
    assert driver.read(device, len(data)) == data
    gone = mmap.mmap(-1, MIB)
    address = np.frombuffer(gone, np.uint8).ctypes.data
    gone.close()
    for start, size in ((address, MIB), (at + 1, MIB), (at + 3 * MIB, 0)):
        with refused(INVALID_VALUE):
            driver.register_host(start, size)


# -- devices, contexts, processes ------------------------------------------------------------------------


@on_stand_in(devices=3, visible="2,0,7,1")
def test_what_follows_a_device_that_is_not_there_is_not_there_either() -> None:
    driver = Driver()
    found = [driver.pci_bus_id(ordinal) for ordinal in range(driver.num_devices())]
    assert found == ["00FF:02:00.0", "00FF:00:00.0"]


@on_stand_in(devices=0)
def test_without_a_device_there_is_no_driver() -> None:
    with refused(NO_DEVICE):
        Driver()
    assert cuda.load() is None


@on_stand_in()
def test_calls_need_a_driver_that_was_started_by_this_process_and_a_context_of_this_thread() -> None:
    assert ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == NOT_INITIALISED
    driver = Driver()
    with refused(INVALID_CONTEXT):
        driver.create_stream()
    context = driver.retain_context(0)
    driver.enter(context)
    driver.create_stream()
    codes: list[int] = []

    def elsewhere() -> None:
        with refused(INVALID_CONTEXT):
            driver.create_stream()
        codes.append(0)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert codes == [0]
    if (child := os.fork()) == 0:
        try:
            with refused(NOT_INITIALISED):
                driver.create_stream()
            with refused(NOT_INITIALISED):
                Driver()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert counted().contexts == 1


# -- what the server does with such a driver -------------------------------------------------------------


class Loop:
    """The event loop that a copy worker sees."""

    create_future = staticmethod(concurrent.futures.Future)

    def call_soon_threadsafe(self, function: Callable[..., object], *arguments: object) -> None:
        function(*arguments)


@dataclass
class Job:
    load: bool
    build: Callable[[], Pieces]
    checksums: bool = False

    def after(self) -> None:
        """Nothing is left to do."""


class Mapped:
    """Memory of another process, mapped for copies to and from an L1 of this size."""

    def __init__(self, l1_bytes: int, visible: str = "0") -> None:
        self.exporter, self.gpus, self.l1 = Exporter(visible), Gpus(), host_pages(l1_bytes)
        locked = LockedMemory(self.gpus, self.l1.ctypes.data, l1_bytes, l1_bytes)
        handles = self.exporter.uuid, (self.exporter.handle,)
        self.mapping = CudaMapping(
            Memory(self.exporter.process.pid, ((0, MIB),), 0, *handles), self.gpus, locked
        )

    def pieces(self, *offsets: int, num_bytes: int = 4096) -> Pieces:
        """From these places in L1 to the same ones of the memory, modulo its size, or back."""
        places = np.array(offsets, np.uint64)
        remote = places % MIB + np.uint64(self.mapping.bases[0])
        return Pieces(places + np.uint64(self.l1.ctypes.data), remote, np.full_like(places, num_bytes))

    @contextlib.contextmanager
    def worker(self) -> Iterator[Callable[[bool, Callable[[], Pieces]], Any]]:
        """Its copy thread: call it to submit a job; the end of the job is a future."""
        worker = CopyWorker("copy", self.mapping, lambda: True, Loop())  # type: ignore[arg-type]
        opened: Any = worker.opened
        assert opened.result(PATIENCE_S).error is None
        yield lambda load, build: worker.submit(Job(load, build))  # type: ignore[arg-type]
        ended: Any = worker.close()
        ended.result(PATIENCE_S)
        self.exporter.kill()


@on_stand_in()
def test_a_slice_whose_event_cannot_be_recorded_costs_no_event() -> None:
    it = Mapped(4096)
    it.mapping.open()
    (copy,) = (copy for _, copy in it.mapping.copies(it.pieces(0), load=False))
    fails = Mock(side_effect=CudaError("cuEventRecord", 1, "invalid argument"))
    with patch.object(it.gpus.driver, "record", fails):
        for _ in range(3):
            with pytest.raises(CopyError, match="cuEventRecord"):
                copy()
            it.mapping._finish(0, False)
    for _ in range(4):
        copy()
    it.mapping._finish(4, False)
    assert (it.l1 == 7).all()
    assert len(set(it.mapping._lanes[False].events)) == 2
    it.mapping.close()
    it.exporter.kill()


def file_of(name: str) -> Path:
    """A file by which the stand-in is told what to refuse."""
    return Path(os.environ["CUDA_STANDIN_DIR"], name)


@on_stand_in()
def test_a_driver_that_cannot_start_yet_starts_later() -> None:
    late = file_of("no-start")
    late.touch()
    gpus = Gpus()
    with patch.object(gpus_logger, "handle") as log:
        assert not gpus.available
        with pytest.raises(NoAccessError, match=r"cuInit: .*\(CUDA error 999\).*nvidia-modprobe -u -c 0"):
            _ = gpus.driver
    (line,) = (call.args[0] for call in log.mock_calls)
    assert "nvidia-modprobe" in line.getMessage(), "once"
    late.unlink()
    assert gpus.available


@on_stand_in(devices=2)
def test_a_gpu_whose_context_takes_long_keeps_nobody_from_another() -> None:
    gpus, begun, go_on = Gpus(), threading.Event(), threading.Event()
    retain = gpus.driver.retain_context
    uuids = [gpus.driver.uuid(ordinal) for ordinal in range(2)]

    def retaining(ordinal: int) -> int:
        if ordinal == 0:
            begun.set()
            assert go_on.wait(PATIENCE_S)
        return retain(ordinal)

    gpus.driver.retain_context = retaining  # type: ignore[method-assign]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        slow = pool.submit(gpus.find, uuids[0])
        assert begun.wait(PATIENCE_S)
        try:
            assert pool.submit(gpus.find, uuids[1]).result(PATIENCE_S).ordinal == 1
            assert not slow.done()
        finally:
            go_on.set()
        assert slow.result(PATIENCE_S).ordinal == 0


def pinning(units: int = 2) -> LockedMemory:
    """The locked memory of an L1 of so many units."""
    l1 = host_pages(4096 * units)
    locked = LockedMemory(Gpus(), l1.ctypes.data, l1.nbytes, 4096)
    weakref.finalize(locked, l1.fill, 0)  # which keeps it for as long
    return locked


@on_stand_in(devices=3)
def test_a_gpu_that_gives_no_context_keeps_nothing_from_being_pinned() -> None:
    file_of("no-context-0").touch()
    locked = pinning()
    assert locked.pin_rest()
    assert (locked.pinned_bytes, locked.failure) == (8192, "")
    file_of("no-context-0").unlink()


@on_stand_in()
def test_pinning_is_tried_again_and_a_context_that_is_missing_is_called_so() -> None:
    file_of("no-context-0").touch()
    locked = pinning()
    assert not locked.pin_rest()
    for words in ("cuDevicePrimaryCtxRetain", f"CUDA error {DEVICE_UNAVAILABLE}", "nvidia-smi -c 0"):
        assert words in locked.failure
    assert "memlock" not in locked.failure, "that is no cure for it"
    file_of("no-context-0").unlink()
    assert not locked.pin_rest(), "not before RETRY_S have passed"
    locked._retry_s = 0.0
    assert locked.pin_rest()
    assert locked.failure == ""


@on_stand_in(devices=2)
def test_a_gpu_whose_context_has_failed_pins_nothing_and_is_not_tried_again() -> None:
    locked = pinning(4)
    assert not locked.pin_unit(0)
    driver, tried = locked._gpus.driver, []
    register = driver.register_host

    def registering(address: int, num_bytes: int) -> None:
        tried.append(driver.current_context())
        register(address, num_bytes)

    driver.register_host = registering  # type: ignore[method-assign]
    file_of(f"fail-{os.getpid()}-0").touch()
    assert not locked.pin_unit(1)
    assert not locked.pin_unit(2)
    assert (tried, locked.failure) == ([1, 2, 2], ""), "each time a context, of GPU 0 or 1"
    assert locked._gpus.enter_any().ordinal == 1
    file_of(f"fail-{os.getpid()}-1").touch()
    assert locked.pin_unit(3)
    assert "has failed for this server" in locked.failure
    assert "memlock" not in locked.failure, "that is no cure for it"


@on_stand_in(pin_limit=4096)
def test_what_the_registration_itself_refuses_is_said_to_need_locked_memory() -> None:
    locked = pinning()
    assert not locked.pin_rest()
    assert "memlock=-1" in locked.failure
    assert not locked._gpus.enter_any().lost


@contextlib.contextmanager
def nodes_of_gpus(*nodes: set[int]) -> Iterator[None]:
    """The processors near each GPU."""
    near = lambda bus_id: nodes[int(bus_id.split(":")[1], 16)]  # noqa: E731
    with patch("lmcache_server.transfer.gpus.local_processors", near):
        yield


@on_stand_in(devices=8)
def test_l1_is_spread_over_all_nodes_that_have_a_gpu() -> None:
    """The first four GPUs are on one node, as on most machines with eight."""
    with nodes_of_gpus(*[{0, 1}] * 4, *[{2, 3}] * 4):
        locked = pinning()
        gpus, here = locked._gpus, sorted(os.sched_getaffinity(0))
        assert [gpus.near(number) for number in range(4)] == [{0, 1}, {2, 3}, {0, 1}, {2, 3}]
        gpus.near = lambda number: {here[number % len(here)]}  # type: ignore[method-assign]
        for unit in range(4):
            assert locked.prepare(unit)
            assert os.sched_getaffinity(0) == gpus.near(unit), "a thread moves on with each unit"


@on_stand_in(devices=2)
def test_both_copy_threads_stay_near_their_gpu() -> None:
    here, found = os.sched_getaffinity(0), list[set[int]]()
    it = Mapped(4096, visible="1")

    def work() -> None:
        it.mapping.open()
        later = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        later.start()
        later.join()
        found.append(os.sched_getaffinity(0))
        it.mapping.close()

    with nodes_of_gpus(set(), {0}):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [{0} & here or here] * 2, "a thread starts where the one that starts it may run"
    it.exporter.kill()


@on_stand_in()
def test_a_store_goes_in_small_slices_and_only_a_load_may_be_read_out_of_order() -> None:
    """A small slice lets the engine's own few bytes through soon."""
    it = Mapped(64 * MIB)
    driver = it.gpus.driver
    with it.worker() as submit, patch.object(driver, "batch", side_effect=driver.batch) as batch:
        pieces = it.pieces(*range(0, 64 * MIB, MIB), num_bytes=MIB)
        for load, count in ((False, 8), (True, 2)):
            before = counted().batches
            assert submit(load, lambda: pieces).result(PATIENCE_S).error is None
            assert counted().batches - before == count
            assert [call.kwargs for call in batch.mock_calls] == [{"in_order": not load}], "planned once"
            batch.reset_mock()


@on_stand_in()
def test_a_load_does_not_wait_for_a_store_of_the_same_worker() -> None:
    it, begun, go_on = Mapped(8192), threading.Event(), threading.Event()

    def held() -> Pieces:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return it.pieces(4096)

    with it.worker() as submit:
        store = submit(False, held)
        assert begun.wait(PATIENCE_S)
        assert submit(True, lambda: it.pieces(0)).result(PATIENCE_S).error is None
        assert not store.done()
        go_on.set()
        assert store.result(PATIENCE_S).error is None
        assert set(it.l1[4096:]) == {7}
