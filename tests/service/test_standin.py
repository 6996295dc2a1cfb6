"""The stand-in of CUDA's driver refuses what a driver would: memory, devices, contexts, processes.

See tests/support/standin/cuda.cpp; order is tested in test_standin_order.py.
"""

import concurrent.futures
import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
from lmcache_server.transfer.cuda import CudaMapping
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.gpus import logger as gpus_logger
from lmcache_server.transfer.pins import Pins
from lmcache_server.transfer.plan import Pieces
from lmcache_server.transfer.worker import CopyWorker

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


@on_stand_in()
def test_counters_of_the_dead_can_be_read() -> None:
    entered()
    exporter = Exporter()
    exporter.kill()
    assert counted(exporter.process.pid).contexts == 1
    assert counted().contexts == 1


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
    assert [driver.pci_bus_id(ordinal) for ordinal in range(driver.num_devices())] == [
        "00FF:02:00.0",
        "00FF:00:00.0",
    ]


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


# -- what the server does with a driver that fails -------------------------------------------------------


@on_stand_in()
def test_a_slice_whose_event_cannot_be_recorded_costs_no_event() -> None:
    exporter = Exporter()
    l1 = host_pages(4096)
    address = l1.ctypes.data
    gpus = Gpus()
    pins = Pins(gpus, address, 4096, 4096)
    memory = Memory(exporter.process.pid, ((0, MIB),), 0, exporter.uuid, (exporter.handle,))
    mapping = CudaMapping(memory, gpus, pins)
    mapping.open()
    slice_ = Pieces(*(np.array([value], dtype=np.uint64) for value in (address, mapping.bases[0], 4096)))
    record, failing = gpus.driver.record, 3

    def recording(event: int, stream: int) -> None:
        nonlocal failing
        failing -= 1
        if failing >= 0:
            raise CudaError("cuEventRecord", 1, "invalid argument")
        record(event, stream)

    gpus.driver.record = recording  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(CopyError, match="cuEventRecord"):
            mapping.copy(slice_, load=False)
        mapping.finish(0, load=False)
    for _ in range(4):
        mapping.copy(slice_, load=False)
    mapping.finish(4, load=False)
    assert (l1 == 7).all()
    lane = mapping._lanes[False]
    assert len(set(lane.events)) == 2
    mapping.close()
    exporter.kill()


@on_stand_in()
def test_a_driver_that_cannot_start_yet_starts_later() -> None:
    late = Path(os.environ["CUDA_STANDIN_DIR"], "no-start")
    late.touch()
    gpus = Gpus()
    lines: list[logging.LogRecord] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpus_logger, "handle", lines.append)
        assert not gpus.available
        with pytest.raises(NoAccessError, match=r"cuInit: .*\(CUDA error 999\).*nvidia-modprobe -u -c 0"):
            _ = gpus.driver
    assert ["nvidia-modprobe" in line.getMessage() for line in lines] == [True], "once"
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
            assert go_on.wait(60)
        return retain(ordinal)

    gpus.driver.retain_context = retaining  # type: ignore[method-assign]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        slow = pool.submit(gpus.find, uuids[0])
        assert begun.wait(20)
        try:
            assert pool.submit(gpus.find, uuids[1]).result(20).ordinal == 1
            assert not slow.done()
        finally:
            go_on.set()
        assert slow.result(20).ordinal == 0


@on_stand_in(devices=3)
def test_a_gpu_that_gives_no_context_keeps_nothing_from_being_pinned() -> None:
    refusing = Path(os.environ["CUDA_STANDIN_DIR"], "no-context-0")
    refusing.touch()
    l1 = host_pages(8192)
    first = Pins(Gpus(), l1.ctypes.data, 8192, 4096)
    assert first.pin_rest()
    assert (first.pinned_bytes, first.failure) == (8192, "")
    refusing.unlink()


@on_stand_in()
def test_pinning_is_tried_again_and_a_context_that_is_missing_is_called_so() -> None:
    refusing = Path(os.environ["CUDA_STANDIN_DIR"], "no-context-0")
    refusing.touch()
    l1 = host_pages(8192)
    pins = Pins(Gpus(), l1.ctypes.data, 8192, 4096)
    assert not pins.pin_rest()
    assert "cuDevicePrimaryCtxRetain" in pins.failure
    assert f"CUDA error {DEVICE_UNAVAILABLE}" in pins.failure
    assert "nvidia-smi -c 0" in pins.failure
    assert "memlock" not in pins.failure, "that is no cure for it"
    refusing.unlink()
    assert not pins.pin_rest(), "not before RETRY_S have passed"
    pins._retry_s = 0.0
    assert pins.pin_rest()
    assert pins.failure == ""


@on_stand_in(devices=2)
def test_a_gpu_whose_context_has_failed_pins_nothing_and_is_not_tried_again() -> None:
    failing = Path(os.environ["CUDA_STANDIN_DIR"], f"fail-{os.getpid()}-0")
    l1 = host_pages(16384)
    gpus = Gpus()
    pins = Pins(gpus, l1.ctypes.data, 16384, 4096)
    assert pins.pin_unit(0)
    tried, register = [], gpus.driver.register_host

    def registering(address: int, num_bytes: int) -> None:
        tried.append(gpus.driver.current_context())
        register(address, num_bytes)

    gpus.driver.register_host = registering  # type: ignore[method-assign]
    failing.touch()
    assert pins.pin_unit(1)
    assert pins.pin_unit(2)
    assert (tried, pins.failure) == ([1, 2, 2], ""), "each time a context, of GPU 0 or 1"
    assert gpus.enter_any().ordinal == 1
    Path(f"{failing}"[:-1] + "1").touch()
    assert not pins.pin_unit(3)
    assert "has failed for this server" in pins.failure
    assert "memlock" not in pins.failure, "that is no cure for it"


@on_stand_in(pin_limit=4096)
def test_what_the_registration_itself_refuses_is_said_to_need_locked_memory() -> None:
    l1 = host_pages(8192)
    gpus = Gpus()
    pins = Pins(gpus, l1.ctypes.data, 8192, 4096)
    assert not pins.pin_rest()
    assert "memlock=-1" in pins.failure
    assert not gpus.enter_any().lost


@on_stand_in(devices=8)
def test_l1_is_spread_over_all_nodes_that_have_a_gpu() -> None:
    """The first four GPUs are on one node, as on most machines with eight."""
    nodes = [{0, 1}] * 4 + [{2, 3}] * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lmcache_server.transfer.gpus.local_processors",
            lambda bus_id: nodes[int(bus_id.split(":")[1], 16)],
        )
        gpus = Gpus()
        assert [gpus.near(number) for number in range(4)] == [{0, 1}, {2, 3}, {0, 1}, {2, 3}]
        here = os.sched_getaffinity(0)
        patch.setattr(gpus, "near", lambda number: {sorted(here)[number % len(here)]})
        pins = Pins(gpus, 0, 4096, 4096)
        for unit in range(4):
            assert pins.prepare(unit)
            assert os.sched_getaffinity(0) == gpus.near(unit), "a thread moves on with each unit"


@on_stand_in(devices=2)
def test_both_copy_threads_stay_near_their_gpu() -> None:
    exporter = Exporter(visible="1")
    nodes, here = [set[int](), {0}], os.sched_getaffinity(0)
    l1 = host_pages(4096)
    gpus = Gpus()
    memory = Memory(exporter.process.pid, ((0, MIB),), 0, exporter.uuid, (exporter.handle,))
    mapping = CudaMapping(memory, gpus, Pins(gpus, l1.ctypes.data, 4096, 4096))
    found: list[set[int]] = []

    def work() -> None:
        mapping.open()
        later = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        later.start()
        later.join()
        found.append(os.sched_getaffinity(0))
        mapping.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lmcache_server.transfer.gpus.local_processors",
            lambda bus_id: nodes[int(bus_id.split(":")[1], 16)],
        )
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [nodes[1] & here or here] * 2, "a thread starts where the one that starts it may run"
    exporter.kill()


class Loop:
    """The event loop that a copy worker sees."""

    create_future = staticmethod(concurrent.futures.Future)

    def call_soon_threadsafe(self, function: Callable[..., object], *arguments: object) -> None:
        function(*arguments)


@dataclass
class Job:
    load: bool
    build: Callable[[], Pieces]
    reads_bytes: bool = False

    def after(self) -> None:
        """Nothing is left to do."""


@on_stand_in()
def test_a_store_goes_in_small_slices_and_only_a_load_may_be_read_out_of_order() -> None:
    """A small slice lets the engine's own few bytes through soon."""
    exporter = Exporter()
    l1 = host_pages(64 * MIB)
    gpus = Gpus()
    memory = Memory(exporter.process.pid, ((0, MIB),), 0, exporter.uuid, (exporter.handle,))
    mapping = CudaMapping(memory, gpus, Pins(gpus, l1.ctypes.data, 64 * MIB, 64 * MIB))
    worker = CopyWorker("copy", mapping, lambda: True, Loop())  # type: ignore[arg-type]
    opened: Any = worker.opened
    assert opened.result(30).error is None
    orders, copy_batch = [], gpus.driver.copy_batch

    def copying(*arguments: Any, in_order: bool) -> None:
        orders.append(in_order)
        copy_batch(*arguments, in_order=in_order)

    gpus.driver.copy_batch = copying  # type: ignore[method-assign]
    local = l1.ctypes.data + np.arange(64, dtype=np.uint64) * np.uint64(MIB)
    pieces = Pieces(local, np.full_like(local, mapping.bases[0]), np.full_like(local, MIB))
    for load, count in ((False, 8), (True, 2)):
        before = counted().batches
        done: Any = worker.submit(Job(load, lambda: pieces))
        assert done.result(30).error is None
        assert counted().batches - before == count
        assert orders == [not load] * count
        orders.clear()
    ended: Any = worker.close()
    ended.result(30)
    exporter.kill()


@on_stand_in()
def test_a_load_does_not_wait_for_a_store_of_the_same_worker() -> None:
    exporter = Exporter()
    l1 = host_pages(8192)
    gpus = Gpus()
    memory = Memory(exporter.process.pid, ((0, MIB),), 0, exporter.uuid, (exporter.handle,))
    mapping = CudaMapping(memory, gpus, Pins(gpus, l1.ctypes.data, 8192, 8192))
    worker = CopyWorker("copy", mapping, lambda: True, Loop())  # type: ignore[arg-type]
    opened: Any = worker.opened
    assert opened.result(30).error is None
    begun, go_on = threading.Event(), threading.Event()

    def piece(offset: int) -> Pieces:
        places = (l1.ctypes.data + offset, mapping.bases[0] + offset, 4096)
        return Pieces(*(np.array([value], dtype=np.uint64) for value in places))

    def held() -> Pieces:
        begun.set()
        assert go_on.wait(30)
        return piece(4096)

    store: Any = worker.submit(Job(False, held))
    assert begun.wait(30)
    load: Any = worker.submit(Job(True, lambda: piece(0)))
    assert load.result(20).error is None
    assert not store.done()
    go_on.set()
    assert store.result(30).error is None
    assert set(l1[4096:]) == {7}
    ended: Any = worker.close()
    ended.result(30)
    exporter.kill()
