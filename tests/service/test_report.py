"""What the report says of the server: readiness, what was counted, and how many tokens L1 holds."""

import pytest
from fuzz.targets import RouterTarget

from lmcache_client.contract.geometry import FULL, RECURRENT, SLIDING_WINDOW, Geometry, GroupSpec, Region
from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.messages import Memory
from lmcache_server.admin.readiness import unready
from lmcache_server.core.cache import Cache
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.service.engines import Engine, Shard
from lmcache_server.telemetry.history import INTERVAL_S
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.locked_memory import LockedMemory


@pytest.fixture
def target():
    one = RouterTarget(1, 0)
    yield one
    one.close()


def test_it_is_ready_with_the_first_frame_unless_nothing_can_be_pinned_for_gpus(target):
    assert unready(target.report.cache, target.l1) == ""
    cache = Cache(FRAME_BYTES, 0)
    assert unready(cache, target.l1).startswith("L1 has no memory yet")
    cache.grow(1)
    assert unready(cache, target.l1) == ""
    locked = target.l1.locked = LockedMemory(Gpus(), target.l1.base_address, target.l1.num_bytes, FRAME_BYTES)
    assert unready(cache, target.l1) == "", "copies pin what they need"
    locked.failure = "allow locked memory"
    assert unready(cache, target.l1) == "allow locked memory"
    locked.pinned_bytes = FRAME_BYTES
    assert unready(cache, target.l1) == ""


def test_what_is_counted_is_in_the_history_by_the_next_interval(target):
    target.report.tick()
    count, model = target.metrics.count, target.metrics.traffic(b"n", "model")
    target.metrics.count_tokens(model, 100, 0, 64, 96, {"evicted": 32})
    count("lmcache_transfer_bytes_total", 5, direction="store", **model.labels)
    count("lmcache_transfer_bytes_total", 7, direction="load", **model.labels)
    count("lmcache_test_transfer_bytes_total", 8, direction="load", test="bench")
    count("lmcache_test_transfer_bytes_total", 1, direction="store", test="verify")
    target.now_s += INTERVAL_S
    target.report.tick()
    assert target.report.history.report()["growth"] == {
        "hit_tokens": [64], "miss_tokens": [32], "store_bytes": [5], "load_bytes": [7],
        "test_bytes": [9],
    }  # fmt: skip


def test_a_tick_counts_what_was_evicted_once_and_who_reads_changes_nothing(target):
    router, report, metrics = target.router, target.report, target.metrics
    router.sessions.known[b"gone"] = {"model": "gone", "ephemeral": False}
    cache = report.cache
    cache.evicted_chunks, cache.evicted_bytes, cache.evicted_ages_s = 3, 300, [1.0, 2.0, 70.0]
    before = metrics.render()
    for _ in range(2):
        assert report.status()["namespaces"] == [], "what nobody has is not shown"
        assert metrics.render() == before
    assert b"gone" in router.sessions.known
    assert cache.evicted_ages_s == [1.0, 2.0, 70.0]
    for _ in range(2):
        report.tick()
        assert metrics.value("lmcache_evicted_chunks_total") == 3
        assert metrics.value("lmcache_evicted_bytes_total") == 300
        assert b"lmcache_eviction_age_seconds_count 3.0" in metrics.render()
    cache.evicted_chunks = 4
    report.tick()
    assert metrics.value("lmcache_evicted_chunks_total") == 4
    assert router.sessions.known == {}


def test_gauges_are_what_the_report_says(target):
    l1, value = target.report.status()["l1"], target.metrics.value
    assert value("lmcache_l1_capacity_bytes") == l1["total_bytes"] > 0
    for name in ("ready", "reserved", "free", "populated", "pinned", "largest_free"):
        assert value(f"lmcache_l1_{name}_bytes") == l1[f"{name}_bytes"]
    target.report.cache.grow(1)
    assert value("lmcache_l1_capacity_bytes") == l1["total_bytes"] + FRAME_BYTES


# -- how many tokens L1 holds ----------------------------------------------------------------------------

PAGE_BYTES = 64 << 10


def group(kind, window=0, replicated=False):
    regions = (Region(0, 0, PAGE_BYTES, PAGE_BYTES), Region(0, PAGE_BYTES * 64, PAGE_BYTES, PAGE_BYTES))
    return GroupSpec(kind, 16, window, "", regions, replicated)


def capacity(*groups, ranks=1, frames=3200):
    model = ModelTag("model", (), ranks, 1)
    made = Engine("engine", model, False)
    for rank in range(ranks):
        memory = Memory(1, ((0, 2 * PAGE_BYTES * 64),), 0)
        made.shards[rank] = Shard("engine", rank, model, Geometry(groups, 64), memory, 256, b"", False)
    made.complete()
    return made.capacity_tokens(frames * FRAME_BYTES, FRAME_BYTES)


def test_a_chunk_takes_its_pages_of_all_layers_on_all_ranks():
    # 16 blocks of two layers, a frame each.
    assert capacity(group(FULL)) == 100 * 256
    assert capacity(group(FULL), ranks=2) == 50 * 256
    assert capacity(group(FULL, replicated=True), ranks=2) == 100 * 256, "one of them stores for both"
    assert capacity(group(FULL), frames=31) == 0


def test_windows_and_states_count_only_where_there_is_nothing_else():
    window, state = group(SLIDING_WINDOW, 64), group(RECURRENT)
    assert capacity(group(FULL), window, state) == 100 * 256
    assert capacity(window, state) == 50 * 256
