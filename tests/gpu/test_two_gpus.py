"""One server for the engines of two GPUs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_engine import GpuEngine, fused, loaded
from harness.waiting import wait_until
from test_round_trips import CHUNK_SIZE, restored, stored_prompt, tables

from lmcache_kernels.driver import Driver

PAGE_BYTES, BLOCKS = 64 << 10, 32


class OnGpu(GpuEngine):
    """An engine on GPU number `ordinal`."""

    def __init__(self, address: str, ordinal: int) -> None:
        self.context = loaded().retain_context(ordinal)
        self.enter()
        super().__init__(address, fused(PAGE_BYTES, BLOCKS), BLOCKS, f"on-{ordinal}", self._allocated)

    def enter(self) -> None:
        loaded().enter(self.context)

    @staticmethod
    def _allocated(num_bytes: int) -> tuple[int, None]:
        return loaded().allocate(num_bytes), None

    def pages(self, group_index: int, block: int) -> Any:
        self.enter()
        return super().pages(group_index, block)

    def fill(self, group_index: int, block: int, seed: int) -> Any:
        self.enter()
        return super().fill(group_index, block, seed)

    def clear(self, group_index: int, block: int) -> None:
        self.enter()
        super().clear(group_index, block)

    def close(self) -> None:
        self.enter()
        super().close()


@pytest.fixture
def start_on(stack, driver: Driver) -> Callable[[str, int], OnGpu]:
    if driver.num_devices() < 2:
        pytest.skip("one GPU")
    before = driver.current_context()
    stack.callback(driver.enter, before)

    def start(address: str, ordinal: int) -> OnGpu:
        engine = OnGpu(address, ordinal)
        stack.callback(engine.close)
        engine.start()
        assert engine.worker.ready, engine.states
        return engine

    return start


def test_what_is_stored_on_one_gpu_is_loaded_on_the_other(start_server, start_on, counters):
    server = start_server(chunk_size=CHUNK_SIZE)
    engines = [start_on(server.address, ordinal) for ordinal in range(2)]
    assert len({engine.own_memory().device for engine in engines}) == 2
    for number, (one, other) in enumerate((engines, engines[::-1])):
        keys, pages = stored_prompt(one, 3, list(range(1, 16)), 1000 * (number + 1))
        beside = other.fill(0, 31, 5)
        assert restored(other, keys, pages, tables(other, 3, list(range(16, 30)))) == 6
        assert np.array_equal(other.pages(0, 31), beside)
        # And at home: what was cleared meanwhile.
        assert restored(one, keys, pages, tables(one, 3, list(range(16, 30)))) == 6
    if (counted := counters(server)) is not None:
        assert (counted.mappings, counted.contexts) == (2, 2)


def test_the_end_of_an_engine_on_one_gpu_leaves_the_other_alone(start_server, start_on, counters):
    server = start_server(chunk_size=CHUNK_SIZE)
    first, second = (start_on(server.address, ordinal) for ordinal in range(2))
    keys, pages = stored_prompt(first, 3, list(range(1, 16)), 1)
    first.worker.close()
    server.wait_for_status(lambda status: len(status["sessions"]) == 3)
    assert restored(second, keys, pages, tables(second, 3, list(range(16, 31)))) == 6
    # The copy thread unmaps after the session has ended.
    wait_until(lambda: (counted := counters(server)) is None or counted.mappings == 1)
