"""Servers with a tier in a real Valkey (alone, or a cluster) or object store, which dies, hangs, returns, or
is behind a bad network: it costs time and never a byte."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import stores
from harness.exercise import exercise, is_served, new_engine, served
from harness.proxy import Proxy
from harness.server import LMCacheServer
from harness.stores import Store
from harness.waiting import wait_until


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, list[Store]]]:
    """A URL, and the processes behind it."""
    with stores.opened(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture
def start(
    monkeypatch: pytest.MonkeyPatch, start_server: Callable[..., LMCacheServer]
) -> Callable[..., LMCacheServer]:
    """Called with the URLs of tiers, starts a server that knows the secrets of all stores."""
    for name, value in stores.SECRETS.items():
        monkeypatch.setenv(name, value)
    return lambda *urls: start_server(l1_size_gb=0.1, tier=urls)


@pytest.mark.parametrize("store", stores.KINDS, indirect=True)
def test_what_one_server_stored_another_serves_and_a_clear_reaches_the_store(
    store: tuple[str, list[Store]], start: Callable[..., LMCacheServer]
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
    wait_until(lambda: two.cli("clear", "--tiers").returncode == 0, 60)
    one.restart()
    assert served(one, "three", 1) == 0, "the store was cleared"


@pytest.mark.parametrize(
    ("store", "way"),
    [("valkey", "killed"), ("s3", "hangs"), pytest.param("mooncake", "hangs", marks=pytest.mark.long)],
    indirect=["store"],
)
def test_a_store_that_fails_costs_time_until_it_is_left_alone_and_is_used_again(
    store: tuple[str, list[Store]], start: Callable[..., LMCacheServer], way: str
) -> None:
    url, processes = store
    server = start(url)
    assert served(server, "first", 1) == 0
    server.wait_until_written()
    server.restart()
    engine = new_engine(server.address, "during")
    with contextlib.ExitStack() as failing:
        for process in reversed(processes):  # the first is the first to come back
            failing.enter_context(process.failing(way))
        # Until the breaker opens, requests wait, and all bytes are right. The simulation shows how long they
        # may wait, by its own clock.
        for number in range(2, 8):
            exercise(engine, number)
            if server.tier()["failing"]:
                break
        wait_until(lambda: server.tier()["failing"])
        # From then on nobody waits: a request costs what it costs without a tier.
        waited = server.metrics()["lmcache_tier_wait_seconds_count"]
        for number in range(8, 11):
            exercise(engine, number)
        assert server.metrics()["lmcache_tier_wait_seconds_count"] == waited
        wait_until(lambda: not server.status()["l1"]["reserved_bytes"], 60)
    wait_until(lambda: not server.tier()["failing"], 90)
    engine.close()
    server.kill()
    server.start()
    if way == "hangs":  # what was killed has lost its memory
        assert is_served(server, "after", 1)


@pytest.mark.parametrize("store", ["valkey"], indirect=True)
def test_a_clean_stop_does_not_wait_for_a_store_that_hangs(
    store: tuple[str, list[Store]], start: Callable[..., LMCacheServer]
) -> None:
    url, (process,) = store
    server = start(url)
    assert served(server, "before", 1) == 0
    server.wait_until_written()
    with process.failing("hangs"):
        assert served(server, "during", 2) == 0
        assert server.tier()["waiting_objects"]
        assert server.terminate() == 0
        server.wait_for_log("were not written to their tier")


def test_a_clear_names_the_tiers_that_it_could_not_reach_and_clears_the_others(
    tmp_path: Path, start: Callable[..., LMCacheServer]
) -> None:
    directory = tmp_path / "tier"
    with stores.valkey(tmp_path) as store:
        remote = f"valkey://127.0.0.1:{store.port}"
        server = start(f"dir://{directory}?size_gb=1&write=commit", remote)
        assert served(server, "first", 1) == 0
        wait_until(lambda: not any(each["waiting_objects"] for each in server.status()["tiers"]), 60)
        assert list(directory.glob("*/*.kv"))
        with store.failing("hangs"):
            cleared = server.cli("clear", "--tiers", "--json", "--timeout-s", "60")
            assert cleared.returncode == 1
            (failed,) = json.loads(cleared.stdout)["tiers_failed"]
            assert failed.startswith(f"{remote}: ")
            assert "these tiers were not cleared: valkey" in cleared.stderr
            assert not list(directory.glob("*/*.kv")), "the other tier is cleared"
        wait_until(lambda: server.cli("clear", "--tiers").returncode == 0, 60)
        server.restart()
        assert served(server, "second", 1) == 0


def test_a_store_that_is_not_there_at_the_start_is_a_warning(
    tmp_path: Path, start: Callable[..., LMCacheServer]
) -> None:
    with stores.valkey(tmp_path) as store:
        store.kill()
        server = start(f"valkey://127.0.0.1:{store.port}")
        assert served(server, "without", 1) == 0
        server.wait_for_log("is tried again")
        store.restart()
        wait_until(lambda: not server.tier()["failing"], 60)
        assert served(server, "with", 2) == 0
        server.wait_until_written()


def test_of_two_tiers_the_second_has_what_the_first_has_lost(
    tmp_path: Path, start: Callable[..., LMCacheServer]
) -> None:
    directory = tmp_path / "tier"
    with stores.valkey(tmp_path) as store:
        url = f"dir://{directory}?size_gb=1&write=commit"
        server = start(url, f"valkey://127.0.0.1:{store.port}")
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


# -- a network that cuts connections in the middle of a record, or delays them ---------------------------


@pytest.fixture(params=["valkey", "s3"])
def through(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LMCacheServer, Proxy]]:
    """A server that has written a prompt to a store behind the proxy, and was started again."""
    for name, value in stores.SECRETS.items():
        monkeypatch.setenv(name, value)
    store = stores.valkey(tmp_path) if request.param == "valkey" else stores.seaweedfs(tmp_path)
    with store, Proxy(store.port) as proxy:
        address = f"127.0.0.1:{proxy.port}"
        objects = f"s3://records?allow_http=1&endpoint=http://{address}"
        url = f"valkey://{address}" if request.param == "valkey" else objects
        with LMCacheServer(l1_size_gb=0.1, tier=url) as server:
            assert served(server, "first", 1) == 0
            server.wait_until_written()
            server.restart()
            yield server, proxy


def test_records_that_are_cut_are_not_served_and_a_slow_network_costs_no_more_than_the_limit(
    through: tuple[LMCacheServer, Proxy],
) -> None:
    server, proxy = through
    proxy.cut_bytes = 1 << 17
    engine = new_engine(server.address, "second")
    assert exercise(engine, 1) == 0, "each record is larger than what comes through"
    assert proxy.cuts
    wait_until(lambda: not server.status()["l1"]["reserved_bytes"], 60)
    read = server.tier()["read_objects"]
    assert not read["read"]
    assert read["failed"] + read["damaged"] + read["gone"]
    proxy.cut_bytes = None
    wait_until(lambda: not server.tier()["failing"] and not server.tier()["waiting_objects"], 90)
    server.restart()
    assert is_served(server, "third", 1), "what the store has was whole"
    engine = new_engine(server.address, "fourth")  # the one before may not have noticed the restart
    # With the longest delay no record arrives in time: it has many pieces.
    for number, proxy.delay_s in ((2, 0.01), (1, 0.5), (3, 0.5)):
        exercise(engine, number)
    proxy.delay_s = 0.0
    wait_until(lambda: not server.status()["l1"]["reserved_bytes"], 90)
    wait_until(lambda: not server.tier()["failing"], 90)
    assert not server.tier()["read_objects"]["damaged"]
