"""What is copied is the blocks of vLLM's own views, in each of its layouts and for each kind of layer.

vLLM's functions plan and allocate the KV cache here; no engine runs.
"""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from harness.server import LMCacheServer
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from lmcache_client.connector import LMCacheMPConnector
from lmcache_client.connector.support import UnsupportedError, shared_groups
from lmcache_client.connector.translate import geometry, group_specs

try:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
except ImportError:  # since vLLM 0.33
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups

NUM_BLOCKS = 5


def full(heads: int = 8, block_size: int = 16, **more) -> FullAttentionSpec:
    sizes = {"block_size": block_size, "num_kv_heads": heads, "head_size": 32}
    return FullAttentionSpec(**sizes, dtype=torch.bfloat16, **more)


def mla(head_size: int, block_size: int = 64, **more) -> MLAAttentionSpec:
    sizes = {"block_size": block_size, "num_kv_heads": 1, "head_size": head_size}
    return MLAAttentionSpec(**sizes, dtype=torch.uint8, **more)


def mla_window(head_size: int, block_size: int, window: int, dtype: torch.dtype, **more):
    sizes = {"block_size": block_size, "num_kv_heads": 1, "head_size": head_size, "alignment": 576}
    return SlidingWindowMLASpec(**sizes, dtype=dtype, sliding_window=window, **more)


def group(spec: KVCacheSpec, name: str = "layer") -> KVCacheGroupSpec:
    return KVCacheGroupSpec([f"{name}{index}" for index in range(3)], spec)


def uniform(**specs: KVCacheSpec) -> KVCacheGroupSpec:
    """A group whose layers have specs of their own."""
    named = {f"{name}{index}": spec for name, spec in specs.items() for index in range(3)}
    block_size = next(iter(specs.values())).block_size
    return KVCacheGroupSpec(list(named), UniformTypeKVCacheSpecs(block_size=block_size, kv_cache_specs=named))


class Case(NamedTuple):
    groups: list[KVCacheGroupSpec]
    kernel_block_size: int = 0
    """The size into which the attention backend splits a block; 0 if it does not."""
    has_mixed_pages: bool = False
    """Whether the pages differ in size, which vLLM only serves with all layers of a block together."""


WINDOW = {"num_kv_heads": 8, "head_size": 32, "dtype": torch.bfloat16}
STATE = MambaSpec(
    block_size=528,
    shapes=((3, 64), (4, 16, 16)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=full(2, 528).page_size_bytes,
    mamba_cache_mode="align",
)
PACKED = {"model_version": "deepseek_v4", "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 584}
"""As DeepSeek-V4 packs a latent: 448 bytes, 64 positions in bfloat16 and 8 bytes of scales."""
CASES = {
    "many heads": Case([group(full())]),
    "one head": Case([group(full(heads=1))]),
    "other values": Case([group(full(head_size_v=8))]),
    "MLA": Case([group(mla(576))]),
    "MLA with an indexer": Case([uniform(latent=mla(656), indexer=mla(132))]),
    "MLA aligned": Case([group(mla(584, alignment=576))]),
    # As DeepSeek-V4: compressed latents with the indexer's keys, a window of latents, compressors' states.
    "windows of MLA": Case(
        [
            uniform(
                latent=mla(512, 256, tokens_per_state=4, alignment=576, **PACKED),
                indexer=mla(132, 256, tokens_per_state=4, alignment=576),
            ),
            group(mla_window(512, 64, 128, torch.uint8, **PACKED), "window"),
            group(mla_window(2048, 4, 8, torch.float32), "compressor"),
            group(mla_window(1024, 8, 128, torch.float32), "compressor128"),
        ],
        has_mixed_pages=True,
    ),
    "sliding window": Case(
        [group(full()), group(SlidingWindowSpec(block_size=16, sliding_window=64, **WINDOW), "window")]
    ),
    "chunked": Case(
        [
            group(full()),
            group(ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **WINDOW), "local"),
        ]
    ),
    "recurrent": Case([group(full(2, 528)), group(STATE, "state")]),
    "split blocks": Case([group(full(2, 528))], kernel_block_size=16),
    "split MLA": Case([group(mla(576))], kernel_block_size=32),
    "padded": Case([group(full(page_size_padded=17_000))]),
    "packed": Case([group(full(num_head_slots=16, state_content_bytes=72))]),
}


class Cache:
    """A KV cache as vLLM plans and allocates it, full of random bytes."""

    def __init__(self, layout: KVCacheLayout, case: Case) -> None:
        self.vllm_config = SimpleNamespace(
            attention_config=SimpleNamespace(hisparse_config=None),
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda: layout,
                num_gpu_blocks_override=NUM_BLOCKS,
                prefix_cache_retention_interval=0,
            ),
            compilation_config=SimpleNamespace(static_forward_context={}),
            kv_transfer_config=SimpleNamespace(engine_id="engine"),
            parallel_config=SimpleNamespace(
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                distributed_executor_backend=None,
                rank=0,
            ),
            instance_id="life",
        )
        self.config: KVCacheConfig = get_kv_cache_config_from_groups(self.vllm_config, case.groups, 1 << 40)
        self.config.kv_cache_layout = layout.name
        sizes = [case.kernel_block_size or each.kv_cache_spec.block_size for each in case.groups]
        self.views = allocate_kv_cache(self.config, torch.device("cpu"), layout, sizes)
        self.memory = torch.empty(0, dtype=torch.uint8).set_(
            next(iter(self.views.values())).untyped_storage()
        )
        self.memory.random_()

    def geometry(self):
        return geometry(self.vllm_config, self.config, self.views)[0]

    def block(self, layer: str, block: int) -> bytes:
        """What vLLM's view of a layer shows of a block."""
        view = self.views[layer].view(torch.uint8)
        rows = view.shape[0] // NUM_BLOCKS
        return view[block * rows : (block + 1) * rows].contiguous().numpy().tobytes()


def refused_by_vllm(layout: KVCacheLayout, case: Case) -> bool:
    """Whether vLLM itself cannot use the layout for these layers."""
    try:
        Cache(layout, case)
    except (ValueError, AssertionError):
        return True
    return False


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", CASES)
def test_what_is_copied_is_the_block_that_vllm_sees_and_no_other(layout: KVCacheLayout, name: str) -> None:
    if refused_by_vllm(layout, CASES[name]):
        is_split = CASES[name].kernel_block_size > 0
        is_mixed = CASES[name].has_mixed_pages
        assert (
            not layout.is_block_compact
            or (is_split and layout.is_block_outermost)
            or (is_mixed and not layout.is_block_outermost)
        )
        return
    ours, other = (Cache(layout, CASES[name]) for _ in range(2))
    one_head = all(
        spec.num_heads == 1
        for each in CASES[name].groups
        for spec in getattr(each.kv_cache_spec, "kv_cache_specs", {"": each.kv_cache_spec}).values()
    )
    if not layout.is_block_compact and not one_head:
        with pytest.raises(UnsupportedError, match=rf"the KV cache layout {layout.name}, .*LAYOUT=LBNHC"):
            ours.geometry()
        return
    for each, described in zip(CASES[name].groups, ours.geometry().groups, strict=True):
        for block in (1, NUM_BLOCKS - 1):
            before = {
                (layer, at): ours.block(layer, at) for layer in each.layer_names for at in range(NUM_BLOCKS)
            }
            for region in described.regions:
                here, there = (region.offset + at * region.stride_bytes for at in (block, 2))
                page = other.memory[there : there + region.page_bytes]
                ours.memory[here : here + region.page_bytes] = page
            for (layer, at), content in before.items():
                expected = other.block(layer, 2) if at == block else content
                assert ours.block(layer, at) == expected, (layer, at)


def ring(block_size: int) -> CircularBufferSpec:
    sizes = {"num_kv_heads": 1, "head_size": 32, "head_size_v": 0}
    return CircularBufferSpec(block_size=block_size, dtype=torch.bfloat16, **sizes)


REPLAYED = mla_window(512, 64, 128, torch.uint8, bounded_replay=True, **PACKED)


@pytest.mark.parametrize(
    ("specs", "shared"),
    [
        ([full(), full()], (0, 1)),
        ([ring(8), full(), REPLAYED, full()], None),
        ([ring(8), full(block_size=128), REPLAYED, full(block_size=128)], (1, 3)),
        ([uniform(a=ring(8), b=ring(8)).kv_cache_spec, full()], (1,)),
        ([ring(24), full()], None),
        ([ring(16)], None),
        ([], ()),
    ],
)
def test_the_groups_that_vllm_does_not_share_are_left_out(
    specs: list[KVCacheSpec], shared: tuple[int, ...] | None
) -> None:
    """If blocks of a group that is left out do not divide those of the others, nothing is cached."""
    config = KVCacheConfig(NUM_BLOCKS, [], [group(spec, str(at)) for at, spec in enumerate(specs)])
    if shared is not None:
        assert shared_groups(config, 1)[0] == shared
        return
    with pytest.raises(UnsupportedError, match=r"not share between requests, with blocks of another size"):
        shared_groups(config, 1)


def test_a_group_that_is_no_part_of_a_transfer_is_refused() -> None:
    config = KVCacheConfig(NUM_BLOCKS, [], [group(full()), group(full())])
    config.kv_cache_groups[1].enable_kv_transfer = False
    with pytest.raises(UnsupportedError, match=r"does not share between requests$"):
        shared_groups(config, 1)


MIXED = {
    "RSWASpec": {"plain": full(), "special": RSWASpec(**{**WINDOW, "block_size": 16, "rswa_window": 64})},
    "HiddenStateCacheSpec": {
        "plain": full(),
        "special": HiddenStateCacheSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.bfloat16),
    },
    "layers that differ": {
        f"keeps{tokens}": SlidingWindowSpec(
            block_size=16, sliding_window=64, extra_retained_tokens=tokens, **WINDOW
        )
        for tokens in (0, 3)
    },
}


@pytest.mark.parametrize("what", MIXED)
def test_one_layer_that_needs_more_is_noticed_beside_others(what: str) -> None:
    """vLLM takes such layers for one group, and shows the scheduler the first layer only."""
    mixed = uniform(**MIXED[what])
    assert UniformTypeKVCacheSpecs.is_uniform_type(mixed.kv_cache_spec.kv_cache_specs)
    ours = Cache(KVCacheLayout.LBNHC, Case([mixed]))
    assert group_specs(ours.config, 1)[0].kind == ("full" if "plain" in MIXED[what] else "sliding_window")
    with pytest.raises(
        UnsupportedError, match=f"{what} in one KV cache group|KV cache groups of type {what}"
    ):
        ours.geometry()


def test_the_instructions_that_a_layer_uses_are_in_its_name() -> None:
    """On a CPU they decide the order of the numbers in a page, and no configuration says them."""
    cache, tags = Cache(KVCacheLayout.LBNHC, Case([group(full())])), set()
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    for isa in ("amx", "vec", ""):
        layer = SimpleNamespace(get_attn_backend=lambda: backend, isa=isa)
        cache.vllm_config.compilation_config.static_forward_context = dict.fromkeys(cache.views, layer)
        tags.add(tuple(each.tag for each in cache.geometry().groups))
    assert len(tags) == 3


def test_a_view_that_is_not_where_the_configuration_says_is_noticed() -> None:
    ours = Cache(KVCacheLayout.LBNHC, CASES["many heads"])
    ours.views["layer1"] = ours.views["layer2"]
    with pytest.raises(UnsupportedError, match="layer layer1, whose memory is not where"):
        ours.geometry()
    split = Cache(KVCacheLayout.LBNHC, CASES["split blocks"])
    split.views["layer1"] = split.views["layer1"][1:]
    with pytest.raises(UnsupportedError, match="layer layer1, whose memory is not where"):
        split.geometry()


def vllm_config_of(server: LMCacheServer, cache: Cache) -> SimpleNamespace:
    extra = {"lmcache.mp.port": server.port}
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=SimpleNamespace(engine_id="engine", kv_connector_extra_config=extra),
        model_config=SimpleNamespace(model="model"),
        speculative_config=None,
        **{name: part for name, part in vars(cache.vllm_config).items() if name != "kv_transfer_config"},
    )


WORKER, SCHEDULER = KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER
WINDOWS = [SlidingWindowSpec(block_size=16, sliding_window=64 + index, **WINDOW) for index in range(65)]
MANY_GROUPS = Case([KVCacheGroupSpec([f"layer{index}"], window) for index, window in enumerate(WINDOWS)])


@pytest.mark.parametrize(
    ("role", "layout", "case", "reason"),
    [
        (WORKER, "LBNHC", MANY_GROUPS, "a KV cache beyond the limits: "),
        # Blocks that are too long, which both sides see.
        (SCHEDULER, "LBNHC", CASES["many heads"], "a KV cache beyond the limits: "),
        (WORKER, "LHBNC", CASES["many heads"], "VLLM_KV_CACHE_LAYOUT=LBNHC"),
    ],
)
def test_an_engine_that_cannot_be_served_runs_uncached_and_says_so(
    server: LMCacheServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    role: KVConnectorRole,
    layout: str,
    case: Case,
    reason: str,
) -> None:
    """vLLM's log and the server's status say why; nothing is raised, and no step finds a worker."""
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", server.runtime_dir)
    monkeypatch.setattr("vllm.logger.logger.propagate", True)
    cache = Cache(KVCacheLayout[layout], Case([*case.groups]))
    if role == SCHEDULER:
        cache.config.kv_cache_groups[0] = group(full(block_size=1 << 23))
    connector = LMCacheMPConnector(vllm_config_of(server, cache), role, cache.config)
    try:
        if role == WORKER:
            connector.register_kv_caches(cache.views)
            connector.wait_for_save()
            assert connector.get_transfer_results(set()).finished_recving == set()
            assert connector.build_connector_worker_meta() is None
        server.wait_for_status(lambda status: [each["role"] for each in status["sessions"]] == ["not cached"])
        (session,) = server.status()["sessions"]
        assert reason in session["not_cached"]
        (line,) = [each for each in caplog.messages if "this engine is not cached" in each]
        assert session["not_cached"] in line
    finally:
        connector.shutdown()
