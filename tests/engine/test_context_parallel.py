"""Decode context parallelism (DCP): the ranks of a DCP group divide the tokens of a block among them."""

import hashlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.engine import Engine
from harness.prompts import prompt
from harness.rawclient import RawEngine, chain, start_ranks
from harness.served import served
from harness.server import LMCacheServer
from msgspec import structs
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

from lmcache_client.connector import support, translate
from lmcache_client.connector.support import UnsupportedError
from lmcache_client.contract.chunk_size import unified_block_size
from lmcache_client.contract.geometry import GroupSpec, Region

PATIENT = {"lmcache.mp.lookup_timeout_s": 100}
"""Two ranks and the server on two cores: an answer can take long."""
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
FULL = specs.FullAttentionSpec(block_size=16, **HEADS)
MLA = specs.MLAAttentionSpec(block_size=64, max_tp_shards=1, **HEADS)
STATE = specs.MambaSpec(
    block_size=16, shapes=((4, 16),), dtypes=(torch.float32,), mamba_cache_mode="align", page_size_padded=4096
)
DRAFT = specs.FullAttentionSpec(block_size=16, dcp_sharded=False, **HEADS)
DRAFT_MLA = specs.MLAAttentionSpec(block_size=64, dcp_sharded=False, max_tp_shards=1, **HEADS)
LAYERS = {"latent": MLA, "indexer": specs.MLAAttentionSpec(block_size=64, max_tp_shards=1, **HEADS)}
CASES: dict[str, Sequence[KVCacheSpec]] = {
    "full attention": (FULL,),
    "MLA": (MLA,),
    "MLA with an indexer": (specs.UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=LAYERS),),
    "beside states": (FULL, STATE),
    "beside a drafter at DCP 1": (FULL, DRAFT),
    "beside a drafter of MLA": (MLA, DRAFT_MLA),
}


def config_of(group_specs: Sequence[KVCacheSpec]) -> KVCacheConfig:
    groups = []
    for index, spec in enumerate(group_specs):
        names = getattr(spec, "kv_cache_specs", {f"layer {index}": spec})
        groups.append(KVCacheGroupSpec(list(names), spec))
    return KVCacheConfig(9, [], groups)


@pytest.mark.parametrize("dcp_size", [1, 2, 8])
@pytest.mark.parametrize("name", CASES)
def test_a_block_covers_as_many_tokens_as_vllms_own_managers_say(name: str, dcp_size: int) -> None:
    config = config_of(CASES[name])
    assert support.shared_groups(config, dcp_size)[0] == tuple(range(len(CASES[name])))
    groups = translate.group_specs(config, dcp_size)
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=CASES[name][0].block_size, enable_prefix_caching=True, prefix_match_unit=None
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp_size),
        kv_transfer_config=SimpleNamespace(),
    )
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(config, vllm_config)
    firsts = [getattr(spec, "first_spec", spec) for spec in CASES[name]]
    coordinator = get_kv_cache_coordinator(
        config_of(firsts),  # as vLLM's scheduler sees it
        max_model_len=4096,
        max_in_flight_tokens=4096,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=dcp_size,
        pcp_world_size=1,
        scheduler_block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
    )
    managers = coordinator.single_type_managers
    assert [each.block_size for each in groups] == [each.block_size for each in managers]
    assert unified_block_size(groups) == scheduler_block_size
    # Ranks that have other tokens are no replicas, though vLLM says that they have the same heads.
    is_alike = [spec not in (FULL, STATE, DRAFT) for spec in CASES[name]]
    is_divided = [spec.dcp_sharded and dcp_size > 1 for spec in CASES[name]]
    expected = [alike and not divided for alike, divided in zip(is_alike, is_divided, strict=True)]
    assert [each.replicated for each in groups] == expected


def test_a_chunk_is_whole_blocks_of_every_rank() -> None:
    """Whatever the interleave, at the end of a block each rank has all of its part and nothing behind it."""
    for dcp_size, interleave in ((2, 1), (2, 16), (4, 4), (8, 64)):
        (group,) = translate.group_specs(config_of([MLA]), dcp_size)
        ends = torch.arange(1, 9) * group.block_size
        kept = get_dcp_local_seq_lens(ends, dcp_size, None, interleave)
        assert torch.equal(kept, (torch.arange(1, 9) * MLA.block_size)[:, None].expand(8, dcp_size).int())


def test_a_ring_whose_blocks_do_not_divide_those_of_all_ranks_is_noticed() -> None:
    ring = specs.CircularBufferSpec(
        block_size=32, num_kv_heads=1, head_size=32, head_size_v=0, dtype=torch.bfloat16, dcp_sharded=False
    )
    config = config_of([FULL, ring])
    assert support.shared_groups(config, 2)[0] == (0,)
    with pytest.raises(UnsupportedError, match="with blocks of another size"):
        support.shared_groups(config, 1)


def test_prefill_context_parallelism_and_the_external_launcher_are_refused() -> None:
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=2,
            prefill_context_parallel_size=1,
            distributed_executor_backend="external_launcher",
            world_size=1,
        ),
    )
    groups = translate.group_specs(config_of([FULL]), 2)
    support.check_supported(config, groups, [16])
    config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(UnsupportedError, match=r"^prefill context parallelism: set --prefill-context-"):
        support.check_supported(config, groups, [16])
    config.parallel_config.prefill_context_parallel_size = 1
    config.parallel_config.world_size = 2
    with pytest.raises(UnsupportedError, match=r"^vLLM's external launcher"):
        support.check_supported(config, groups, [16])


# -- ranks of a real server -------------------------------------------------------------------------------


def tagged(dcp_size: int, interleave: int) -> str:
    """What the connector says of such an engine, in short."""
    from vllm.config import ParallelConfig

    parallel = ParallelConfig(
        tensor_parallel_size=4, decode_context_parallel_size=dcp_size, cp_kv_cache_interleave_size=interleave
    )
    return hashlib.sha256(repr(sorted(translate.named(parallel, "own"))).encode()).hexdigest()


def ranks(
    server: LMCacheServer, name: str, dcp_size: int, interleave: int = 1, tensor_ranks: int = 4
) -> list[RawEngine]:
    """An engine of MLA and a state, with what the connector makes of vLLM's specs, but smaller pages."""
    pages = (Region(0, 0, 600, 600), Region(0, 0, 1000, 1000))
    specs_of_all = translate.group_specs(config_of([MLA, STATE]), dcp_size)
    groups = [structs.replace(each, regions=pages) for each in specs_of_all]
    model = tagged(dcp_size, interleave)
    engines = start_ranks(server.address, [groups] * tensor_ranks, tensor_ranks, 64, name, model)
    assert not [each.worker.refusal for each in engines if each.worker.refusal]
    return engines


def tables_of(groups: Sequence[GroupSpec], tokens: int, first: int) -> list[list[int]]:
    """Block tables of a prompt, with blocks from the `first` on."""
    tables = []
    for each in groups:
        tables.append(list(range(first, first + tokens // each.block_size)))
        first += tokens // each.block_size
    return tables


def test_every_rank_stores_its_own_tokens_and_gets_them_back(server: LMCacheServer) -> None:
    stored = ranks(server, "stored", dcp_size=2)
    assert [each.block_size for each in stored[0].groups] == [128, 16]
    size = stored[0].chunk_size
    keys = chain(range(2 * size), size)
    tables = tables_of(stored[0].groups, 2 * size, 1)
    pages = {}
    for engine in stored:
        for index, table in enumerate(tables):
            for block in table:
                pages[engine.rank, index, block] = engine.fill(index, block, 10_000 * engine.rank + block)
    for engine in stored:
        assert stored[0].lookup(keys).resume_tokens == 0, "the part of a rank is missing"
        assert engine.store_prompt(keys, tables).stored == 4, "no rank stores for another"

    others = ranks(server, "others", dcp_size=2)
    places = tables_of(others[0].groups, 2 * size, 30)
    found = others[0].lookup(keys)
    assert found.resume_tokens == 2 * size
    compared = 0
    for engine in others:
        engine.load(found, keys, places)
        for index, each in enumerate(engine.groups):
            for at in each.needed_blocks(found.resume_tokens):
                right = pages[engine.rank, index, tables[index][at]]
                assert (engine.pages(index, places[index][at]) == right).all()
                compared += right.size
    blocks = 2 * size // 128 + 1
    assert compared == 4 * 1600 * blocks
    others[0].end(found)

    for name, unlike in (("dcp 4", (4, 1)), ("interleave", (2, 16)), ("dcp 1", (1, 1))):
        engines = ranks(server, name, *unlike)
        unlike_keys = chain(range(2 * size), engines[0].chunk_size)
        assert engines[0].lookup(unlike_keys).resume_tokens == 0, name
    assert others[0].lookup(keys).resume_tokens == 2 * size


# -- real engines -----------------------------------------------------------------------------------------


@pytest.fixture
def own_server() -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=0.1) as running:
        yield running


def two_ranks(model: str, server: LMCacheServer, dcp_size: int = 2, **llm: Any) -> Engine:
    return Engine(
        model,
        server=server,
        extra_config=PATIENT,
        multiprocessing=True,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        tensor_parallel_size=2,
        decode_context_parallel_size=dcp_size,
        max_num_batched_tokens=256,
        **llm,
    )


def group_of(server: LMCacheServer, kind: str) -> dict[str, Any]:
    (namespace,) = [each for each in server.status()["namespaces"] if each["engines"]]
    return next(group for group in namespace["groups"] if group["kind"] == kind)


def test_engines_restore_the_tokens_of_both_ranks(own_server: LMCacheServer) -> None:
    tokens, float32 = prompt(700, 1), {"dtype": "float32"}
    with two_ranks("llama-mqa", own_server, **float32) as engine:
        cold = engine.run(tokens)
        assert len(set(engine.call("kv_digests"))) == 2, "each rank has tokens of its own"
        assert group_of(own_server, "full")["block_size"] == 2 * 128
    with two_ranks("llama-mqa", own_server, **float32) as engine:
        assert served(engine, tokens, 512).output == cold.output
        # The pages of each rank count.
        for rank in range(2):
            engine.corrupt_kv(rank=rank)
            wrong = engine.run(tokens)
            assert wrong.local_tokens == 512
            assert wrong.output != cold.output
            assert served(engine, tokens, 512).output == cold.output
    # The same tokens at other places.
    with two_ranks("llama-mqa", own_server, cp_kv_cache_interleave_size=32, **float32) as engine:
        assert engine.run(tokens).external_tokens == 0
        assert served(engine, tokens, 512).tokens == cold.tokens
    with two_ranks("llama-mqa", own_server, dcp_size=1, **float32) as engine:
        plain = engine.run(tokens)
        assert plain.external_tokens == 0
        assert plain.tokens == cold.tokens, "vLLM's own attention says the same"


def test_states_of_all_tokens_are_restored_beside_them(own_server: LMCacheServer) -> None:
    """A state is stored where it ends a block of all ranks, which not every prompt leaves by default."""
    tokens, long, everywhere = prompt(1100, 1), prompt(1400, 2), {"prefix_cache_retention_interval": 512}
    with two_ranks("qwen3next-mqa", own_server, mamba_ssm_cache_dtype="float32") as engine:
        cold = engine.run(tokens)
        cold_and_long = engine.run(long)
        assert served(engine, long, 0).tokens == cold_and_long.tokens, "its state ends at 1,280 tokens"
        sizes = [group_of(own_server, kind)["block_size"] for kind in ("full", "recurrent")]
        assert sizes == [512, 256]
    with two_ranks("qwen3next-mqa", own_server, mamba_ssm_cache_dtype="float32") as engine:
        assert served(engine, tokens, 1024).output == cold.output
    with two_ranks("qwen3next-mqa", own_server, mamba_ssm_cache_dtype="float32", **everywhere) as engine:
        other = engine.run(prompt(1400, 3))
        assert served(engine, prompt(1400, 3), 1024).output == other.output
