"""The worker side of the connector, whose hooks are called in vLLM's order."""

from collections.abc import Callable
from types import SimpleNamespace

from gpu_engine import GpuEngine
from harness.waiting import PATIENCE_S, wait_until

from lmcache_client.connector.connector import LMCacheMPConnector
from lmcache_client.connector.metadata import StepMetadata
from lmcache_client.connector.worker import WorkerSide
from lmcache_client.contract.geometry import Geometry

TIMEOUT_S = PATIENCE_S


class Hooks:
    """A connector of `engine`, as that of a worker in vLLM; the engine itself looks up."""

    def __init__(self, engine: GpuEngine, address: str, chunk_size: int) -> None:
        self.engine = engine
        side = WorkerSide(
            SimpleNamespace(address=address, load_timeout_s=TIMEOUT_S, servers={}),
            engine.engine_id,
            0,
            engine.model,
            Geometry(engine.groups, engine.num_blocks),
            engine.export,
        )
        self.connector = object.__new__(LMCacheMPConnector)
        self.connector._worker, self.connector._scheduler, self.connector._idle = side, None, False
        self.connector._exported = lambda: (side.client.geometry, engine.exported())
        self.loaded: set[str] = set()
        self.settled: set[int] = set()
        side.start()
        wait_until(lambda: side.channel.ready, TIMEOUT_S, "the worker has joined")
        engine.scheduler.start(TIMEOUT_S, TIMEOUT_S)
        engine.chunk_size = chunk_size
        wait_until(lambda: engine.scheduler.ready, TIMEOUT_S, "the scheduler has joined")

    def step(self, metadata: StepMetadata, forward: Callable[[], None] = lambda: None) -> None:
        self.connector.bind_connector_metadata(metadata)
        forward()
        self.end()

    def end(self) -> None:
        self.connector.wait_for_save()
        self.collect()

    def collect(self) -> None:
        results = self.connector.get_transfer_results(set())
        assert not results.failed_recving
        self.loaded |= results.finished_recving or set()
        if (report := self.connector.build_connector_worker_meta()) is not None:
            self.settled |= report.settled.keys()

    def close(self) -> None:
        self.connector._worker.close()
        self.engine.close()
