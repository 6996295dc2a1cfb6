"""/selftest: the real path, whatever the configuration; nothing stays; what is broken is said."""

import asyncio
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import uvloop
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S

from lmcache_server.admin.selftest import SelfTest
from lmcache_server.commands.bench.client import Client, Workload
from lmcache_server.commands.bench.crew import store

STEPS = ["register_s", "store_s", "lookup_s", "load_s", "compare_s", "goodbye_s"]


def leaves_nothing(server):
    server.wait_at_rest()
    status = server.status()
    assert status["namespaces"] == []
    assert status["l1"]["free_bytes"] == status["l1"]["total_bytes"]
    assert status["l1"]["chunks"] == 0


def test_clients_that_come_and_go_start_no_further_test(monkeypatch):
    """The server drops the oldest connection when there are too many."""

    async def both():
        begun, end = [], asyncio.Event()

        async def run(_test):
            begun.append(True)
            await end.wait()
            return {"ok": True}

        monkeypatch.setattr(SelfTest, "_run", run)
        test = SelfTest("ipc:///nowhere", None, lambda _error: None)
        for _ in range(3):
            asked = asyncio.create_task(test.result())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        asked = asyncio.create_task(test.result())
        end.set()
        assert (await asked).code == (await test.result()).code == 200
        assert len(begun) == 1

    uvloop.run(both())


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"host": "127.0.0.1", "checksums": False},
        {"chunk_size": 544, "l1_size_gb": 0.001},
        {"chunk_size": 1},
    ],
    ids=["verify", "tcp", "small", "one token"],
)
def test_a_page_is_stored_and_restored_and_forgotten(flags):
    with LMCacheServer(**{"l1_size_gb": 0.06, **flags}) as server:
        server.wait_until_populated()
        code, report = server.selftest()
        assert (code, report["ok"]) == (200, True), report
        assert [name for name in report if name != "ok"] == STEPS
        assert all(report[name] > 0 for name in STEPS)
        metrics = server.metrics()
        assert metrics['lmcache_selftests_total{outcome="ok"}'] == 1
        assert metrics['lmcache_requests_total{op="goodbye",outcome="ok"}'] == 2
        for direction in ('direction="store"', 'direction="load"'):
            assert metrics[f'lmcache_test_transfer_bytes_total{{{direction},test="selftest"}}'] > 0
            assert metrics[f"lmcache_transfer_bytes_total{{{direction}}}"] == 0
        assert metrics['lmcache_test_objects_total{outcome="stored",test="selftest"}'] > 0
        assert metrics['lmcache_objects_total{outcome="stored"}'] == 0
        assert metrics["lmcache_tokens_requested_total"] == 0, "nor is it part of the hit rate"
        assert server.status()["failures"] == []
        assert "selftest" not in server.log.read_text(), "a probe does not fill the log"
        assert " ended: " not in server.log.read_text()
        leaves_nothing(server)


def test_who_asks_at_the_same_time_or_soon_after_gets_the_same_answer(monkeypatch):
    monkeypatch.setattr("lmcache_server.admin.selftest.KEEP_S", 0.1)
    ended = []

    async def ask(server):
        selftest = SelfTest(server.address, None, ended.append)
        answers = await asyncio.gather(*(selftest.result() for _ in range(8)))
        assert len(set(answers)) == 1
        assert ended == [""]
        await asyncio.sleep(0.1)
        assert await selftest.result() != answers[0]
        assert ended == ["", ""]

    with LMCacheServer(l1_size_gb=0.01) as server:
        uvloop.run(ask(server))


def test_a_client_that_cannot_run_is_said(monkeypatch):
    for program, why in (
        ("/bin/false", "ended with code 1"),
        ("/nowhere", "could not run: [Errno 2]"),
        ("/bin/true", "not print JSON"),
    ):
        monkeypatch.setattr("sys.executable", program)
        ended = []
        answer = uvloop.run(SelfTest("ipc:///nowhere", None, ended.append).result())
        report = json.loads(answer.body)
        assert (answer.code, report["failed"]) == (503, "client")
        assert why in report["error"]
        assert ended == [f"client: {report['error']}"]


def test_a_client_that_does_not_end_is_ended(monkeypatch, tmp_path):
    program = tmp_path / "sleeps"
    pid = tmp_path / "pid"
    program.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr("lmcache_server.admin.selftest.DEADLINE_S", 5.0)

    async def ask():
        answer = await SelfTest("ipc:///nowhere", None, lambda _: None).result()
        async with asyncio.timeout(PATIENCE_S):
            while Path("/proc", pid.read_text().strip()).exists():
                await asyncio.sleep(0.01)
        return json.loads(answer.body)["error"]

    assert "did not end within 5 s" in uvloop.run(ask())


def test_without_room_it_fails_and_says_at_which_step():
    with LMCacheServer(l1_size_gb=0.001) as server:
        server.wait_until_populated()
        engine = RawEngine(server.address, [group(page_bytes=1 << 16, layers=1)], 17).start()
        keys = chain(range(256), 256)
        engine.store_prompt(keys, [list(range(1, 17))])
        assert engine.lookup(keys).lease_id, "all of L1 is leased"
        code, report = server.selftest()
        assert (code, report["ok"], report["failed"]) == (503, False, "store")
        assert report["error"].startswith("the server dropped the store")
        assert server.metrics()['lmcache_selftests_total{outcome="failed"}'] == 1
        test, dropped = server.status()["failures"]
        assert (test["what"], test["sentence"]) == ("self-test failed", f"store: {report['error']}")
        assert (dropped["what"], dropped["count"]) == ("store dropped", 6)
        assert dropped["engine_id"].startswith("lmcache selftest ")
        engine.close()
        server.wait_at_rest()


def test_where_the_kernel_forbids_copies_it_fails(tmp_path):
    """Every process that the server starts is closed to it."""
    (tmp_path / "sitecustomize.py").write_text("import ctypes\nctypes.CDLL(None).prctl(4, 0)\n")
    with LMCacheServer(l1_size_gb=0.01, without_capability=19) as server:  # CAP_SYS_PTRACE
        server.kill()
        server.environment["PYTHONPATH"] = f"{tmp_path}:{server.environment.get('PYTHONPATH', '')}"
        server.start()
        code, report = server.selftest()
        assert (code, report["ok"], report["failed"]) == (503, False, "register")
        assert "kernel.yama.ptrace_scope" in report["error"]
        refused = {each["what"]: each for each in server.status()["failures"]}["register refused"]
        assert refused["sentence"] == report["error"]
        leaves_nothing(server)


def test_what_an_ephemeral_engine_stores_goes_with_the_last_engine_of_its_namespace():
    with LMCacheServer(l1_size_gb=0.1) as server:
        lasting = RawEngine(server.address, [group()], engine_id="lasting").start()
        keys = chain(range(lasting.chunk_size), lasting.chunk_size)
        lasting.store_prompt(keys, [list(range(1, 17))])
        workload = Workload("model", 256, False, 2, 4096, 4, 1)
        with Client(server.address, workload, 1) as second:
            with Client(server.address, workload, 0) as first:
                assert len(list(store(first, 0))) == 2
                mine = [each for each in server.status()["namespaces"] if each["ephemeral"]]
                assert [(each["chunks"], len(each["engines"])) for each in mine] == [(4, 2)]
            assert server.status()["l1"]["chunks"] == 1 + 4, "another engine of the namespace is there"
            assert len(list(store(second, 0))) == 2
            assert server.status()["l1"]["chunks"] == 1 + 8
        server.wait_at_rest(2)
        (namespace,) = server.status()["namespaces"]
        assert (namespace["ephemeral"], namespace["chunks"]) == (False, 1)
        assert server.status()["l1"]["chunks"] == 1
        assert lasting.lookup(keys).resume_tokens == lasting.chunk_size
        lasting.close()


def test_an_ephemeral_engine_that_is_killed_in_mid_store_leaves_nothing():
    with LMCacheServer(l1_size_gb=0.1) as server:
        context = multiprocessing.get_context("spawn")
        for _ in range(2):
            process = context.Process(target=_stores, args=(server.address,))
            process.start()
            server.wait_until(lambda l1: l1["chunks"] > 3)
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            server.wait_until(lambda l1: l1["chunks"] == 0)
            leaves_nothing(server)


def _stores(address):
    with Client(address, Workload("model", 256, True, 8, 1 << 16, 4, 100), 0) as client:
        list(store(client, 0))
