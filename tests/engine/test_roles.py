"""Producers, consumers, several connectors in one engine, adapters: who stores, who loads, what is shared."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from harness.engine import Engine
from harness.models import configs, model_path
from harness.prompts import prompt
from harness.server import LMCacheServer
from safetensors.torch import load_file, save_file

CACHED = prompt(700, 1)


def test_a_producer_stores_and_a_consumer_loads(server: LMCacheServer) -> None:
    with Engine("gemma3", server=server, kv_role="kv_producer") as producer:
        cold = producer.run(CACHED)
        assert producer.reset_prefix_cache()
        assert producer.run(CACHED).external_tokens == 0
    stored = server.metrics()['lmcache_objects_total{outcome="stored"}']
    assert stored > 0
    with Engine("gemma3", server=server, kv_role="kv_consumer") as consumer:
        loaded = consumer.run(CACHED)
        assert loaded.external_tokens == 512
        assert loaded.output == cold.output
        consumer.run(prompt(700, 2))
    assert server.metrics()['lmcache_objects_total{outcome="stored"}'] == stored


def test_two_servers_through_vllms_multi_connector(server: LMCacheServer) -> None:
    """The first that has a hit is chosen; the other one's promise is given back; both store."""
    with LMCacheServer(l1_size_gb=0.2) as other:
        children = [
            {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": each.flags.get("host", ""),
                    "lmcache.mp.port": each.port,
                },
            }
            for each in (server, other)
        ]
        multi = {
            "kv_connector": "MultiConnector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
        # Both Unix sockets are found in one directory.
        (Path(server.runtime_dir) / f"{other.port}.sock").symlink_to(f"{other.runtime_dir}/{other.port}.sock")
        with Engine("gemma3", server=server, connector=multi) as engine:
            cold = engine.run(CACHED)
            assert engine.reset_prefix_cache()
            restored = engine.run(CACHED)
            assert restored.external_tokens == 512
            assert restored.output == cold.output
            for each in (server, other):
                metrics = each.metrics()
                assert metrics['lmcache_objects_total{outcome="stored"}'] > 0
                assert metrics["lmcache_leases"] == 0
            name = 'lmcache_transfer_bytes_total{direction="load"}'
            loads = [each.metrics()[name] for each in (server, other)]
            assert loads[0] > 0
            assert loads[1] == 0
            # vLLM fails if both answer.
            told = engine.run(prompt(700, 3), 1, transfer={"do_remote_decode": True}).transfer
            assert told == {"lmcache.wait_tokens": 512}
            server.kill()
            assert engine.reset_prefix_cache()
            second = engine.run(CACHED)
            assert second.external_tokens == 512, "the other one has it, too"
            assert second.output == cold.output


def adapter(directory: Path, seed: int) -> str:
    """A LoRA adapter of the tiny Llama that changes what its attention sees."""
    config = configs()["llama"]
    width, heads, size = config["hidden_size"], config["num_key_value_heads"], config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, rows in (("k_proj", heads * size), ("v_proj", heads * size)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{base}.lora_A.weight"] = torch.randn(8, width, generator=generator) * 0.3
            weights[f"{base}.lora_B.weight"] = torch.randn(rows, 8, generator=generator) * 0.3
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": 8,
                "lora_alpha": 16,
                "target_modules": ["k_proj", "v_proj"],
                "bias": "none",
                "base_model_name_or_path": "tiny",
            }
        )
    )
    return str(directory)


@pytest.mark.filterwarnings("default")
def test_an_adapter_never_gets_the_kv_of_another_or_of_the_base_model(
    server: LMCacheServer, tmp_path: Path
) -> None:
    first, second = adapter(tmp_path / "first", 1), adapter(tmp_path / "second", 2)
    copied = shutil.copytree(first, tmp_path / "elsewhere" / "copy")
    with Engine("llama", server=server, enable_lora=True, max_lora_rank=8, max_loras=2) as engine:
        base = engine.run(CACHED)
        outputs = {}
        for lora in (first, second):
            assert engine.reset_prefix_cache()
            outputs[lora] = engine.run(CACHED, lora=lora)
            assert outputs[lora].external_tokens == 0
            assert outputs[lora].output != base.output
        assert outputs[first].output != outputs[second].output
        for lora in (first, second):
            assert engine.reset_prefix_cache()
            again = engine.run(CACHED, lora=lora)
            assert again.external_tokens == 512
            assert again.output == outputs[lora].output
        assert engine.reset_prefix_cache()
        again = engine.run(CACHED, lora=str(copied))
        assert again.external_tokens == 512, "the same adapter, at another path"
        assert again.output == outputs[first].output
        late = shutil.copytree(first, tmp_path / "late")
        assert engine.reset_prefix_cache()
        assert engine.run(CACHED, lora=str(late)).external_tokens == 0, (
            "it could have changed since it was loaded"
        )
    shutil.rmtree(first)
    adapter(Path(first), 3)
    with Engine("llama", server=server, enable_lora=True, max_lora_rank=8, max_loras=2) as engine:
        replaced = engine.run(CACHED, lora=first)
        assert replaced.external_tokens == 0, "another adapter, at the same path"
        assert replaced.output != outputs[first].output


def test_copies_of_a_model_share_and_weights_that_are_replaced_in_place_do_not(
    server: LMCacheServer, tmp_path: Path
) -> None:
    model = shutil.copytree(model_path("llama"), tmp_path / "model")
    with Engine(str(model), server=server) as engine:
        explained = server.cli("status", "--explain").stdout.splitlines()
        before = engine.run(CACHED)
    copied = shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile)
    with Engine(str(copied), server=server) as engine:
        of_the_copy = server.cli("status", "--explain").stdout.splitlines()
        assert of_the_copy[1:] == explained[1:], "the first line has the engine's id"
        assert any(line.startswith("  detail weights: ") for line in explained)
        assert str(tmp_path) not in "".join(explained)
        named = next(line for line in server.cli("doctor").stdout.splitlines() if "names of pages" in line)
        (weights_line,) = (line for line in explained if line.startswith("  detail weights: "))
        assert f"model {copied}, namespace " in named
        assert f"weights {weights_line.removeprefix('  detail weights: ')}, layout layout=" in named
        again = engine.run(CACHED)
        assert again.external_tokens == 512
        assert again.output == before.output
    (weights,) = model.glob("*.safetensors")
    tensors = {name: tensor * 1.1 for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    with Engine(str(model), server=server) as engine:
        other = engine.run(CACHED)
        assert other.external_tokens == 0
        assert other.output != before.output
