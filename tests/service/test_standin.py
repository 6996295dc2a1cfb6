"""The stand-in of CUDA's driver refuses what a driver would: memory, devices, contexts, processes.

See tests/support/standin/cuda.cpp; order is tested in test_standin_order.py.
"""

import ctypes
import mmap
import os
import threading

import numpy as np
import pytest
from standin.child import (
    ALREADY_REGISTERED,
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
from lmcache_server.transfer.base import CopyError
from lmcache_server.transfer.cuda import CudaMapping
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.pins import Pins
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
        mapping.finish(load=False)
    for _ in range(4):
        mapping.copy(slice_, load=False)
    mapping.finish(load=False)
    assert (l1 == 7).all()
    lane = mapping._lanes[False]
    assert len(set(lane.events)) == 2
    mapping.close()
    exporter.kill()
