"""The connector's worker side on a GPU: when a step's loads start, seen from the engine's stream."""

from collections import Counter

import pytest
import virtual_memory
from gpu_engine import GpuEngine, allocate, fused, memset
from harness.rawclient import chain
from harness.waiting import wait_until
from virtual_memory import VirtualMemory

pytest.importorskip("torch")

from hooks import TIMEOUT_S, Hooks

from lmcache_client.connector.metadata import LoadJob, StepMetadata, StoreJob
from lmcache_client.contract.codec import packed
from lmcache_client.contract.keys import ROOT_KEY
from lmcache_client.contract.messages import Load, Store, StoreObject

CHUNK_SIZE, PAGE_BYTES, BLOCKS = 16, 64 << 10, 64
SCRATCH, SOURCE, LOADED = 1, 2, 3


class Steps(Hooks):
    """`bind` is followed by the forward pass, and `end` comes behind it."""

    def memset(self, block: int, value: int) -> None:
        for region in self.engine.groups[0].regions:
            place = self.engine.address + region.offset + block * region.stride_bytes
            memset(self.engine.driver, place, value, region.page_bytes, self.engine.stream)

    def zero(self, block: int) -> None:
        """Behind other work, so that it is late."""
        for _ in range(200):
            self.memset(SCRATCH, 1)
        self.memset(block, 0)

    def load(self, number: int, key: bytes, block: int) -> None:
        """A step with one load. Its forward pass goes on until the load has ended."""
        found = self.engine.lookup([key])
        assert found.resume_tokens == CHUNK_SIZE
        name = f"request {number}"
        self.zero(block)
        message = Load(name, found.lease_id, key, CHUNK_SIZE, 0, (packed((block,)),))
        self.connector.bind_connector_metadata(StepMetadata([LoadJob(number, name, message)]))

        def is_loaded() -> bool:
            self.memset(SCRATCH, 2)
            self.collect()
            return name in self.loaded

        wait_until(is_loaded, TIMEOUT_S, "the load has ended, during the forward pass of its step", 0.001)
        self.end()
        self.engine.end(found)

    def read(self, block: int) -> set[int]:
        self.engine.driver.synchronize(self.engine.stream)
        return set(self.engine.pages(0, block).tolist())

    def store(self, number: int, key: bytes, block: int, value: int) -> None:
        """A step with one store, behind slow compute."""
        job = StoreJob(number, Store((StoreObject(key, ROOT_KEY, 0, 0, packed((block,))),)))
        self.connector.bind_connector_metadata(StepMetadata(stores=[job]))
        for _ in range(200):
            self.memset(SCRATCH, 1)
        self.memset(block, value)
        self.end()
        stored = lambda: self.engine.lookup([key]).resume_tokens == CHUNK_SIZE  # noqa: E731
        wait_until(lambda: (self.collect(), stored())[1], TIMEOUT_S, "the page is stored")


@pytest.fixture
def server(start_server):
    return start_server(chunk_size=CHUNK_SIZE)


@pytest.fixture
def allocator():
    return allocate


@pytest.fixture
def steps(server, stack, allocator):
    engine = GpuEngine(server.address, fused(PAGE_BYTES, BLOCKS), BLOCKS, allocate=allocator)
    if isinstance(engine._keeper, VirtualMemory):
        stack.callback(engine._keeper.close)
    one = Steps(engine, server.address, CHUNK_SIZE)
    stack.callback(one.close)
    return one


def test_a_load_waits_for_zeroing_but_not_for_the_forward_pass_of_its_step(steps):
    (key,) = chain(range(CHUNK_SIZE), CHUNK_SIZE)
    steps.store(1, key, SOURCE, 77)
    for number in range(2, 12):
        steps.load(number, key, LOADED + number)
        assert steps.read(LOADED + number) == {77}, "zeroed after the load, or stored before the compute"


@pytest.mark.parametrize("allocator", [virtual_memory.allocate])
def test_an_engine_that_sleeps_gives_its_memory_back_and_is_served_when_it_wakes(
    steps, server, counters, device_bytes
):
    first, second = chain(range(2 * CHUNK_SIZE), CHUNK_SIZE)
    steps.store(1, first, SOURCE, 77)
    memory, awake_bytes = steps.engine._keeper, device_bytes()
    steps.connector.restore_kv_caches()
    for _ in range(2):
        steps.connector.unregister_kv_caches()
    if (counted := counters(server)) is not None:
        assert (counted.mappings, counted.reservations, counted.handles) == (0, 0, 0), "before vLLM frees it"
    memory.sleep()
    wait_until(lambda: device_bytes() >= awake_bytes + memory.num_bytes, TIMEOUT_S, "the memory is free")
    # A step of nobody's, as data-parallel engines make it.
    steps.connector.bind_connector_metadata(StepMetadata())
    steps.end()
    memory.wake()
    for _ in range(2):
        steps.connector.restore_kv_caches()
    wait_until(lambda: steps.connector._worker.channel.ready, TIMEOUT_S, "the worker has joined again")
    wait_until(lambda: steps.engine.scheduler.ready, TIMEOUT_S, "the scheduler has joined again")
    steps.load(2, first, LOADED)
    assert steps.read(LOADED) == {77}, "loaded into the memory that it has now"
    steps.store(3, second, SOURCE, 78)
    steps.load(4, second, LOADED)
    assert steps.read(LOADED) == {78}, "stored from the memory that it has now"


@pytest.mark.parametrize("allocator", [virtual_memory.allocate])
def test_an_engine_that_sleeps_often_leaves_no_streams_and_events(steps, monkeypatch):
    (key,) = chain(range(CHUNK_SIZE), CHUNK_SIZE)
    driver, left = steps.engine.driver, Counter()
    for what in ("stream", "event"):
        for name, number in ((f"create_{what}", 1), (f"destroy_{what}", -1)):
            call = getattr(driver, name)

            def counted(*handle, what=what, call=call, number=number):
                left[what] += number
                return call(*handle)

            monkeypatch.setattr(driver, name, counted)
    for number in range(3):
        steps.connector.unregister_kv_caches()
        steps.engine._keeper.sleep()
        steps.engine._keeper.wake()
        steps.connector.restore_kv_caches()
        wait_until(lambda: steps.engine.scheduler.ready, TIMEOUT_S, "the scheduler has joined again")
        steps.store(number, key, SOURCE, 77)
    steps.connector.unregister_kv_caches()
    assert left["stream"] == -1, "that of the first registration, which was not counted"
    assert left["event"] <= 0


@pytest.mark.parametrize("allocator", [virtual_memory.allocate])
def test_what_has_not_left_when_an_engine_falls_asleep_ends(steps):
    """Its blocks would be held for ever, and a request would wait for its load for ever."""
    (key,) = chain(range(CHUNK_SIZE), CHUNK_SIZE)
    connector, driver = steps.connector, steps.engine.driver
    job = StoreJob(1, Store((StoreObject(key, ROOT_KEY, 0, 0, packed((SOURCE,))),)))
    load = LoadJob(2, "request 2", Load("request 2", 1, key, CHUNK_SIZE, 0, (packed((LOADED,)),)))
    late = LoadJob(3, "request 3", Load("request 3", 1, key, CHUNK_SIZE, 0, (packed((LOADED,)),)))
    connector.bind_connector_metadata(StepMetadata([load], [job]))
    for _ in range(200):
        steps.memset(SCRATCH, 1)
    connector.wait_for_save()
    connector.unregister_kv_caches()
    driver.synchronize(steps.engine.stream)
    connector.bind_connector_metadata(StepMetadata([late]))
    steps.engine._keeper.sleep()
    steps.engine._keeper.wake()
    connector.restore_kv_caches()
    loaded, failed, settled = set(), set(), set()

    def ended() -> bool:
        results = connector.get_transfer_results(set())
        loaded.update(results.finished_recving)
        failed.update(results.failed_recving)
        report = connector.build_connector_worker_meta()
        settled.update(report.settled if report is not None else ())
        return settled == {1, 2, 3}

    wait_until(ended, TIMEOUT_S, "all jobs are settled")
    assert loaded == failed == {"request 2", "request 3"}
