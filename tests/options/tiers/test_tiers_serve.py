"""Real engines are served from a tier, bit for bit what they compute, when L1 has lost everything."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import stores
from harness.engine import MODEL_DEFAULTS, Engine
from harness.lanes import all_but
from harness.models import model_path
from harness.prompts import prompt
from harness.served import served
from harness.server import LMCacheServer
from harness.waiting import wait_until

CASES = {
    "llama": ("dir", {}),
    "gemma3": ("valkey", {"block_size": 32}),
    "gemma4": ("az", {}),
    "gptoss": ("s3", {"block_size": 32}),
    "llama4": ("cluster", {"block_size": 32}),
    "qwen3next": ("s3", {"block_size": 32}),
    "qwen35": ("az", {}),
    "falconh1": ("mooncake", {"block_size": 32, "max_num_batched_tokens": 160}),
}
"""Each kind of model, and each kind of tier."""


@contextlib.contextmanager
def tier(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in stores.SECRETS.items():
        monkeypatch.setenv(name, value)
    if kind == "dir":
        yield f"dir://{folder}/tier?size_gb=1&write=commit"
    else:
        with stores.opened(kind, folder) as (url, _):
            yield url


# A model with windows and one with states: the server does not know what is in a record.
@pytest.mark.parametrize("model", all_but(CASES, *(set(CASES) - {"gemma3", "qwen3next"})))
def test_each_kind_of_model_comes_back_after_l1_is_lost(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, settings = CASES[model]
    with tier(kind, tmp_path, monkeypatch) as url:
        comes_back(model, url, **settings)


# Attention, and states in float32 that are no elements of two bytes.
def test_pages_come_back_from_a_compressed_tier(tmp_path: Path) -> None:
    written = comes_back("qwen35", f"dir://{tmp_path}/tier?size_gb=1&write=commit&compress=zstd")
    assert 0 < written["stored_bytes"] < 0.85 * written["written_bytes"]


def comes_back(model: str, url: str, **settings: Any) -> Any:
    """Runs an engine, loses L1, and compares what it answers then. What the status says of the tier."""
    with (
        LMCacheServer(tier=url, l1_size_gb=0.1) as server,
        Engine(model, server=server, **settings) as engine,
    ):
        chunk = server.wait_for_engine()
        cached, other = prompt(3 * chunk + 10, 1), prompt(3 * chunk + 10, 2)
        cold = engine.run(cached)
        assert cold.external_tokens == 0
        # Some processors round otherwise where vLLM resumes, also from its own cache.
        right = cold.output, engine.run(cached).output
        engine.run(other)
        server.wait_until_written()
        written = server.tier()
        # These models compute within milliseconds: a fetch would seldom be worth the wait.
        engine.call("seem_slow")

        def is_restored() -> bool:
            """On a busy machine the tier may come too late for one lookup."""
            server.restart()
            server.wait_for_engine()
            assert server.status()["l1"]["chunks"] == 0
            assert engine.reset_prefix_cache()
            engine.run(other)  # tells how fast the tier is, and hardly waits for that
            wait_until(lambda: server.status()["tiers"][0]["read_bytes_per_s"])
            result = engine.run(cached)
            assert result.output in right
            return bool(result.external_tokens == 3 * chunk)

        wait_until(is_restored, what="all of the prompt comes from the tier")
        read = server.tier()["read_objects"]
        assert read["read"] > 0
        assert read["damaged"] == read["failed"] == 0
        # The output comes from the pages that were read: with them overwritten it changes.
        engine.corrupt_kv()
        assert engine.run(cached).output not in right
        return written


def test_another_machine_serves_what_the_first_computed(tmp_path: Path) -> None:
    """A second server with its own L1, and an engine with its own copy of the model at another path."""
    copy = tmp_path / "elsewhere" / "model"
    shutil.copytree(model_path("qwen3next"), copy)
    url = f"dir://{tmp_path}/tier?size_gb=1&shared=1"
    with (
        LMCacheServer(tier=url, l1_size_gb=0.1) as one,
        Engine("qwen3next", server=one, block_size=32) as engine,
    ):
        chunk = one.wait_for_engine()
        cached = prompt(3 * chunk + 10, 1)
        cold = engine.run(cached)
        one.wait_until_written()
    settings = {**MODEL_DEFAULTS["qwen3next"], "block_size": 32}
    with LMCacheServer(tier=url, l1_size_gb=0.1) as two, Engine(str(copy), server=two, **settings) as engine:
        two.wait_for_engine()
        engine.call("seem_slow")
        assert served(engine, cached, 3 * chunk).output == cold.output
