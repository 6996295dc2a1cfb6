"""The copy kernel alone, between device memory and pinned memory, against memmove."""

import mmap

import numpy as np
import pytest
from gpu_engine import allocate

from lmcache_kernels.page_copy import MAX_PIECES, KernelError, PageCopy, compiled

NUM_BYTES = 32 << 20


@pytest.fixture
def kernel(driver):
    try:
        image = compiled(driver.compute_capability(0))
    except KernelError as error:
        pytest.skip(str(error))
    made = PageCopy(driver, driver.load_kernel(image, "page_copy"))
    yield made
    made.close()


@pytest.fixture
def memories(driver):
    """(address on the device, pinned array): both NUM_BYTES."""
    device, _keeper = allocate(NUM_BYTES)
    host = np.frombuffer(mmap.mmap(-1, NUM_BYTES), np.uint8)
    driver.register_host(host.ctypes.data, NUM_BYTES)
    yield device, host
    driver.unregister_host(host.ctypes.data)
    if _keeper is None:
        driver.free(device)


def pieces(random, count, largest):
    """Random pieces, disjoint on both sides, in a random order: (offset at the source, at the destination,
    bytes), with every alignment."""
    sizes = random.integers(1, largest + 1, count)
    places = []
    for _ in range(2):
        gaps = random.integers(0, 40, count)
        order = random.permutation(count)
        ends = np.cumsum((sizes + gaps)[order])
        assert ends[-1] <= NUM_BYTES
        starts = np.empty(count, np.int64)
        starts[order] = ends - sizes[order]
        places.append(starts.astype(np.uint64))
    return places[0], places[1], sizes.astype(np.uint64)


@pytest.mark.parametrize("load", [False, True])
def test_random_pieces_of_launches_that_follow_each_other(driver, kernel, memories, load):
    """More launches than tables: none may see the table of a later one."""
    device, host = memories
    random, stream = np.random.default_rng(3), driver.create_stream()
    content = random.integers(0, 256, NUM_BYTES, dtype=np.uint8)
    for largest, count in ((3000, MAX_PIECES), (200_000, 100), (1, MAX_PIECES)):
        at, to, sizes = pieces(random, count, largest)
        parts = np.array_split(np.arange(count), 12)
        host[:] = content if load else 0
        driver.write(device, bytes(NUM_BYTES) if load else content.tobytes())
        bases = (host.ctypes.data, device) if load else (device, host.ctypes.data)
        for part in parts:
            source, destination = (at[part] + np.uint64(bases[0]), to[part] + np.uint64(bases[1]))
            kernel.launch(source, destination, sizes[part], stream)
        driver.synchronize(stream)
        expected = np.zeros(NUM_BYTES, np.uint8)
        for start, end, size in zip(at.tolist(), to.tolist(), sizes.tolist(), strict=True):
            expected[end : end + size] = content[start : start + size]
        found = np.frombuffer(driver.read(device, NUM_BYTES), np.uint8) if load else host
        assert np.array_equal(found, expected)
    driver.destroy_stream(stream)
