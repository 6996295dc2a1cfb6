"""Copies wait for the compute that was submitted before them, in both directions.

Each test has a twin without the wait, which must see stale or overwritten bytes: what cannot go wrong
proves nothing.
"""

import os
import threading

import pytest
from gpu_engine import GpuEngine, allocate, fused, memset
from harness.rawclient import chain

from lmcache_client.contract.codec import packed
from lmcache_client.contract.keys import ROOT_KEY
from lmcache_client.contract.messages import NONCE_BYTES, Done, Load, Stored, StoreObject
from lmcache_client.memory.cuda import CudaExport

CHUNK_SIZE, PAGE_BYTES, BLOCKS = 16, 64 << 10, 64
ROUNDS = int(os.environ.get("ORDER_ROUNDS", "2000"))
BUSY_BYTES = int(os.environ.get("BUSY_BYTES", str(256 << 20)))
BUSY = int(os.environ.get("BUSY_COUNT", "64"))


class Computing:
    """An engine that has work on its stream whenever it asks for a copy."""

    def __init__(self, engine: GpuEngine, waits: bool) -> None:
        self.engine = engine
        self.waits = waits
        self.scratch, self._keeper = allocate(BUSY_BYTES)

    def keep_busy(self) -> None:
        for _ in range(BUSY):
            memset(self.engine.driver, self.scratch, 0, BUSY_BYTES, self.engine.stream)

    def compute(self, block: int, value: int) -> None:
        """Pages of a block change, in the order of the stream."""
        for region in self.engine.groups[0].regions:
            place = self.engine.address + region.offset + block * region.stride_bytes
            memset(self.engine.driver, place, value, region.page_bytes, self.engine.stream)

    def call(self, message):
        """As the connector sends it: behind the compute; or, to see what that is good for, at once."""
        if self.waits:
            over = threading.Event()
            self.engine.export.after_compute(over.set)
            assert over.wait(30)
        return self.engine.worker.call(message, 30)

    def read(self, block: int) -> set[int]:
        self.engine.driver.synchronize(self.engine.stream)
        return set(self.engine.pages(0, block).tolist())

    def close(self) -> None:
        self.engine.driver.synchronize(self.engine.stream)
        if self._keeper is None:
            self.engine.driver.free(self.scratch)


@pytest.fixture
def computing(start_server, start_engine, stack):
    def start(waits: bool) -> Computing:
        engine = start_engine(
            start_server(chunk_size=CHUNK_SIZE, checksums=False), fused(PAGE_BYTES, BLOCKS), BLOCKS
        )
        it = Computing(engine, waits)
        stack.callback(it.close)
        return it

    return start


def wrong_stores(it: Computing, rounds: int, first: int = 0) -> int:
    """Rounds in which what was stored is not what the step computed."""
    wrong = 0
    for number in range(first, first + rounds):
        (key,) = chain(range(number, number + CHUNK_SIZE), CHUNK_SIZE)
        value = 1 + number % 255
        it.keep_busy()
        it.compute(1, value)
        stored = it.call(_store(key, 1))
        assert isinstance(stored, Stored)
        assert stored.stored == 1
        found = it.engine.lookup([key])
        it.engine.driver.synchronize(it.engine.stream)
        it.engine.load(found, [key], [[2]])
        it.engine.end(found)
        wrong += it.read(2) != {value}
    return wrong


def wrong_loads(it: Computing, rounds: int) -> int:
    """Rounds in which an earlier step, still on its way, reads or overwrites a block that was given to a
    load."""
    wrong = 0
    (key,) = chain(range(CHUNK_SIZE), CHUNK_SIZE)
    it.compute(1, 77)
    it.engine.driver.synchronize(it.engine.stream)
    assert it.call(_store(key, 1)).stored == 1
    for number in range(rounds):
        found = it.engine.lookup([key])
        it.compute(2, 200)
        it.keep_busy()
        # The step before reads the block, and copies what it finds to where the test looks.
        region = it.engine.groups[0].regions[0]
        at, to = (it.engine.address + region.offset + block * region.stride_bytes for block in (2, 3))
        it.engine.driver.copy(to, at, region.page_bytes, it.engine.stream)
        reply = it.call(Load("r", found.lease_id, key, CHUNK_SIZE, 0, (packed((2,)),)))
        assert isinstance(reply, Done), number
        it.engine.end(found)
        it.engine.driver.synchronize(it.engine.stream)
        seen = it.engine.driver.read(to, region.page_bytes)
        wrong += seen != bytes([200]) * region.page_bytes or it.read(2) != {77}
    return wrong


def _store(key, block):
    from lmcache_client.contract.messages import Store

    return Store((StoreObject(key, ROOT_KEY, 0, 0, packed((block,))),))


@pytest.mark.parametrize("wrong", [wrong_stores, wrong_loads])
def test_with_the_wait_no_round_is_wrong(computing, wrong):
    assert wrong(computing(True), ROUNDS // 2) == 0


@pytest.mark.parametrize("wrong", [wrong_stores, wrong_loads])
def test_without_the_wait_rounds_are_wrong(computing, wrong):
    assert wrong(computing(False), 50) > 0, "the order does not matter here, so the other tests show nothing"


def test_a_store_waits_for_the_stream_that_is_current_when_it_is_asked_for(computing):
    """vLLM computes on a stream of torch that need not be the one of its start."""
    it = computing(True)
    for turn in range(3):
        before, it.engine.stream = it.engine.stream, it.engine.driver.create_stream()
        assert wrong_stores(it, 5, 5 * turn) == 0
        it.engine.driver.synchronize(before)
        it.engine.driver.destroy_stream(before)


def test_a_store_waits_for_the_current_stream_of_torch(computing):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no GPU here")
    it = computing(True)
    own, streams = it.engine.stream, [torch.cuda.Stream() for _ in range(2)]
    for turn, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            it.engine.stream = torch.cuda.current_stream().cuda_stream
            assert wrong_stores(it, 20, 20 * turn) == 0
    it.engine.stream = own


def test_a_proof_waits_until_the_allocator_has_cleared_the_memory(driver):
    """The allocator clears it on a stream that nobody else waits for."""
    address, keeper = allocate(BUSY_BYTES)
    stream = driver.create_stream()
    driver.write(address, b"\x77" * NONCE_BYTES)
    for _ in range(BUSY):
        memset(driver, address, 0, BUSY_BYTES, stream)
    export = CudaExport(((address, BUSY_BYTES),), lambda: stream)
    nonce = b"\x01" * NONCE_BYTES
    with export.proving(nonce):
        driver.synchronize(stream)
        assert driver.read(address, NONCE_BYTES) == nonce
    assert driver.read(address, NONCE_BYTES) == bytes(NONCE_BYTES)
    export.close()
    if keeper is None:
        driver.free(address)
