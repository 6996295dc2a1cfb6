"""Real engines at one server: those with the same bytes share pages, and no others."""

import fcntl
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness.engine import Engine, Result
from harness.models import model_path
from harness.prompts import prompt
from harness.served import served
from harness.server import LMCacheServer, server_of_a_file
from safetensors.torch import load_file, save_file

TOKENS = prompt(700, 3)
Llm = dict[str, Any]
BF16 = {"dtype": "bfloat16"}
SD, DS = ({"env": {"VLLM_SSM_CONV_STATE_LAYOUT": order}} for order in ("SD", "DS"))


class Family(NamedTuple):
    """An engine, those that share its pages, and those of which each has pages of its own."""

    model: str
    first: Llm
    same: dict[str, Llm]
    different: dict[str, Llm]


FAMILIES = {
    "llama": Family(
        "llama",
        {},
        {
            "room, names and steps": {
                "max_model_len": 2048, "max_num_seqs": 3, "kv_cache_memory_bytes": 32 << 20, "seed": 5,
                "served_model_name": "other", "max_num_batched_tokens": 256, "async_scheduling": False,
            },
            "drafts from the prompt": {
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
            },
            "adapters": {"enable_lora": True, "max_lora_rank": 8},
        },
        {
            "the code of the model": {"model_impl": "transformers"},
            "the precision": {"dtype": "float32"},
        },
    ),
    "recurrent": Family(
        "qwen3next",
        SD,
        {"the same order, named": SD},
        {
            "the order of numbers in a state": DS,
            "the type of a state": {**SD, "mamba_ssm_cache_dtype": "bfloat16"},
        },
    ),
}  # fmt: skip
"""What no engine here shows, test_account.py does for every field of vLLM's configuration."""
if "avx512f" in Path("/proc/cpuinfo").read_text():
    # On a CPU, vLLM has a KV cache of fp8 with AVX-512 or AMX only.
    FAMILIES["llama"].different["the precision of the KV cache"] = {"kv_cache_dtype": "fp8"}


server = server_of_a_file(l1_size_gb=0.1)


@pytest.mark.parametrize("name", FAMILIES)
def test_engines_share_pages_if_and_only_if_their_bytes_are_the_same(
    server: LMCacheServer, name: str
) -> None:
    family = FAMILIES[name]
    server.clear()
    with Engine(family.model, server=server, **BF16 | family.first) as engine:
        computed = restored_as_computed(engine)
    for difference, settings in family.same.items():
        with Engine(family.model, server=server, **BF16 | settings) as engine:
            first = engine.run(TOKENS)
            assert first.external_tokens > 0, difference
            # Its steps may be others, which rounds otherwise.
            assert first.tokens == computed.tokens, difference
    for difference, settings in family.different.items():
        with Engine(family.model, server=server, **BF16 | settings) as engine:
            restored_as_computed(engine, difference)


def restored_as_computed(engine: Engine, what: str = "") -> Result:
    """What an engine answers that shares nothing with those before it, and has pages of its own."""
    computed = engine.run(TOKENS)
    assert computed.external_tokens == 0, what
    assert engine.reset_prefix_cache()
    restored = engine.run(TOKENS)
    assert restored.external_tokens > 0
    assert restored.output == computed.output
    return computed


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return shutil.copytree(model_path("llama"), tmp_path / "copy")


def settle() -> None:
    time.sleep(0.05)


def test_a_copy_of_a_model_has_its_pages_unless_a_weight_or_its_name_differs(
    server: LMCacheServer, copied: Path
) -> None:
    server.clear()
    settle()
    named = {"lmcache.mp.weights_name": "v17"}
    with Engine("llama", server=server, **BF16) as engine:
        explained = server.cli("status", "--explain").stdout.splitlines()
        before = restored_as_computed(engine)
    with Engine(str(copied), server=server) as engine:
        of_the_copy = server.cli("status", "--explain").stdout.splitlines()
        assert of_the_copy[1:] == explained[1:], "the first line has the engine's id"
        assert str(copied.parent) not in "".join(explained)
        (weights,) = (line for line in explained if line.startswith("  detail weights: "))
        said = next(line for line in server.cli("doctor").stdout.splitlines() if "names of pages" in line)
        assert f"model {copied}, namespace " in said
        assert f"weights {weights.removeprefix('  detail weights: ')}, layout layout=" in said
        assert served(engine, TOKENS, 512).output == before.output
    # A name of the user's own is the name of the weights.
    with Engine(str(copied), server=server, extra_config=named) as engine:
        restored_as_computed(engine)
    with Engine("llama", server=server, extra_config=named, **BF16) as engine:
        assert served(engine, TOKENS, 512).output == before.output
    # A row of a tensor is enough to share nothing.
    tensors = load_file(copied / "model.safetensors")
    tensors["model.embed_tokens.weight"][TOKENS[0]] *= 1.5
    save_file(tensors, copied / "model.safetensors", {"format": "pt"})
    settle()
    with Engine(str(copied), server=server) as engine:
        assert restored_as_computed(engine).output != before.output


def test_weights_that_nobody_can_name_are_of_one_life_of_an_engine_id(
    server: LMCacheServer, copied: Path
) -> None:
    """They are replaced when vLLM has loaded them: nobody else may take the new ones for what it has. A user
    may give an engine a fixed id. Its next life has other weights."""
    server.clear()
    for _ in range(2):
        settle()
        fixed = {"engine_id": "fixed"}
        with Engine(str(copied), server=server, replaced=str(copied), connector=fixed) as engine:
            (engine_of,) = [each for each in server.status()["namespaces"] if each["engines"]]
            assert engine_of["engines"] == ["fixed"]
            restored_as_computed(engine)
    settle()
    with Engine(str(copied), server=server) as engine:
        assert engine.run(TOKENS).external_tokens == 0


def test_an_engine_starts_before_its_weights_are_named_and_joins_later(
    server: LMCacheServer, copied: Path
) -> None:
    server.clear()
    settle()
    with (copied / "model.safetensors").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as if another rank read it, and took its time
        with Engine(str(copied), server=server, joins=False) as engine:
            assert engine.log.read_text().count("as soon as its weights have been read") == 1
            assert not any(each["engines"] for each in server.status()["namespaces"])
            early = engine.run(TOKENS)
            served(engine, TOKENS, 0)
            fcntl.flock(file, fcntl.LOCK_UN)
            server.wait_for_engine()
            assert engine.reset_prefix_cache()
            assert restored_as_computed(engine).tokens == early.tokens
