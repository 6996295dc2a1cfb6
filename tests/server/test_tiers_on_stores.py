"""Servers with a tier in a real Valkey (alone, or a cluster) or object store, which dies, hangs, returns."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import stores
from harness.exercise import exercise, is_served, new_engine, served
from harness.server import LMCacheServer
from harness.stores import Store
from harness.waiting import wait_until

from lmcache_client.contract.hits import fetch_patience_s

MARGIN_S = 10.0
"""For the rest of an exercise, on a busy machine."""


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, list[Store]]]:
    """A URL, and the processes behind it."""
    with stores.opened(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], LMCacheServer]]:
    for name, value in stores.SECRETS.items():
        monkeypatch.setenv(name, value)
    running = []

    def started(url: str | tuple[str, ...]) -> LMCacheServer:
        running.append(LMCacheServer(l1_size_gb=0.2, tier=url))
        running[-1].start()
        return running[-1]

    yield started
    for server in running:
        server.kill()


@pytest.mark.parametrize("store", stores.KINDS, indirect=True)
def test_what_one_server_stored_another_serves_and_a_clear_reaches_the_store(
    store: tuple[str, list[Store]], start: Callable[[str], LMCacheServer]
) -> None:
    url, _ = store
    one, two = start(url), start(url)
    assert served(one, "one", 1) == 0
    one.wait_until_written()
    assert is_served(two, "two", 1)
    read = two.tier()["read_objects"]
    assert read.pop("read") > 0
    assert not any(read.values())
    # A busy machine may make it too late for a store; it can be repeated.
    wait_until(lambda: two.cli("clear").returncode == 0, 60)
    one.restart()
    assert served(one, "three", 1) == 0, "the store was cleared"


@pytest.mark.parametrize(
    ("store", "way"),
    [("valkey", "killed"), ("valkey", "hangs"), ("cluster", "killed"), ("s3", "hangs"), ("az", "hangs")]
    + [("mooncake", "killed"), ("mooncake", "hangs")],
    indirect=["store"],
)
def test_a_store_that_fails_costs_a_bounded_time_and_is_used_again(
    store: tuple[str, list[Store]], start: Callable[[str], LMCacheServer], way: str
) -> None:
    url, processes = store
    server = start(url)
    assert served(server, "first", 1) == 0
    server.wait_until_written()
    server.restart()
    for process in processes:
        process.signal(signal.SIGKILL if way == "killed" else signal.SIGSTOP)
    engine = new_engine(server.address, "during")
    try:
        # Until the breaker opens, requests wait, but not beyond their limit; all bytes are right.
        for number in range(2, 8):
            began_s = time.monotonic()
            exercise(engine, number)
            assert time.monotonic() - began_s < fetch_patience_s(3 * 256) + MARGIN_S
            if server.tier()["failing"]:
                break
        wait_until(lambda: server.tier()["failing"])
        # From then on nobody waits: a request costs what it costs without a tier.
        waited = server.metrics()["lmcache_tier_wait_seconds_count"]
        for number in range(8, 11):
            exercise(engine, number)
        assert server.metrics()["lmcache_tier_wait_seconds_count"] == waited
        wait_until(lambda: not server.status()["l1"]["reserved_bytes"], 60)
        for process in processes:
            process.restart() if way == "killed" else process.signal(signal.SIGCONT)
        wait_until(lambda: not server.tier()["failing"], 90)
    finally:
        engine.close()
        if way == "hangs":
            for process in processes:
                process.signal(signal.SIGCONT)
    server.kill()
    server.start()
    if way == "hangs":  # what was killed has lost its memory
        assert is_served(server, "after", 1)


@pytest.mark.parametrize("store", ["valkey", "s3"], indirect=True)
def test_a_clean_stop_does_not_wait_for_a_store_that_hangs(
    store: tuple[str, list[Store]], start: Callable[[str], LMCacheServer]
) -> None:
    url, (process,) = store
    server = start(url)
    assert served(server, "before", 1) == 0
    server.wait_until_written()
    process.signal(signal.SIGSTOP)
    try:
        assert served(server, "during", 2) == 0
        assert server.tier()["waiting_objects"]
        ending, server.process = server.process, None
        assert ending is not None
        # Half a minute for the writes, and some seconds for the rest.
        assert ending.stop(45) == 0
        assert "were not written to their tier" in server.log.read_text()
    finally:
        process.signal(signal.SIGCONT)


def test_a_clear_names_the_tiers_that_it_could_not_reach_and_clears_the_others(
    tmp_path: Path, start: Callable[[Any], LMCacheServer]
) -> None:
    directory = tmp_path / "tier"
    with stores.valkey(tmp_path) as store:
        remote = f"valkey://127.0.0.1:{store.port}"
        server = start((f"dir://{directory}?size_gb=1&write=commit", remote))
        assert served(server, "first", 1) == 0
        wait_until(lambda: not any(each["waiting_objects"] for each in server.status()["tiers"]), 60)
        assert list(directory.glob("*/*.kv"))
        store.signal(signal.SIGSTOP)
        try:
            cleared = server.cli("clear", "--json", "--timeout-s", "60")
            assert cleared.returncode == 1
            (failed,) = json.loads(cleared.stdout)["tiers_failed"]
            assert failed.startswith(f"{remote}: ")
            assert "these tiers were not cleared: valkey" in cleared.stderr
            assert not list(directory.glob("*/*.kv")), "the other tier is cleared"
        finally:
            store.signal(signal.SIGCONT)
        wait_until(lambda: server.cli("clear").returncode == 0, 60)
        server.restart()
        assert served(server, "second", 1) == 0


def test_a_store_that_is_not_there_at_the_start_is_a_warning(
    tmp_path: Path, start: Callable[[str], LMCacheServer]
) -> None:
    with stores.valkey(tmp_path) as store:
        store.kill()
        server = start(f"valkey://127.0.0.1:{store.port}")
        assert served(server, "without", 1) == 0
        assert "is tried again" in server.log.read_text()
        store.restart()
        wait_until(lambda: not server.tier()["failing"], 60)
        assert served(server, "with", 2) == 0
        server.wait_until_written()


def test_of_two_tiers_the_second_has_what_the_first_has_lost(
    tmp_path: Path, start: Callable[[Any], LMCacheServer]
) -> None:
    directory = tmp_path / "tier"
    with stores.valkey(tmp_path) as store:
        url = f"dir://{directory}?size_gb=1&write=commit"
        server = start((url, f"valkey://127.0.0.1:{store.port}"))
        for number in range(2):
            assert served(server, f"store {number}", number) == 0
        wait_until(lambda: not any(each["waiting_objects"] for each in server.status()["tiers"]), 60)
        server.kill()
        half = sorted(directory.glob("*/*.kv"))[::2]
        assert half
        for path in half:
            path.unlink()
        server.start()
        for number in range(2):
            assert is_served(server, f"load {number}", number)
        first, second = (each["read_objects"]["read"] for each in server.status()["tiers"])
        # Of a window only the last chunks are fetched.
        assert 0 < second <= len(half)
        assert first > 0
