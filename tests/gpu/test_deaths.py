"""Workers and servers that are killed: GPU memory is given back, and who lives goes on."""

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gpu_engine import fused
from harness.processes import ChildProcess
from harness.rawclient import chain
from harness.waiting import PATIENCE_S, wait_until
from test_round_trips import CHUNK_SIZE, restored, stored_prompt, tables
from worker_process import BLOCKS, PAGE_BYTES
from worker_process import CHUNK_SIZE as WORKER_CHUNK_SIZE

HERE = Path(__file__).parent
TIMEOUT_S = PATIENCE_S
KILLS = int(os.environ.get("KILLS", "3"))
READ_ROUNDS = int(os.environ.get("READ_ROUNDS", "10"))


@pytest.fixture
def start_worker(stack):
    def start(server, engine_id):
        command = [sys.executable, str(HERE / "worker_process.py"), server.address, engine_id]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = stack.enter_context(ChildProcess("worker", command, environment, pipes=True))
        assert process.stdout.readline() == b"stored\n"
        return process

    return start


@pytest.mark.parametrize("number", range(KILLS))
def test_a_worker_killed_in_mid_store_is_unmapped_within_a_second(
    server_of_workers, start_worker, start_engine, device_bytes, number
):
    server = server_of_workers
    # The server's context and what it has pinned take device memory, too, and stay.
    first = start_engine(server, fused(PAGE_BYTES, BLOCKS), BLOCKS, f"first-{number}")
    first.worker.close()
    first.scheduler.close()
    server.wait_until(lambda l1: l1["pinned_bytes"] == l1["total_bytes"])
    free_bytes = device_bytes()
    worker = start_worker(server, f"worker-{number}")
    time.sleep(0.05 * number)
    worker.kill()
    server.wait_for_status(lambda status: not status["sessions"])
    server.wait_at_rest()
    # The memory of the dead is free again only when nobody maps it any more.
    what = lambda: f"all but 64 MiB of {free_bytes} bytes are free again; {device_bytes()} are"  # noqa: E731
    wait_until(lambda: device_bytes() >= free_bytes - (64 << 20), 1.0, what, interval_s=0.01)
    # What it had stored is whole.
    heir = start_engine(server, fused(PAGE_BYTES, BLOCKS), BLOCKS, f"heir-{number}")
    keys = chain(range(WORKER_CHUNK_SIZE * 16), WORKER_CHUNK_SIZE)
    found = heir.lookup(keys)
    assert found.resume_tokens == len(keys) * WORKER_CHUNK_SIZE
    expected = [heir.fill(0, block, block) for block in range(1, 17)]
    for block in range(1, 17):
        heir.clear(0, block)
    heir.load(found, keys, [list(range(17, 33))])
    for content, block in zip(expected, range(17, 33), strict=True):
        assert np.array_equal(heir.pages(0, block), content)
    heir.end(found)


def test_a_killed_server_is_replaced_and_the_worker_registers_again(start_server, start_engine):
    server = start_server(chunk_size=CHUNK_SIZE)
    engine = start_engine(server, fused(64 << 10, 32), 32)
    stored_prompt(engine, 3, list(range(1, 32)), 3)
    null = engine.pages(0, 0)
    server.kill()
    server.start()
    wait_until(
        lambda: engine.worker.ready and engine.scheduler.ready and engine.worker.generation > 1,
        TIMEOUT_S,
        "the engine has registered again",
    )
    assert np.array_equal(engine.pages(0, 0), null), "the null block is as it was before the proof"
    keys, pages = stored_prompt(engine, 3, list(range(1, 32)), 3)
    assert restored(engine, keys, pages, tables(engine, 3, list(range(7, 32)))) == 6


def test_a_worker_that_leaves_in_order_leaves_nothing_mapped(start_server, start_engine, device_bytes):
    server = start_server(chunk_size=CHUNK_SIZE)
    first = start_engine(server, fused(64 << 10, 32), 32)
    stored_prompt(first, 2, list(range(1, 32)), 3)
    assert len(server.status()["sessions"]) == 2
    first.worker.close()
    first.scheduler.close()
    server.wait_at_rest()


def test_workers_of_three_processes_at_once(server_of_workers, start_worker, start_engine):
    """Two that store all the time, and one whose pages must be right meanwhile."""
    workers = [start_worker(server_of_workers, f"worker-{number}") for number in range(2)]
    engine = start_engine(server_of_workers, fused(PAGE_BYTES, BLOCKS), BLOCKS, "reader")
    for round_ in range(READ_ROUNDS):
        expected = [engine.fill(0, block, 100 * round_ + block) for block in range(1, 5)]
        own = chain(range(10_000 + round_, 10_000 + round_ + 4 * WORKER_CHUNK_SIZE), WORKER_CHUNK_SIZE)
        assert engine.store_prompt(own, [[1, 2, 3, 4]]).stored == 4
        found = engine.lookup(own)
        assert found.resume_tokens == len(own) * WORKER_CHUNK_SIZE
        engine.load(found, own, [[20, 21, 22, 23]])
        engine.end(found)
        for content, block in zip(expected, range(20, 24), strict=True):
            assert np.array_equal(engine.pages(0, block), content)
    assert not any(worker.popen.poll() for worker in workers)
