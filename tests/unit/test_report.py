"""What the report says of the server: readiness, and a history of what was counted."""

import pytest
from fuzz.targets import RouterTarget

from lmcache_server.core.cache import Cache
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.telemetry.history import INTERVAL_S
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.pins import Pins


@pytest.fixture
def target():
    one = RouterTarget(1, 0)
    yield one
    one.close()


def test_it_is_ready_with_the_first_frame(target):
    report = target.report
    assert report.unready() == ""
    report._cache = Cache(FRAME_BYTES, 0)
    assert report.unready().startswith("L1 has no memory yet")
    report._cache.grow(1)
    assert report.unready() == ""


def test_it_is_not_ready_when_nothing_can_be_pinned_for_gpus(target):
    pins = target.l1.pins = Pins(Gpus(), target.l1.base_address, target.l1.num_bytes, FRAME_BYTES)
    assert target.report.unready() == "", "copies pin what they need"
    pins.failure = "allow locked memory"
    assert target.report.unready() == "allow locked memory"
    pins.pinned_bytes = FRAME_BYTES
    assert target.report.unready() == ""


def test_what_is_counted_is_in_the_history_by_the_next_interval(target):
    target.report.tick()
    target.metrics.count_tokens(100, computed=0, hit=64, limit=96)
    target.metrics.count("lmcache_transfer_bytes_total", 5, direction="store")
    target.metrics.count("lmcache_transfer_bytes_total", 7, direction="load")
    target.now_s += INTERVAL_S
    target.report.tick()
    assert target.report.history()["growth"] == {
        "hit_tokens": [64], "miss_tokens": [32], "store_bytes": [5], "load_bytes": [7],
    }  # fmt: skip
