"""Real servers with compressed tiers: the same bytes from fewer, whoever reads them."""

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest
from harness import stores
from harness.exercise import GROUPS, exercise, restored, wait_until_found
from harness.proxy import Proxy
from harness.rawclient import RawEngine
from harness.server import LMCacheServer
from harness.waiting import wait_until
from numpy.typing import NDArray

SHARES = {"zstd": 0.75, "lz4": 0.9}
"""What is left of such pages, at most."""
L1_GB = 0.1


class Floats(RawEngine):
    """Its pages have numbers in bfloat16, as those of a model."""

    def fill(self, group_index: int, block: int, seed: int) -> NDArray[np.uint8]:
        generator = np.random.default_rng(seed)
        for region in self.groups[group_index].regions:
            floats = generator.standard_normal(region.page_bytes // 2, np.float32).view(np.uint32)
            self._page(region, block)[:] = (floats >> 16).astype(np.uint16).view(np.uint8)
        return self.pages(group_index, block)


def new_engine(server: LMCacheServer, name: str) -> RawEngine:
    return Floats(server.address, GROUPS, num_blocks=130, engine_id=name).start()


def stores_prompts(server: LMCacheServer, *numbers: int) -> RawEngine:
    """The engine that has stored them, when they are in the tier."""
    engine = new_engine(server, f"stores {numbers}")
    for number in numbers:
        assert exercise(engine, number) == 0
    server.wait_until_written()
    return engine


def records(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("??/*") if path.is_file())


@pytest.mark.parametrize(("kind", "method"), [("dir", "zstd"), ("s3", "lz4")])
def test_records_are_smaller_and_a_server_that_compresses_nothing_reads_them(
    kind: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        for name, value in stores.SECRETS.items():
            monkeypatch.setenv(name, value)
        url = f"dir://{tmp_path}/tier?size_gb=1&shared=1"
        if kind != "dir":
            url, _ = stack.enter_context(stores.opened(kind, tmp_path))
        url += f"{'&' if '?' in url else '?'}compress="
        one, two = (
            stack.enter_context(LMCacheServer(l1_size_gb=L1_GB, tier=url + each)) for each in (method, "off")
        )
        engine = stores_prompts(one, 1)
        tier = one.tier()
        share = tier["stored_bytes"] / tier["written_bytes"]
        assert 0.3 < share < SHARES[method]
        if kind == "dir":
            assert sum(path.stat().st_size for path in records(tmp_path / "tier")) == tier["stored_bytes"]
        said = one.cli("status").stdout
        assert re.search(rf"; wrote \d+, [\d.]+ MiB as [\d.]+ MiB \({share:.2f}\); ", said), said
        assert restored(new_engine(two, "two"), 1) == 3 * engine.chunk_size
        objects = two.tier()["read_objects"]
        assert objects.pop("read") > 0
        assert not any(objects.values())
        moved = two.metrics()['lmcache_tier_bytes_total{direction="read",tier="1"}']
        stored = 'lmcache_tier_stored_bytes_total{direction="read",tier="1"}'
        # It is counted once a second.
        wait_until(lambda: 0.9 * share < two.metrics()[stored] / moved < SHARES[method])


def test_auto_compresses_what_is_written_once_reads_are_slow(tmp_path: Path) -> None:
    with (
        stores.opened("valkey", tmp_path) as (_, (store,)),
        Proxy(store.port) as proxy,
        LMCacheServer(l1_size_gb=L1_GB, tier=f"valkey://127.0.0.1:{proxy.port}") as server,
    ):
        proxy.delay_s = 0.003  # for 64 KiB at most
        engine = stores_prompts(server, 1)
        before = server.tier()
        assert server.cli("clear").returncode == 0
        wait_until_found(engine, 1)
        assert exercise(engine, 2) == 0
        server.wait_until_written()
        tier = server.tier()
        written, stored = (tier[name] - before[name] for name in ("written_bytes", "stored_bytes"))
        assert 0 < stored < SHARES["zstd"] * written
        assert server.cli("clear").returncode == 0
        assert restored(engine, 2) == 3 * engine.chunk_size
