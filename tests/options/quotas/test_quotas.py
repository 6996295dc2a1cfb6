"""--quota-gb at a real server: two salts, whose chunks one engine stores and loads, byte for byte."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.rawclient import RawEngine
from harness.server import LMCacheServer
from harness.waiting import wait_until
from harness.warm import CHUNK_FRAMES, CHUNKS, Prompt, new_engine, path, restart_warm

from lmcache_client.contract.keys import tenant_id
from lmcache_server.core.pool import FRAME_BYTES

__all__ = ["path"]
A, B = tenant_id("tenant a"), tenant_id("tenant b")
PROMPT_BYTES = CHUNKS * CHUNK_FRAMES * FRAME_BYTES


@pytest.fixture
def running(path: Path) -> Iterator[LMCacheServer]:
    """Each salt may hold two prompts, and a little."""
    with LMCacheServer(l1_size_gb=0.05, l1_path=path, quota_gb="0.0015") as server:
        yield server


class Salted(Prompt):
    """A prompt of a salt, with pages and keys of its own."""

    def __init__(self, engine: RawEngine, tenant: bytes, number: int) -> None:
        super().__init__(engine, number % 3)
        self.tenant = tenant
        self.keys = tuple((b"%d %d " % (number, chunk) + tenant).ljust(32) for chunk in range(CHUNKS))

    def store(self) -> None:
        self.engine.tenant = self.tenant
        super().store()


def tenants(server: LMCacheServer) -> dict[str, int]:
    return {each["tenant"]: each["bytes"] for each in server.status()["tenants"]}


def storm(engine: RawEngine, tenant: bytes, first: int) -> Salted:
    for number in range(first, first + 6):
        (last := Salted(engine, tenant, number)).store()
    return last


def test_a_full_tenant_loses_its_own_chunks_alone_also_after_a_restart(running: LMCacheServer) -> None:
    engine = new_engine(running)
    kept = [Salted(engine, B, 0), Salted(engine, b"", 1)]
    for each in kept:
        each.store()
    first = Salted(engine, A, 2)
    first.store()
    last = storm(engine, A, 10)
    for each in (*kept, last):
        each.load()
    assert first.held_chunks() == 0
    assert tenants(running) == {A.hex(): 2 * PROMPT_BYTES, B.hex(): PROMPT_BYTES}

    wait_until(lambda: running.metrics()["lmcache_evicted_chunks_total"] == 5 * CHUNKS)
    assert running.metrics()["lmcache_quota_evicted_chunks_total"] == 5 * CHUNKS
    assert running.metrics()["lmcache_eviction_age_seconds_count"] == 0, "they say nothing about L1's size"
    shown = running.cli("status").stdout
    assert (
        f"tenants: 2\n  {A.hex()[:12]}  1.5 MiB of 1.5 MiB\n  {B.hex()[:12]}  768.0 KiB of 1.5 MiB\n" in shown
    )

    for number in (20, 30):
        restart_warm(running, engine)
        assert tenants(running) == {A.hex(): 2 * PROMPT_BYTES, B.hex(): PROMPT_BYTES}
        last.load()
        last = storm(engine, A, number)
        for each in (*kept, last):
            each.load()
    running.flags["quota_gb"] = f"0.0015,{B.hex()[:8]}=0.0001"
    restart_warm(running, engine)
    for each in (*kept, last):
        each.load()

    cleared = running.cli("clear", "--salt", A.hex()[:8].upper())
    assert (cleared.returncode, cleared.stdout) == (0, f"forgot {2 * CHUNKS} chunks\n")
    assert last.held_chunks() == 0
    for each in kept:
        each.load()
    assert tenants(running) == {B.hex(): PROMPT_BYTES}


def test_a_store_of_a_full_tenant_in_use_is_dropped_and_said(running: LMCacheServer) -> None:
    engine = new_engine(running)
    prompts = [Salted(engine, A, number) for number in range(2)]
    for each in prompts:
        each.store()
    found = [engine.lookup(each.keys) for each in prompts]
    another = Salted(engine, A, 2)
    another.fill()
    assert engine.store_prompt(another.keys, another.tables).dropped == 2 * CHUNKS
    Salted(engine, B, 2).store()
    assert running.status()["objects"]["quota"] == 2 * CHUNKS
    assert running.metrics()['lmcache_objects_total{outcome="quota"}'] == 2 * CHUNKS
    (failure,) = running.status()["failures"]
    assert "raise --quota-gb" in json.dumps(failure)
    for each in found:
        engine.end(each)
    another.store()
    another.load()


def test_a_clear_of_one_salt_says_that_records_stay_in_tiers(tmp_path: Path) -> None:
    """What a full tenant fetches: options/tiers/test_fetches.py."""
    with LMCacheServer(l1_size_gb=0.05, tier=f"dir://{tmp_path}/tier?size_gb=1") as server:
        Salted(new_engine(server), B, 0).store()
        cleared = server.cli("clear", "--salt", B.hex()[:12])
        assert cleared.returncode == 0
        assert "; records stay in dir://" in cleared.stdout
        cleared = server.cli("clear", "--tiers", "--salt", B.hex()[:12])
        assert (cleared.returncode, "--namespace" in cleared.stderr) == (2, True)
        assert B.hex() not in tenants(server)
