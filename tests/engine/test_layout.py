"""Regions as the server copies them: pages that follow each other in every block are one."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_geometry import Cache, Case
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import select_common_block_size

try:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
except ImportError:  # since vLLM 0.33
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups

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


class Core:
    """The platform as the engine's core sees it."""

    def __init__(self, capability: tuple[int, int] | Exception | None, is_cuda: bool = True) -> None:
        self._capability = capability
        self.is_cuda = lambda: is_cuda

    def get_device_capability(self) -> DeviceCapability | None:
        if isinstance(self._capability, Exception):
            raise self._capability
        return DeviceCapability(*self._capability) if self._capability else None


HOPPER = Core((9, 0))


@pytest.fixture
def wish(monkeypatch):
    def ask(core=HOPPER, block_size=16, is_hybrid=False, method=None, **extra_config):
        monkeypatch.setattr("lmcache_client.connector.support.current_platform", core)
        # In a core without a GPU, torch raises, or takes the GPU from the workers that it starts.
        monkeypatch.setattr("torch.cuda.get_device_capability", pytest.fail)
        config = SimpleNamespace(
            model_config=SimpleNamespace(is_hybrid=is_hybrid),
            cache_config=SimpleNamespace(block_size=block_size),
            speculative_config=method and SimpleNamespace(method=method),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra_config),
        )
        return LMCacheMPConnector.get_required_kvcache_layout(config)

    return ask


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "BLNHC"), ((10, 0), "BLHNC"), ((8, 0), "BLNHC")])
def test_on_a_gpu_the_connector_wishes_for_the_block_outermost(wish, capability, name):
    """A layout that vLLM knows, that is one piece a block, and that its backends for GPUs accept."""
    assert wish(Core(capability)) == name
    assert KVCacheLayout[name].is_block_outermost
    assert KVCacheLayout[name].is_block_compact
    backends = [TritonAttentionBackend] if capability[0] != 10 else []
    assert KVCacheLayout[name] in get_supported_kv_cache_layouts(backends)


def test_where_no_gpu_of_cuda_is_seen_or_the_engine_is_not_cached_it_has_no_wish(wish, monkeypatch):
    for core in (Core((9, 0), is_cuda=False), Core(None), Core(RuntimeError("no NVML"))):
        assert wish(core) is None
    monkeypatch.setattr("lmcache_client.connector.support.VLLM_VERSION", "0.34.0")
    assert wish() is None
    assert wish(**{"lmcache.mp.untested_vllm": True}) == "BLNHC"


class FixedKernels(TritonAttentionBackend):
    """Its kernels take blocks of a few sizes, like FlashInfer's."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [16, 32, 64]


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128, 528])
@pytest.mark.parametrize("is_hybrid", [False, True])
def test_vllm_starts_with_what_the_connector_wishes_for(wish, block_size, is_hybrid):
    """vLLM raises if it must split the blocks of a layout that has them outermost."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    case = Case(
        [KVCacheGroupSpec(["layer1", "layer2"], spec)], select_common_block_size(block_size, [FixedKernels])
    )
    layout = wish(block_size=block_size, is_hybrid=is_hybrid) or "LBNHC"
    assert Cache(KVCacheLayout[layout], case).geometry().groups[0].regions
    assert (layout == "BLNHC") == (block_size in (16, 32, 64) and not is_hybrid)
    if case.kernel_block_size != block_size:
        with pytest.raises(ValueError, match="cannot be split"):
            Cache(KVCacheLayout.BLNHC, case)


def test_beside_a_connector_that_wishes_for_another_layout_it_has_no_wish(wish):
    """MultiConnector raises if the wishes of its connectors differ."""
    assert wish() == "BLNHC"
    own = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache_client.connector",
        "kv_role": "kv_both",
    }
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(is_hybrid=False),
        cache_config=SimpleNamespace(block_size=16),
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "connectors": [own, {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]
            },
        ),
    )
    assert MultiConnector.get_required_kvcache_layout(config) == "LBHNC"


def block_sizes(layout, *specs):
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout]),
        speculative_config=None,
    )
    named = {f"layers.{index}.{number}": spec for index in range(4) for number, spec in enumerate(specs)}
    return {group.kv_cache_spec.block_size for group in get_kv_cache_groups(config, named)}


HEADS = {"block_size": 16, "num_kv_heads": 8, "dtype": torch.bfloat16}
WIDE = FullAttentionSpec(head_size=512, **HEADS)
NARROW = SlidingWindowSpec(head_size=64, sliding_window=1024, **HEADS)
DRAFTER = SlidingWindowSpec(head_size=128, sliding_window=512, **HEADS)


def test_layers_whose_pages_differ_keep_their_blocks_in_the_layout_that_is_wished_for(wish):
    """In another layout, vLLM makes all pages equally long, by longer blocks. Those it can split."""
    for specs in ((WIDE, NARROW), (WIDE, NARROW, DRAFTER), (WIDE, DRAFTER)):
        assert block_sizes("LBNHC", *specs) > {16}
        assert block_sizes(wish(method="eagle3"), *specs) == {16}
        assert block_sizes(wish(Core((10, 0))), *specs) == {16}
    # For hidden states, vLLM makes blocks longer in that layout, too.
    small = {**HEADS, "num_kv_heads": 1, "head_size": 64}
    hidden = HiddenStateCacheSpec(**{**HEADS, "num_kv_heads": 4}, head_size=8192)
    window = SlidingWindowSpec(**small, sliding_window=128)
    assert max(block_sizes("BLNHC", FullAttentionSpec(**small), window, hidden)) > 64
    assert wish(method="extract_hidden_states") is None
