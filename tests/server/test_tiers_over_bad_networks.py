"""A network that cuts connections in the middle of a record, or delays them, costs time and never a byte."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import stores
from harness.exercise import exercise, new_engine, restored
from harness.proxy import Proxy
from harness.server import LMCacheServer
from harness.waiting import wait_until
from test_tiers_on_stores import MARGIN_S

from lmcache_client.contract.hits import fetch_patience_s


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
        with LMCacheServer(l1_size_gb=0.2, tier=url) as server:
            engine = new_engine(server.address, "first")
            try:
                assert exercise(engine, 1) == 0
            finally:
                engine.close()
            server.wait_until_written()
            server.restart()
            yield server, proxy


def test_a_record_that_is_cut_is_not_served(through: tuple[LMCacheServer, Proxy]) -> None:
    server, proxy = through
    proxy.cut_bytes = 1 << 17
    engine = new_engine(server.address, "second")
    try:
        began_s = time.monotonic()
        assert exercise(engine, 1) == 0, "each record is larger than what comes through"
        assert time.monotonic() - began_s < fetch_patience_s(3 * 256) + MARGIN_S
        assert proxy.cuts
        wait_until(lambda: not server.status()["l1"]["reserved_bytes"], 60)
        read = server.tier()["read_objects"]
        assert not read["read"]
        assert read["failed"] + read["damaged"] + read["gone"]
    finally:
        engine.close()
    proxy.cut_bytes = None
    wait_until(lambda: not server.tier()["failing"] and not server.tier()["waiting_objects"], 90)
    server.restart()
    engine = new_engine(server.address, "third")
    try:
        assert restored(engine, 1) == 3 * 256, "what the store has was whole"
    finally:
        engine.close()


def test_a_slow_network_costs_no_more_than_the_limit_and_its_bytes_are_right(
    through: tuple[LMCacheServer, Proxy],
) -> None:
    server, proxy = through
    engine = new_engine(server.address, "second")
    try:
        # With the longest delay no record arrives in time: it has many pieces.
        for number, proxy.delay_s in ((2, 0.01), (1, 0.5), (3, 0.5)):
            began_s = time.monotonic()
            exercise(engine, number)
            assert time.monotonic() - began_s < fetch_patience_s(3 * 256) + MARGIN_S
        proxy.delay_s = 0.0
        wait_until(lambda: not server.status()["l1"]["reserved_bytes"], 90)
        wait_until(lambda: not server.tier()["failing"], 90)
        assert not server.tier()["read_objects"]["damaged"]
    finally:
        engine.close()
