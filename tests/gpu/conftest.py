"""Fixtures of the tests that need a GPU, or what stands in for one."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import vllm_stub
from gpu_engine import GpuEngine, Layout, loaded
from harness.server import LMCacheServer

from lmcache_kernels import driver as cuda
from lmcache_kernels.driver import Driver

vllm_stub.install()


def pytest_sessionstart() -> None:
    if cuda.load() is None:
        pytest.exit("no CUDA driver with a GPU: run 'make test-gpu' on a machine that has one", 1)


@pytest.fixture
def driver() -> Driver:
    return loaded()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as entered:
        yield entered


@pytest.fixture
def start_server(stack: ExitStack) -> Callable[..., LMCacheServer]:
    def start(**flags: Any) -> LMCacheServer:
        server = LMCacheServer(**flags)
        if "SERVER_VISIBLE_DEVICES" in os.environ:
            server.environment["CUDA_VISIBLE_DEVICES"] = os.environ["SERVER_VISIBLE_DEVICES"]
        return stack.enter_context(server)

    return start


@pytest.fixture
def server(start_server: Callable[..., LMCacheServer]) -> LMCacheServer:
    return start_server()


@pytest.fixture
def start_engine(stack: ExitStack) -> Callable[..., GpuEngine]:
    def start(server: LMCacheServer, layout: Layout, num_blocks: int, engine_id: str = "engine") -> GpuEngine:
        engine = GpuEngine(server.address, layout, num_blocks, engine_id)
        stack.callback(engine.close)
        engine.start()
        assert engine.worker.ready, engine.states
        return engine

    return start


@pytest.fixture
def server_of_workers(start_server: Callable[..., LMCacheServer]) -> LMCacheServer:
    """With room for all that a worker of `worker_process` stores first, at chunks of one block."""
    return start_server(chunk_size=16, l1_size_gb=1.0)


@pytest.fixture
def device_bytes(driver: Driver) -> Callable[[], int]:
    """Free memory of the GPU, whoever has the rest."""
    return lambda: driver.memory_info()[0]


@pytest.fixture
def counters() -> Callable[[LMCacheServer], Any]:
    """What the stand-in of the driver counts of a server; None on a GPU."""
    directory = os.environ.get("CUDA_STANDIN_DIR")
    if directory is None:
        return lambda _server: None
    import standin

    return lambda server: standin.counters(Path(directory), server.pid)
