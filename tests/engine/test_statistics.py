"""What vLLM says of the connector: its log line of KV transfers and its Prometheus series."""

import json
import logging
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from harness.engine import Engine
from harness.processes import free_port
from harness.prompts import prompt
from harness.served import served
from harness.server import LMCacheServer
from harness.waiting import wait_until

from lmcache_client.connector.log import REMIND_S, logger
from lmcache_client.connector.offers import Offers
from lmcache_client.connector.request import Asking, Tracked
from lmcache_client.connector.scheduler import SchedulerSide
from lmcache_client.connector.settings import Settings
from lmcache_client.connector.stats import (
    CONNECTED,
    COUNTERS,
    LATE_LOOKUPS,
    LOAD_SECONDS,
    LOADS,
    PREFIX,
    STORED,
    TransferStats,
)
from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_client.server_channel import unsent
from lmcache_client.transport import System

CACHED = prompt(700, 1)


def series(engine: Engine) -> dict[str, int]:
    """The connector's series of the engine, without their prefix; all must exist."""
    metrics = engine.metrics()
    return {name: int(metrics[PREFIX + name]) for name in (*COUNTERS, f"{LOAD_SECONDS}_count")}


def check_stores_and_bytes(server: LMCacheServer, found: dict[str, int]) -> None:
    """The engine counts what the server counts."""
    counts = server.metrics()
    assert found["stored_objects"] == counts['lmcache_objects_total{outcome="stored"}'] > 0
    assert found["loaded_bytes"] == counts['lmcache_transfer_bytes_total{direction="load"}'] > 0


def check_the_last_request_can_be_followed(engine: Engine, server: LMCacheServer) -> None:
    """At debug, by one id in both logs."""
    told = re.findall(r"lmcache: request (\S+): (.*)", engine.log.read_text())
    followed = told[-1][0]
    sentences = [re.sub(r"\d+ objects|job \d+", "n", each) for name, each in told if name == followed]
    assert sentences == [
        "can be resumed at 512 of 512 tokens",
        "loading 512 tokens, n",
        "its load of 512 tokens ended",
        "ended",
    ]
    storing = next(name for name, each in told if each.startswith("storing"))
    # The engine does not wait until the server has heard of the end.
    ended = f"request {followed}: ended"
    wait_until(lambda: ended in server.log.read_text(), what="the server has heard of the request's end")
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert [
        (line.get("hit_tokens"), line.get("direction"))
        for line in lines
        if line.get("request_id") == followed or followed in line.get("request_ids", ())
    ] == [(512, None), (None, "load"), (None, None)]
    stores = [line["request_ids"] for line in lines if line.get("direction") == "store"]
    assert stores == [[storing]], "the request before stored what this one loads"


def test_loads_and_stores_are_in_vllms_log_and_metrics(start_server: Callable[..., LMCacheServer]) -> None:
    server = start_server(log_level="debug", log_format="json")
    # One step stores all.
    with Engine("gemma3", server=server, says_more=True, max_num_batched_tokens=4096) as engine:
        assert set(series(engine).values()) == {0}
        assert PREFIX + CONNECTED not in engine.metrics(), "no step has told it yet"
        engine.run(CACHED)
        assert engine.metrics()[PREFIX + CONNECTED] == 1
        served(engine, CACHED, 512)
        check_the_last_request_can_be_followed(engine, server)
        found = series(engine)
        assert (found["loads"], found["failed_loads"], found["loaded_tokens"]) == (1, 0, 512)
        assert found[f"{LOAD_SECONDS}_count"] == 1
        assert found["dropped_objects"] == found["failed_stores"] == 0
        check_stores_and_bytes(server, found)

        def lines() -> list[str]:
            engine.run(prompt(20, 2))
            return [line for line in engine.log.read_text().splitlines() if "KV Transfer metrics:" in line]

        wait_until(
            lambda: any("loads=1, loaded_tokens=512" in each and "mean_load_ms=" in each for each in lines())
        )
        assert all(line.endswith("connected=1") for line in lines())

        engine.call("kill_server_at_load", pid=server.pid)
        served(engine, CACHED, 0)
        found = series(engine)
        assert (found["loads"], found["failed_loads"], found["loaded_tokens"]) == (1, 1, 512)
        assert found[f"{LOAD_SECONDS}_count"] == 2

        def is_known_to_be_alone() -> bool:
            engine.run(prompt(20, 2))
            return engine.metrics()[PREFIX + CONNECTED] == 0

        wait_until(is_known_to_be_alone, what="the engine says that it has no server", interval_s=0.3)


def test_all_workers_and_both_sides_add_up_in_vllms_multi_connector(server: LMCacheServer) -> None:
    extra = {"lmcache.mp.port": server.port, "lmcache.mp.lookup_timeout_s": 100}
    child = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    multi = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [child]},
    }
    two_ranks = {"multiprocessing": True, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    with Engine("gemma3", server=server, connector=multi, tensor_parallel_size=2, **two_ranks) as engine:
        engine.run(CACHED)
        served(engine, CACHED, 512)
        found = series(engine)
        assert (found["loads"], found["loaded_tokens"]) == (1, 512), "requests count once, not per worker"
        assert found[f"{LOAD_SECONDS}_count"] == 2
        check_stores_and_bytes(server, found)


class FastClock(System):
    """Five minutes of it are a second."""

    def now_s(self) -> float:
        return 300 * super().now_s()


def test_an_engine_without_a_server_says_so_every_ten_minutes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    offers = Offers((GroupSpec(FULL, 16, 0, "", ()),))
    port = free_port()
    scheduler = SchedulerSide(Settings("127.0.0.1", port), "alone", offers, 1, True, True, system=FastClock())
    try:
        scheduler.start()
        reminders = lambda: [each for each in caplog.messages if "has not served this engine" in each]  # noqa: E731
        wait_until(lambda: len(reminders()) >= 2, what="the log has two lines")
        stats = scheduler.take_stats()
        assert stats is not None
        assert stats.to_dict() == {CONNECTED: 0}
    finally:
        scheduler.channel.close()
        logger.removeHandler(caplog.handler)
    minutes = [int(each.split()[2]) for each in reminders()]
    assert all(said >= number * REMIND_S / 60 for number, said in enumerate(minutes, 1))
    assert f"tcp://127.0.0.1:{port}" in reminders()[0]
    assert "lmcache.mp.port" in reminders()[0]
    assert {each.levelno for each in caplog.records if "has not served" in each.message} == {logging.WARNING}


def test_a_lookup_without_an_answer_in_time_is_counted() -> None:
    offers = Offers((GroupSpec(FULL, 16, 0, "", ()),))
    scheduler = SchedulerSide(Settings("127.0.0.1", free_port()), "late", offers, 1, True, True)
    of = SimpleNamespace(request_id="request", lora_request=None, trace_headers=None, cache_salt=None)
    asked = Asking(unsent("the lmcache server did not answer in time"), 0, 16, 0.0)
    assert scheduler.lookups._answered(Tracked(of), asked, 0) is None  # type: ignore[arg-type]
    stats = scheduler.take_stats()
    scheduler.channel.close()
    assert stats is not None
    assert stats.to_dict() == {LATE_LOOKUPS: 1, CONNECTED: 0}


def test_what_is_taken_is_counted_once_and_sums_leave_their_parts_alone() -> None:
    stats = TransferStats()
    stats.count(STORED, 0)
    assert stats.take() is None
    stats.count(STORED, 3)
    stats.observe_load(0.5)
    first = stats.take()
    assert first is not None
    assert first.to_dict() == {STORED: 3, LOAD_SECONDS: [0.5]}
    assert stats.is_empty()
    stats.count(STORED, 1)
    second = TransferStats({LOAD_SECONDS: [1.5], LOADS: 1})
    total = first.aggregate(second).aggregate(second)
    assert total.data == {STORED: 3, LOADS: 2, LOAD_SECONDS: [0.5, 1.5, 1.5]}
    assert first.data == {STORED: 3, LOAD_SECONDS: [0.5]}
    assert total.reduce() == {LOADS: 2, STORED: 3, "mean_load_ms": 1166.667, "max_load_ms": 1500.0}
    assert not TransferStats().reduce()
    latest = total.aggregate(TransferStats({CONNECTED: 0})).aggregate(TransferStats({CONNECTED: 1}))
    assert latest.aggregate(TransferStats({CONNECTED: 1})).data[CONNECTED] == 1, "the latest, not the sum"
