"""Regions as the server copies them: pages that follow each other in every block are one."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_layout import KVCacheLayout

from lmcache_client.connector import LMCacheMPConnector
from lmcache_client.connector.translate import merged
from lmcache_client.contract.geometry import Region


def test_a_cache_with_the_block_outermost_is_one_page_a_block():
    """Four layers of 1 KiB in blocks of 4 KiB; with a gap, two pages."""
    assert merged([Region(0, index << 10, 4 << 10, 1 << 10) for index in range(4)]) == (
        Region(0, 0, 4 << 10, 4 << 10),
    )
    parts = [Region(0, start << 10, 8 << 10, 1 << 10) for start in (0, 1, 3, 4)]
    assert merged(parts) == (Region(0, 0, 8 << 10, 2 << 10), Region(0, 3 << 10, 8 << 10, 2 << 10))


@given(
    st.lists(
        st.builds(Region, st.integers(0, 1), st.integers(0, 6), st.sampled_from([8, 9]), st.integers(1, 3))
    )
)
@settings(max_examples=500, deadline=None)
def test_the_bytes_of_a_block_and_their_order_stay(regions):
    def places(of, block):
        return [
            (each.buffer, each.offset + block * each.stride_bytes + byte)
            for each in of
            for byte in range(each.page_bytes)
        ]

    for block in (0, 1, 5):
        assert places(merged(regions), block) == places(regions, block)


def with_connector(device_type, **extra_config):
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device_type),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra_config),
    )


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "BLNHC"), ((10, 0), "BLHNC"), ((8, 0), "BLNHC")])
def test_on_a_gpu_the_connector_wishes_for_the_block_outermost(monkeypatch, capability, name):
    """A layout that vLLM knows, that is one piece a block, and that its backends for GPUs accept."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    config = with_connector("cuda")
    assert LMCacheMPConnector.get_required_kvcache_layout(config) == name
    assert KVCacheLayout[name].is_block_outermost
    assert KVCacheLayout[name].is_block_compact
    backends = [TritonAttentionBackend] if capability[0] != 10 else []
    assert KVCacheLayout[name] in get_supported_kv_cache_layouts(backends)


def test_on_a_cpu_it_has_no_wish():
    config = with_connector("cpu")
    assert LMCacheMPConnector.get_required_kvcache_layout(config) is None


def test_an_engine_that_is_not_cached_has_no_wish(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("lmcache_client.connector.support.VLLM_VERSION", "0.34.0")
    assert LMCacheMPConnector.get_required_kvcache_layout(with_connector("cuda")) is None
    anyway = with_connector("cuda", **{"lmcache.mp.untested_vllm": True})
    assert LMCacheMPConnector.get_required_kvcache_layout(anyway) == "BLNHC"
