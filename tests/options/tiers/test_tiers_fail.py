"""A real engine while the store behind its server fails: its answers are those that it computed.

Of a store that hangs, it gets them while the store hangs.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import stores
from harness.engine import Engine, Result
from harness.prompts import prompt
from harness.server import LMCacheServer
from harness.stores import Store
from harness.waiting import wait_until

CHUNKS = 2


class Setting:
    """An engine, its server, and a Valkey that has two prompts."""

    def __init__(self, store: Store, server: LMCacheServer, engine: Engine) -> None:
        self.store, self.server, self.engine = store, server, engine
        tokens = CHUNKS * server.wait_for_engine() + 10
        self.cached, self.other = prompt(tokens, 1), prompt(tokens, 2)
        engine.call("seem_slow")
        self.cold, _ = engine.run(self.cached), engine.run(self.other)
        server.wait_until_written()
        self.records = self.count()

    def lose(self) -> None:
        """L1 and the engine lose everything; the tier has it, and how fast it is is known again."""
        wait_until(lambda: self.count() == self.records)
        self.server.restart()
        self.server.wait_for_engine()
        assert self.engine.reset_prefix_cache()
        self.engine.run(self.other)
        wait_until(lambda: self.tier["read_bytes_per_s"])

    def count(self) -> int:
        return int(stores.ask(self.store.port, "DBSIZE").strip(":\r\n"))

    @property
    def tier(self) -> dict[str, dict[str, int]]:
        tier: dict[str, dict[str, int]] = self.server.status()["tiers"][0]
        return tier

    def is_restored(self) -> bool:
        """Whether the tier brings all of a prompt that L1 lost: on a busy machine it may come too late."""
        self.lose()
        return self.check().external_tokens == len(self.cached) - 10

    def check(self) -> Result:
        """The answer is right, and nothing is left reserved or pinned."""
        found = self.engine.run(self.cached)
        assert found.output == self.cold.output
        self.server.wait_at_rest(sessions=2)
        return found


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    with (
        stores.valkey(tmp_path_factory.mktemp("valkey")) as store,
        LMCacheServer(tier=f"valkey://127.0.0.1:{store.port}", l1_size_gb=0.1) as server,
        Engine("qwen3next", server=server, block_size=32) as engine,
    ):
        yield Setting(store, server, engine)


@pytest.fixture
def lost(setting: Setting) -> Setting:
    setting.lose()
    return setting


def test_records_that_were_changed_are_computed(lost: Setting) -> None:
    """Whatever is changed in them: test_tiers.py."""
    port = lost.store.port
    for name in stores.ask(port, "KEYS *").split("\r\n")[2::2]:
        for byte in "AB":  # one of them is not what is there
            stores.ask(port, f"SETRANGE {name} 1000 {byte}")
    lost.check()
    assert lost.tier["read_objects"]["damaged"] > 0
    stores.ask(port, "FLUSHALL")
    lost.server.clear()
    for tokens in (lost.cached, lost.other):
        assert lost.engine.reset_prefix_cache()
        lost.engine.run(tokens)


def test_a_store_that_hangs_or_is_killed_costs_a_limited_time(setting: Setting) -> None:
    wait_until(setting.is_restored, what="as long as the store answers, it serves")
    setting.lose()
    with setting.store.failing("hangs"):
        setting.check()
    setting.lose()
    setting.store.kill()
    setting.check()
    setting.store.restart()


def test_a_full_store_takes_nothing_and_harms_nothing(setting: Setting) -> None:
    port = setting.store.port
    stores.ask(port, "CONFIG SET maxmemory-policy noeviction")
    stores.ask(port, "CONFIG SET maxmemory 1mb")
    assert setting.engine.reset_prefix_cache()
    # The server may still be connecting to a store that was just started again.
    wait_until(lambda: not setting.tier["failing"])
    wait_until(lambda: setting.server.cli("clear", "--tiers").returncode == 0)
    written = setting.tier["written_objects"]["written"]
    for _ in range(2):
        setting.check()
        assert setting.engine.reset_prefix_cache()
    wait_until(lambda: sum(setting.tier["written_objects"].values()) > written)
    assert setting.tier["written_objects"]["written"] == written


def test_a_replica_that_takes_the_place_of_the_store_serves_on(tmp_path: Path) -> None:
    with stores.valkey(tmp_path) as first, stores.valkey(tmp_path) as second:
        stores.follow(second, first)
        tier = f"valkey://127.0.0.1:{first.port},127.0.0.1:{second.port}"
        with (
            LMCacheServer(tier=tier, l1_size_gb=0.1) as server,
            Engine("qwen3next", server=server, block_size=32) as engine,
        ):
            setting = Setting(first, server, engine)

            def is_restored() -> bool:
                assert server.cli("clear").returncode == 0
                assert engine.reset_prefix_cache()
                return setting.check().external_tokens == len(setting.cached) - 10

            wait_until(is_restored, what="the store serves")
            setting.store = second
            wait_until(lambda: setting.count() == setting.records, what="the replica has all")
            first.kill()
            is_restored()
            assert "OK" in stores.ask(second.port, "REPLICAOF NO ONE")
            wait_until(is_restored, what="the replica serves")
