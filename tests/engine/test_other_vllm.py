"""An engine of a vLLM that is not served: it starts, uncached, and says why."""

from pathlib import Path

import pytest
from harness.engine import Engine
from harness.other_vllm import other_vllm, run_python
from harness.prompts import prompt
from harness.served import served
from harness.server import LMCacheServer
from vllm import __version__ as VLLM_VERSION

from lmcache_client.contract.version import INSTALL_VLLM, VERSION, untested

CACHED = prompt(700, 1)


def not_cached(server: LMCacheServer, engine: Engine) -> str:
    """Why this engine is not cached, as the server's status says, once everybody says the same."""
    for _ in range(2):
        served(engine, CACHED, 0)
    server.wait_for_status(lambda status: [each["role"] for each in status["sessions"]] == ["not cached"])
    (session,) = server.status()["sessions"]
    reason = str(session["not_cached"])
    lines = [line for line in engine.log.read_text().splitlines() if "is not cached" in line]
    assert len(lines) == 1
    assert f"lmcache: this engine is not cached, because it has {reason}" in lines[0]
    assert f"because it has {reason}" in server.cli("status").stdout
    assert reason in server.cli("doctor").stdout
    # vLLM itself prints one traceback without a tokenizer.
    assert "lmcache_client/" not in engine.log.read_text()
    return reason


def test_an_engine_of_a_newer_vllm_starts_uncached_and_is_served_where_its_user_says_so(
    server: LMCacheServer, tmp_path: Path
) -> None:
    newer = {"PYTHONPATH": str(other_vllm(tmp_path, "0.34.0"))}
    with Engine("llama", server=server, env=newer, cold=False) as engine:
        assert not_cached(server, engine) == untested("0.34.0")
    anyway = {"lmcache.mp.untested_vllm": True}
    with Engine("llama", server=server, env=newer, cold=False, extra_config=anyway) as engine:
        cold = served(engine, CACHED, 0)
        assert served(engine, CACHED, 512).output == cold.output
        assert {each["vllm_version"] for each in server.status()["sessions"]} >= {"0.34.0"}


@pytest.mark.long  # that it is missed: test_versions.py
def test_an_engine_whose_vllm_lost_a_method_starts_uncached(server: LMCacheServer, tmp_path: Path) -> None:
    base = "distributed/kv_transfer/kv_connector/v1/base.py"
    gone = {base: ("def bind_gpu_block_pool(self, gpu_block_pool:", "def gone(self, gpu_block_pool:")}
    changed = {"PYTHONPATH": str(other_vllm(tmp_path, replaced=gone))}
    with Engine("gemma3", server=server, env=changed) as engine:
        assert not_cached(server, engine) == (
            f"vLLM {VLLM_VERSION}, which lacks KVConnectorBase_V1.bind_gpu_block_pool(gpu_block_pool): "
            f"install a version that lmcache-mp {VERSION} supports ({INSTALL_VLLM}) or a newer lmcache-mp"
        )


def test_an_engine_in_which_the_connector_cannot_be_imported_starts_uncached(
    server: LMCacheServer, tmp_path: Path
) -> None:
    renamed = {"*": ("generate_block_hash_extra_keys", "make_block_hash_extra_keys")}
    changed = {"PYTHONPATH": str(other_vllm(tmp_path, replaced=renamed))}
    with Engine("gemma3", server=server, env=changed) as engine:
        reason = not_cached(server, engine)
    assert f"vLLM {VLLM_VERSION} and lmcache-mp {VERSION}, which do not load together" in reason
    assert "cannot import name 'generate_block_hash_extra_keys'" in reason


def test_a_vllm_that_asks_for_another_method_gets_a_connector_that_does_nothing(tmp_path: Path) -> None:
    asked = (
        "    @abstractmethod\n    def start_load_kv(",
        "    @abstractmethod\n    def tomorrow(self): ...\n\n    @abstractmethod\n    def start_load_kv(",
    )
    program = """
import inspect
from lmcache_client.connector import LMCacheMPConnector
print(inspect.isabstract(LMCacheMPConnector), LMCacheMPConnector.reason)
"""
    changed = other_vllm(tmp_path, replaced={"distributed/kv_transfer/kv_connector/v1/base.py": asked})
    done = run_python(program, changed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False vLLM")
    assert "(vLLM requires tomorrow)" in done.stdout
