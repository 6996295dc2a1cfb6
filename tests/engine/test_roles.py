"""Producers, consumers, several connectors in one engine, adapters: who stores, who loads, what is shared."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from harness.engine import Engine
from harness.models import configs
from harness.prompts import prompt
from harness.served import served
from harness.server import LMCacheServer
from safetensors.torch import save_file

from lmcache_client.connector.stats import PREFIX

CACHED = prompt(700, 1)


def test_a_producer_stores_and_a_consumer_loads(server: LMCacheServer) -> None:
    with Engine("gemma3", server=server, kv_role="kv_producer") as producer:
        cold = producer.run(CACHED)
        served(producer, CACHED, 0)
    stored = server.metrics()['lmcache_objects_total{outcome="stored"}']
    assert stored > 0
    with Engine("gemma3", server=server, kv_role="kv_consumer") as consumer:
        assert served(consumer, CACHED, 512).output == cold.output
        consumer.run(prompt(700, 2))
    assert server.metrics()['lmcache_objects_total{outcome="stored"}'] == stored


def test_two_servers_through_vllms_multi_connector(server: LMCacheServer) -> None:
    """The first that has a hit is chosen; the other one's promise is given back; both store."""
    with LMCacheServer(l1_size_gb=0.2) as other:
        children = []
        for each in (server, other):
            place = {"lmcache.mp.host": each.flags.get("host", ""), "lmcache.mp.port": each.port}
            child = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
            children.append({**child, "kv_connector_extra_config": place})
        multi = {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": children},
        }
        # Both Unix sockets are found in one directory.
        (Path(server.runtime_dir) / f"{other.port}.sock").symlink_to(f"{other.runtime_dir}/{other.port}.sock")
        with Engine("gemma3", server=server, connector=multi) as engine:
            cold = engine.run(CACHED)
            assert served(engine, CACHED, 512).output == cold.output
            loads = []
            for each in (server, other):
                metrics = each.metrics()
                assert metrics['lmcache_objects_total{outcome="stored"}'] > 0
                assert metrics["lmcache_leases"] == 0
                loads.append(metrics['lmcache_transfer_bytes_total{direction="load"}'])
            assert loads[0] > 0
            assert loads[1] == 0
            assert engine.metrics()[f"{PREFIX}loads"] == 1, "the other connector hears of it, too"
            # vLLM fails if both answer.
            told = engine.run(prompt(700, 3), 1, transfer={"do_remote_decode": True}).transfer
            assert told == {"lmcache.wait_tokens": 512}
            server.kill()
            assert served(engine, CACHED, 512).output == cold.output, "the other one has it, too"
            # It dies between the lookup and the load. vLLM's default would fail the request.
            engine.call("kill_server_at_load", pid=other.pid)
            result = served(engine, CACHED, 0)
            assert (result.finish_reason, result.output) == ("length", cold.output)


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
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "tiny",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.filterwarnings("default")
def test_an_adapter_never_gets_the_kv_of_another_or_of_the_base_model(
    server: LMCacheServer, tmp_path: Path
) -> None:
    first, second = adapter(tmp_path / "first", 1), adapter(tmp_path / "second", 2)
    copied = shutil.copytree(first, tmp_path / "elsewhere" / "copy")
    with Engine("llama", server=server, enable_lora=True, max_lora_rank=8, max_loras=2) as engine:
        base = engine.run(CACHED)
        outputs = {lora: served(engine, CACHED, 0, lora=lora).output for lora in (first, second)}
        assert len({base.output, *outputs.values()}) == 3
        for lora in (first, second):
            assert served(engine, CACHED, 512, lora=lora).output == outputs[lora]
        # The same adapter, at another path.
        assert served(engine, CACHED, 512, lora=str(copied)).output == outputs[first]
        late = shutil.copytree(first, tmp_path / "late")
        served(engine, CACHED, 0, lora=str(late))  # it could have changed since it was loaded
    shutil.rmtree(first)
    adapter(Path(first), 3)
    with Engine("llama", server=server, enable_lora=True, max_lora_rank=8, max_loras=2) as engine:
        # Another adapter, at the same path.
        assert served(engine, CACHED, 0, lora=first).output != outputs[first]
