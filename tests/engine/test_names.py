"""Pairs of real engines at one server: those with the same bytes share pages, and no others."""

import fcntl
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness.engine import Engine, Result
from harness.models import model_path
from harness.prompts import prompt
from harness.server import LMCacheServer
from safetensors.torch import load_file, save_file

FP8 = {"quantization": "fp8_per_channel"}


class Pair(NamedTuple):
    first: dict[str, Any]
    second: dict[str, Any]
    shares: bool = False
    model: str = "llama"


PAIRS = {
    "layers that are not quantized": Pair(FP8, {**FP8, "quantization_config": {"ignore": ["re:.*"]}}),
    "the code of the model": Pair({}, {"model_impl": "transformers"}),
    "the order of numbers in a state": Pair(
        {"env": {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"}},
        {"env": {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}},
        model="qwen3next",
    ),
    "the type of a state": Pair({}, {"mamba_ssm_cache_dtype": "bfloat16"}, model="qwen3next"),
    "a rotary embedding": Pair(
        {}, {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}}
    ),
    "a number of the model that is in no weight": Pair({}, {"hf_overrides": {"rms_norm_eps": 1e-3}}),
    "the precision": Pair({}, {"dtype": "float32"}),
    "the length of a block": Pair({}, {"block_size": 32}),
    "nothing": Pair({}, {}, shares=True),
    "the same conv layout, named": Pair(
        {"env": {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"}},
        {"env": {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"}},
        shares=True,
        model="qwen3next",
    ),
    "room and names": Pair(
        {},
        {
            "max_model_len": 2048,
            "max_num_seqs": 3,
            "kv_cache_memory_bytes": 32 << 20,
            "served_model_name": "other",
            "seed": 5,
        },
        shares=True,
    ),
    "steps": Pair({}, {"max_num_batched_tokens": 256}, shares=True),
    "when steps are planned": Pair({}, {"async_scheduling": False}, shares=True),
    "drafts from the prompt": Pair(
        {},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}},
        shares=True,
    ),
    "adapters": Pair({}, {"enable_lora": True, "max_lora_rank": 8}, shares=True),
}


@pytest.fixture(scope="module")
def server() -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=0.2) as running:
        yield running


@pytest.mark.parametrize("difference", PAIRS)
def test_engines_share_pages_if_and_only_if_their_bytes_are_the_same(
    server: LMCacheServer, difference: str
) -> None:
    pair = PAIRS[difference]
    assert_sharing(server, (pair.model, pair.first), (pair.model, pair.second), pair.shares)


def assert_sharing(
    server: LMCacheServer, one: tuple[str, dict[str, Any]], other: tuple[str, dict[str, Any]], shares: bool
) -> None:
    server.clear()
    tokens = prompt(700, 3)
    with Engine(one[0], server=server, **one[1]) as engine:
        computed = restored_as_computed(engine, tokens)
    with Engine(other[0], server=server, **other[1]) as engine:
        first = engine.run(tokens)
        assert (first.external_tokens > 0) == shares
        if shares:
            # Its steps may be others, which rounds otherwise.
            assert first.tokens == computed.tokens
        else:
            # It has pages of its own.
            assert engine.reset_prefix_cache()
            again = engine.run(tokens)
            assert again.external_tokens > 0
            assert again.output == first.output


def restored_as_computed(engine: Engine, tokens: list[int]) -> Result:
    computed = engine.run(tokens)
    assert computed.external_tokens == 0
    assert engine.reset_prefix_cache()
    restored = engine.run(tokens)
    assert restored.external_tokens > 0
    assert restored.output == computed.output
    return computed


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return shutil.copytree(model_path("llama"), tmp_path / "copy")


def settle() -> None:
    """Files that are as young as a process may have changed while it ran."""
    time.sleep(0.05)


def test_a_copy_of_a_model_has_its_pages(server: LMCacheServer, copied: Path) -> None:
    settle()
    assert_sharing(server, ("llama", {}), (str(copied), {}), True)


def test_a_row_of_a_tensor_is_enough_to_share_nothing(server: LMCacheServer, copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    weights["model.embed_tokens.weight"][77] *= 1.5
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    settle()
    assert_sharing(server, ("llama", {}), (str(copied), {}), False)


def test_a_name_of_the_users_own_is_the_name_of_the_weights(server: LMCacheServer, copied: Path) -> None:
    settle()
    named = {"extra_config": {"lmcache.mp.weights_name": "v17"}}
    assert_sharing(server, ("llama", named), (str(copied), named), True)
    assert_sharing(server, ("llama", {}), (str(copied), named), False)


def test_weights_that_were_replaced_while_the_engine_loaded_are_its_own(
    server: LMCacheServer, copied: Path
) -> None:
    """They are replaced when vLLM has loaded them: nobody else may take the new ones for what it has."""
    server.clear()
    settle()
    tokens = prompt(700, 4)
    with Engine(str(copied), server=server, replaced=str(copied)) as engine:
        restored_as_computed(engine, tokens)
    settle()
    with Engine(str(copied), server=server) as engine:
        assert engine.run(tokens).external_tokens == 0


def test_weights_that_nobody_can_name_are_of_one_life_of_an_engine_id(
    server: LMCacheServer, copied: Path
) -> None:
    """A user may give an engine a fixed id. Its next life has other weights."""
    server.clear()
    tokens = prompt(700, 6)
    for _ in range(2):
        settle()
        fixed = {"engine_id": "fixed"}
        with Engine(str(copied), server=server, replaced=str(copied), connector=fixed) as engine:
            (engine_of,) = [each for each in server.status()["namespaces"] if each["engines"]]
            assert engine_of["engines"] == ["fixed"]
            restored_as_computed(engine, tokens)


def test_an_engine_starts_before_its_weights_are_named_and_joins_later(
    server: LMCacheServer, copied: Path
) -> None:
    server.clear()
    settle()
    tokens = prompt(700, 5)
    with (copied / "model.safetensors").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as if another rank read it, and took its time
        with Engine(str(copied), server=server) as engine:
            assert engine.log.read_text().count("as soon as its weights have been read") == 1
            assert not any(each["engines"] for each in server.status()["namespaces"])
            early = engine.run(tokens)
            assert engine.reset_prefix_cache()
            assert engine.run(tokens).external_tokens == 0
            fcntl.flock(file, fcntl.LOCK_UN)
            server.wait_for_engine()
            assert engine.reset_prefix_cache()
            assert restored_as_computed(engine, tokens).tokens == early.tokens
