"""A worker that the server refuses: only a chunk size that does not fit keeps the engine from starting."""

import logging
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from harness.rawclient import RawEngine, group
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S, wait_until
from msgspec import structs

from lmcache_client import server_channel
from lmcache_client.connector.settings import Settings
from lmcache_client.connector.worker import WorkerSide
from lmcache_client.contract import messages
from lmcache_client.contract.geometry import GroupSpec
from lmcache_client.contract.messages import Memory
from lmcache_client.memory.host import HostExport


class OnGpu(HostExport):
    """Says of its memory that it lies on a GPU, until it has `moved`."""

    moved = False

    def memory(self, pid: int) -> Memory:
        honest = super().memory(pid)
        return honest if self.moved else Memory(pid, ((0, 1 << 20),), 0, b"\xee" * 16, (b"\xee" * 64,))


def test_an_engine_whose_gpu_the_server_cannot_use_starts_uncached_and_is_served_later(
    server: LMCacheServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU that failed, a server without one, process namespaces that differ: an engine that restarts must
    not wait for the server's operator."""
    monkeypatch.setattr(server_channel, "RETRY_REFUSED_S", 0.1)
    monkeypatch.setattr("lmcache_client.connector.worker.CONNECT_S", PATIENCE_S)
    monkeypatch.setattr("vllm.logger.logger.propagate", True)
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", server.runtime_dir)
    raw = RawEngine(server.address, [group()])
    export = OnGpu(raw.export._buffers)
    worker = WorkerSide(Settings(port=server.port), "engine", 0, raw.model, raw.geometry, export)
    try:
        worker.start()
        assert not worker.channel.ready
        wait_until(lambda: "the server sees no GPU" in str(worker.channel.refusal))
        wait_until(lambda: worker.channel._retry_s > 0, what="it asks again")
        lines = [each for each in caplog.records if each.levelno >= logging.WARNING]
        # A busy machine may take the server for one that is not there yet.
        lines = [each for each in lines if "no server at" not in each.getMessage()]
        assert [(each.levelname, each.getMessage()) for each in lines] == [
            ("ERROR", f"lmcache: the lmcache server refused this engine: {worker.channel.refusal}")
        ]
        export.moved = True
        wait_until(lambda: worker.channel.ready, what="the server accepts it")
        assert worker.channel.refusal is None
    finally:
        worker.close()
        raw.close()


def test_only_a_chunk_size_that_does_not_fit_keeps_the_engine_from_starting(
    start_server: Callable[..., LMCacheServer], monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    """Another option of the server mends that. None mends memory, ranks or names that do not fit."""
    server = start_server(chunk_size=256)
    monkeypatch.setattr("lmcache_client.connector.worker.CONNECT_S", PATIENCE_S)
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", server.runtime_dir)

    def refused(name: str, spec: GroupSpec, blocks: int = 0, rank: int = 0, ranks: int = 1) -> str:
        """Starts a worker that registers `blocks` more than its memory has; the code if it is refused."""
        raw = RawEngine(server.address, [spec], rank=rank, tensor_parallel_size=ranks)
        longer = structs.replace(raw.geometry, num_blocks=raw.num_blocks + blocks)
        worker = WorkerSide(Settings(port=server.port), name, rank, raw.model, longer, raw.export)
        stack.callback(worker.close)
        worker.start()
        channel = worker.channel
        wait_until(lambda: channel.ready or channel.refusal is not None, what="an answer")
        return channel.refusal.code if channel.refusal is not None else ""

    assert refused("memory", group(), blocks=1) == messages.BAD_REQUEST
    assert refused("ranks", group(), rank=0, ranks=2) == ""
    assert refused("ranks", group(block_size=32), rank=1, ranks=2) == messages.BAD_REQUEST
    assert refused("name", group()) == ""
    assert refused("name", group()) == messages.ENGINE_ID_TAKEN
    with pytest.raises(ValueError, match="start the server without --chunk-size, or with 320"):
        refused("chunk size", group(block_size=160))


def test_an_engine_that_is_refused_while_it_runs_is_served_when_the_server_fits(
    start_server: Callable[..., LMCacheServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights were named late: vLLM runs already."""
    server = start_server(chunk_size=256)
    monkeypatch.setattr(server_channel, "RETRY_REFUSED_S", 0.1)
    monkeypatch.setattr("lmcache_client.connector.worker.CONNECT_S", PATIENCE_S)
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", server.runtime_dir)
    raw = RawEngine(server.address, [group(block_size=160)])
    worker = WorkerSide(Settings(port=server.port), "engine", 0, raw.model, raw.geometry, raw.export)
    try:
        with pytest.raises(ValueError, match="start the server without --chunk-size"):
            worker.start()
        server.flags["chunk_size"] = 320
        server.restart()
        wait_until(lambda: worker.channel.ready, what="the server accepts it")
    finally:
        worker.close()
        raw.close()
