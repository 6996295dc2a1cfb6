"""A server that a client has given up, but that lives, writes nothing into the client's memory any more."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from harness.clients import go_on, stop
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import wait_until

from lmcache_client.connector.settings import Settings
from lmcache_client.connector.worker import WorkerSide
from lmcache_client.contract.messages import NONCE_BYTES
from lmcache_client.engine import load_message
from lmcache_client.memory.host import HostExport
from lmcache_client.server_channel import Channel

MIB = 1 << 20
PAGE = 4096
CHUNKS = 256
"""Of a MiB each: several slices of a copy."""


def overwritten() -> int:
    """Pages that a server has written after its client took its memory back: it stood still in a load."""
    with LMCacheServer(l1_size_gb=0.3, chunk_size=256, checksums=False) as server:
        engine = RawEngine(server.address, [group(layers=1, page_bytes=MIB)], 2 * CHUNKS + 2).start()
        keys = chain(range(16 * CHUNKS), 256)
        blocks = list(range(1, CHUNKS + 1))
        engine.memory[:] = 7
        engine.store_prompt(keys, [blocks])
        loaded = [CHUNKS + block for block in blocks]
        target = engine.memory[(CHUNKS + 1) * MIB : (2 * CHUNKS + 1) * MIB]
        for _ in range(20):
            target[:] = 0
            found = engine.lookup(keys)
            key = keys[found.resume_tokens // 256 - 1]
            pending = engine.worker.submit(load_message("r", found, key, 0, engine.groups, [loaded]), 60)
            while not target[::MIB].any() and not pending.done:
                engine.worker.poll()
            stop(server.pid)
            begun = int((target[::MIB] == 7).sum())
            if 0 < begun < CHUNKS:
                break
            go_on(server.pid)
            wait_until(lambda: engine.worker.poll() or pending.settled)  # noqa: B023
        else:
            pytest.fail("the server never stood still in the middle of a load")
        engine.export.take_back()
        target[:] = 99  # what another request computes there
        go_on(server.pid)
        wait_until(lambda: engine.worker.poll() or pending.settled)
        pages = int(np.count_nonzero(target[::PAGE] != 99))
        engine.close()
        return pages


def test_a_server_that_stood_still_in_a_load_goes_on_with_nothing() -> None:
    # It can stand still between its last look at the nonce and the copy, but hardly each time.
    assert not all(overwritten() for _ in range(5))


@contextmanager
def one_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LMCacheServer, WorkerSide]]:
    """A server, and a worker of the connector that has not started yet."""
    with LMCacheServer(l1_size_gb=0.05) as server:
        monkeypatch.setenv("LMCACHE_RUNTIME_DIR", server.runtime_dir)
        raw = RawEngine(server.address, [group()])
        worker = WorkerSide(Settings(port=server.port), "engine", 0, raw.model, raw.geometry, raw.export)
        yield server, worker
        worker.close()
        raw.close()


def joined(worker: WorkerSide) -> None:
    worker.start()
    wait_until(lambda: worker.channel.ready, what="the worker has joined")


def proof(worker: WorkerSide) -> bytes:
    assert isinstance(worker.client.export, HostExport)
    return worker.client.export._proof._bytes.raw


def test_a_worker_without_a_server_has_taken_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = bytes(NONCE_BYTES)
    with one_worker(monkeypatch) as (server, worker):
        joined(worker)
        assert proof(worker) != nothing
        stop(server.pid)
        with worker.channel._lock:
            worker.channel._break("as if it had not answered everything")
        wait_until(lambda: proof(worker) == nothing)
        go_on(server.pid)
        wait_until(lambda: worker.channel.ready, what="the worker proves its memory again")
        assert proof(worker) != nothing


def test_a_worker_that_closes_while_its_server_stands_still_takes_its_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with one_worker(monkeypatch) as (server, worker):
        joined(worker)
        stop(server.pid)
        worker.close()
        assert proof(worker) == bytes(NONCE_BYTES)
        go_on(server.pid)


@pytest.mark.parametrize("named_in_its_sleep", [False, True])
def test_an_engine_that_wakes_joins_once_and_only_when_its_weights_have_a_name(
    monkeypatch: pytest.MonkeyPatch, named_in_its_sleep: bool
) -> None:
    weights = (("weights", "a digest"),)
    with one_worker(monkeypatch) as (_, worker):
        started, start = list[Channel](), Channel.start
        monkeypatch.setattr(
            Channel, "start", lambda channel, *times: (started.append(channel), start(channel, *times))
        )
        worker.sleep()
        if named_in_its_sleep:
            worker.start(weights)
        worker.wake(worker.client.export)
        if not named_in_its_sleep:
            assert not started
            worker.start(weights)
        wait_until(lambda: worker.channel.ready, what="the worker has joined")
        assert started == [worker.channel]
        assert worker.client.model.details[-1:] == weights


@pytest.mark.parametrize("stands_still", [False, True])
def test_a_server_that_does_not_give_memory_back_in_time_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stands_still: bool
) -> None:
    """An engine that sleeps frees memory that the server may still have."""
    monkeypatch.setattr("vllm.logger.logger.propagate", True)
    monkeypatch.setattr("lmcache_client.connector.worker.GIVE_BACK_S", 0.5 if stands_still else 60.0)
    with one_worker(monkeypatch) as (server, worker):
        joined(worker)
        if stands_still:
            stop(server.pid)
        worker.sleep()
        go_on(server.pid)
        said = [
            each.getMessage()
            for each in caplog.records
            if "gave this engine's memory back" in each.getMessage()
        ]
        assert len(said) == stands_still
        assert all(f"the server at {server.address} has not confirmed" in each for each in said)
