"""Streams of the stand-in of CUDA's driver: who does not wait sees stale bytes, and what is lost stays lost.

See tests/support/standin/cuda.cpp.
"""

import ctypes
import os
import time
from pathlib import Path

import numpy as np
import pytest
from standin.child import (
    ILLEGAL_ADDRESS,
    INVALID_IMAGE,
    INVALID_VALUE,
    LATE,
    MIB,
    batch,
    counted,
    device_byte,
    entered,
    filled,
    host_pages,
    keep_busy,
    memset,
    on_stand_in,
    pinned,
    refused,
)

from lmcache_kernels.driver import CudaError, Driver
from lmcache_kernels.page_copy import PageCopy, compiled

STREAM_ORDER, DURING_CALL, ANY_ORDER = 1, 2, 3


def at_work(num_bytes: int = MIB, value: int = 9) -> tuple[Driver, int, np.ndarray, int]:
    """The driver, memory of the device that is filled, as much pinned memory, and a stream."""
    driver = entered()
    return driver, filled(driver, num_bytes, value), pinned(driver, num_bytes), driver.create_stream()


class Kernel(PageCopy):
    def __init__(self, driver: Driver) -> None:
        super().__init__(driver, driver.load_kernel(compiled("90"), "page_copy"))

    def run(self, source: int, target: int, num_bytes: int, stream: int) -> None:
        """Copies a page."""
        self.launch(*(np.array([each], np.uint64) for each in (source, target, num_bytes)), stream)


@on_stand_in(delay_us=LATE)
def test_who_does_not_wait_sees_stale_bytes_and_who_waits_the_right_ones() -> None:
    driver, source, target, stream = at_work()
    event = driver.create_event()
    for value in (1, 2):
        keep_busy(driver, stream)
        memset(driver, source, value, MIB, stream)
        driver.copy(target.ctypes.data, source, MIB, stream)
        assert (target == value - 1).all()
        if value == 1:
            driver.synchronize(stream)
        else:
            driver.record(event, stream)
            driver.wait_for(event)
        assert (target == value).all()
    assert counted().copies == 2
    # The default stream is not ordered with others.
    driver.write(source, bytes([9]) * MIB)
    keep_busy(driver, 0)
    memset(driver, source, 1, MIB, 0)
    driver.copy(target.ctypes.data, source, MIB, stream)
    driver.synchronize(stream)
    assert (target == 9).all()
    driver.synchronize(0)
    assert device_byte(source) == 1
    with refused(INVALID_VALUE):  # Streams that would be ordered with it.
        driver._out("cuStreamCreateWithPriority", ctypes.c_void_p, 0, 0)


@on_stand_in(delay_us=LATE)
def test_a_write_from_pageable_memory_returns_before_it_is_on_the_device_and_a_source_may_change() -> None:
    driver = entered()
    device, data = filled(driver, MIB, 1), host_pages(MIB)
    early = 0
    for _ in range(10):
        driver.write(device, bytes([1]) * MIB)
        data[:] = 2
        driver._call("cuMemcpyHtoDAsync_v2", device, data.ctypes.data, MIB, 0)
        early += device_byte(device) == 1
        data[:] = 3
        driver.synchronize(0)
        assert driver.read(device, MIB) == bytes([2]) * MIB, "what was there when it was called"
    assert early > 0
    # A source that changes during a copy gives a mix.
    source, target, stream = pinned(driver, 16 * MIB), driver.allocate(16 * MIB), driver.create_stream()
    mixed = 0
    for value in range(1, 6):
        driver.write(target, b"\xff")
        driver.copy(target, source.ctypes.data, 16 * MIB, stream)
        while device_byte(target) == 255:
            pass
        source[:] = value
        driver.synchronize(stream)
        mixed += len(set(driver.read(target, 16 * MIB))) > 1
    assert mixed > 0


@on_stand_in(delay_us=LATE)
def test_what_a_destroyed_stream_still_has_is_done_and_so_is_a_destroyed_event() -> None:
    driver, source, target, stream = at_work()
    event, last = driver.create_event(), driver.create_event()
    keep_busy(driver, stream)
    driver.copy(target.ctypes.data, source, MIB, stream)
    driver.record(event, stream)
    driver.record(last, stream)
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    assert not target.any()
    driver.wait_for(last)
    assert (target == 9).all()


@on_stand_in(delay_us=LATE)
def test_a_batch_reads_its_arrays_at_once_and_its_sources_in_the_order_it_was_told() -> None:
    driver, device, host, stream = at_work(2 * MIB)
    at = host.ctypes.data
    for order, found in ((STREAM_ORDER, 5), (DURING_CALL, 1), (ANY_ORDER, 1)):
        zeros, fives = filled(driver, 2 * MIB, 0), filled(driver, 2 * MIB, 5)
        driver.copy(device, zeros, 2 * MIB, stream)
        driver.synchronize(stream)
        host[:] = 1
        keep_busy(driver, stream)
        driver.copy(at, fives, 2 * MIB, stream)
        assert batch(driver, [(device + to, at + to, MIB) for to in (0, MIB)], stream, order) == 0
        assert device_byte(device) == 0, "the destination is written in the order of the stream"
        driver.synchronize(stream)
        assert driver.read(device, 2 * MIB) == bytes([found]) * (2 * MIB)
    assert (counted().batches, counted().batched) == (3, 6)
    # The driver of the product asks for the order that a load or a store may have.
    target, source, length = (np.array([each], np.uint64) for each in (device, at, 4096))
    for in_order, found in ((True, 9), (False, 5)):
        host[:] = 5
        keep_busy(driver, stream)
        driver.batch(target, source, length, in_order=in_order)(0, len(length), stream)
        host[:] = 9
        driver.synchronize(stream)
        assert set(driver.read(device, 4096)) == {found}


@on_stand_in()
def test_a_wrong_batch_is_refused_and_copies_nothing_and_says_which_copy_is_wrong() -> None:
    driver, device, host, stream = at_work(value=5)
    good = (device, host.ctypes.data, 4096)
    for pieces, where, order, first in (
        ([good], 0, STREAM_ORDER, 0),
        ([good], stream, 0, 0),
        ([good], stream, 4, 0),
        ([good], stream, STREAM_ORDER, 1),
        ([], stream, STREAM_ORDER, 0),
        ([good, (device, host.ctypes.data, 0)], stream, STREAM_ORDER, 0),
        ([good, (device, host_pages(MIB).ctypes.data, 1)], stream, STREAM_ORDER, 0),
        ([good, (device + 2 * MIB, 0, 1)], stream, STREAM_ORDER, 0),
    ):
        assert batch(driver, pieces, where, order, first) == INVALID_VALUE
    driver.synchronize(stream)
    assert driver.read(device, MIB) == bytes([5]) * MIB
    source, length = np.full(3, host.ctypes.data, np.uint64), np.full(3, 4096, np.uint64)
    nowhere = 4096  # what lies behind the device's memory, the system decides
    target = np.array([device, device + 4096, nowhere], np.uint64)
    with pytest.raises(CudaError, match=r"^cuMemcpyBatchAsync \(copy 2 of 3\): invalid argument"):
        driver.batch(target, source, length)(0, len(length), stream)
    with pytest.raises(CudaError, match=r"^cuMemcpyBatchAsync: invalid argument"):
        driver.batch(target, source, length)(0, len(length), 0)


@on_stand_in(version=12070)
def test_an_older_driver_has_no_batches() -> None:
    assert (Driver().version(), Driver()._batch) == (12070, None)


@on_stand_in()
def test_batches_can_be_turned_off() -> None:
    assert Driver()._batch is not None
    os.environ["LMCACHE_MP_BATCHED_COPIES"] = "0"
    driver, device, host, stream = at_work()
    host[: 2 * 4096] = 3
    places = np.array([0, 4096], np.uint64)
    target, source = places + np.uint64(device), places + np.uint64(host.ctypes.data)
    before = counted()
    driver.batch(target, source, np.full(2, 4096, np.uint64))(0, 2, stream)
    driver.synchronize(stream)
    assert (counted().batches - before.batches, counted().copies - before.copies) == (0, 2)
    assert driver.read(device, 2 * 4096) == bytes([3]) * 2 * 4096


@on_stand_in(delay_us=LATE)
def test_the_kernel_reads_its_table_and_its_pages_when_it_runs() -> None:
    driver, device, host, stream = at_work()
    kernel = Kernel(driver)
    keep_busy(driver, stream)
    memset(driver, device, 4, MIB, stream)
    kernel.run(device, host.ctypes.data + 3, 70_000, stream)
    assert not host.any()
    driver.synchronize(stream)
    assert (host[3:70_003] == 4).all()
    assert not host[:3].any()
    assert not host[70_003:].any()
    assert counted().launches == 1
    with refused(INVALID_IMAGE):
        driver.load_kernel(b"\x7fELF", "page_copy")


# -- what is lost stays lost ------------------------------------------------------------------------------


def assert_lost(driver: Driver, stream: int) -> None:
    for call in (
        lambda: driver.synchronize(stream),
        lambda: driver.allocate(MIB),
        driver.create_event,
        lambda: driver.unregister_host(0),
        lambda: driver.close_handle(0),
    ):
        with refused(ILLEGAL_ADDRESS):
            call()


def kernel_loses(is_pinned: bool) -> None:
    driver, device, _, stream = at_work()
    host, kernel = host_pages(MIB), Kernel(driver)
    if is_pinned:
        driver._call("cuMemHostRegister_v2", host.ctypes.data, MIB, 0)
        driver.copy(host.ctypes.data, device, 4096, stream)
        driver.synchronize(stream)
    kernel.run(device, host.ctypes.data + 4096, 4096, stream)
    with refused(ILLEGAL_ADDRESS):
        driver.synchronize(stream)
    assert not host[4096:].any()
    assert_lost(driver, stream)


@on_stand_in()
def test_a_kernel_that_reaches_what_is_not_pinned_loses_the_context() -> None:
    kernel_loses(is_pinned=False)


@on_stand_in()
def test_a_kernel_that_reaches_what_is_pinned_for_copies_alone_loses_the_context() -> None:
    kernel_loses(is_pinned=True)


@on_stand_in()
def test_a_kernel_whose_table_is_not_on_the_device_loses_the_context() -> None:
    driver, device, _, stream = at_work()
    function = driver.load_kernel(compiled("90"), "page_copy")
    table = np.array([device, device + 4096, 4096], np.uint64)
    plain = map(ctypes.c_uint, (1, 1, 4096))
    driver.launch(function, 1, 32, stream, ctypes.c_ulonglong(table.ctypes.data), *plain)
    assert_lost(driver, stream)


@on_stand_in(delay_us=LATE)
def test_memory_that_goes_while_a_copy_waits_loses_the_context() -> None:
    driver, device, host, stream = at_work()
    keep_busy(driver, stream)
    driver.copy(host.ctypes.data, device, MIB, stream)
    driver.unregister_host(host.ctypes.data)
    event = driver.create_event()
    driver.record(event, stream)
    with refused(ILLEGAL_ADDRESS):
        driver.wait_for(event)
    assert not host.any()
    assert_lost(driver, stream)


@on_stand_in(delay_us=LATE)
def test_a_file_loses_the_context_and_what_waits_is_not_done() -> None:
    driver, device, host, stream = at_work()
    keep_busy(driver, stream)
    driver.copy(host.ctypes.data, device, MIB, stream)
    Path(os.environ["CUDA_STANDIN_DIR"], f"fail-{os.getpid()}").touch()
    assert_lost(driver, stream)
    time.sleep(0.6)
    assert not host.any()
