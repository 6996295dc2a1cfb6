"""An engine of a vLLM that is not served: it starts, uncached, and says why."""

import pytest
from harness import changed_vllm
from harness.engine import Engine
from harness.prompts import prompt
from harness.served import served
from harness.server import LMCacheServer
from vllm import __version__ as VLLM_VERSION

from lmcache_client.contract.version import INSTALL_VLLM, VERSION, untested

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
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
    server: LMCacheServer,
) -> None:
    newer = changed_vllm.version("0.34.0")
    with Engine("llama", server=server, changed=newer) as engine:
        assert not_cached(server, engine) == untested("0.34.0")
    anyway = {"lmcache.mp.untested_vllm": True}
    with Engine("llama", server=server, changed=newer, extra_config=anyway) as engine:
        cold = served(engine, CACHED, 0)
        assert served(engine, CACHED, 512).output == cold.output
        assert {each["vllm_version"] for each in server.status()["sessions"]} >= {"0.34.0"}


def test_an_engine_whose_vllm_lost_a_method_starts_uncached(server: LMCacheServer) -> None:
    lost = changed_vllm.without(f"{BASE}:KVConnectorBase_V1", "bind_gpu_block_pool")
    with Engine("gemma3", server=server, changed=lost) as engine:
        assert not_cached(server, engine) == (
            f"vLLM {VLLM_VERSION}, which lacks KVConnectorBase_V1.bind_gpu_block_pool(gpu_block_pool): "
            f"install a version that lmcache-mp {VERSION} supports ({INSTALL_VLLM}) or a newer lmcache-mp"
        )


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys"),
        pytest.param("vllm.distributed.kv_events", "MEDIUM_CPU", id="of an option"),
    ],
)
def test_an_engine_in_which_the_connector_cannot_be_imported_starts_uncached(
    server: LMCacheServer, module: str, name: str
) -> None:
    gone = changed_vllm.not_importable(module, name)
    with Engine("gemma3", server=server, changed=gone) as engine:
        reason = not_cached(server, engine)
    assert f"vLLM {VLLM_VERSION} and lmcache-mp {VERSION}, which do not load together" in reason
    assert f"cannot import name '{name}'" in reason


def test_a_vllm_that_asks_for_another_method_gets_a_connector_that_does_nothing() -> None:
    asked = f"""
from abc import abstractmethod
from {BASE} import KVConnectorBase_V1
KVConnectorBase_V1.tomorrow = abstractmethod(lambda self: None)
KVConnectorBase_V1.__abstractmethods__ |= {{"tomorrow"}}
"""
    program = """
import inspect
from lmcache_client.connector import LMCacheMPConnector
print(inspect.isabstract(LMCacheMPConnector), LMCacheMPConnector.reason)
"""
    done = changed_vllm.run_python(program, asked)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False vLLM")
    assert "(vLLM requires tomorrow)" in done.stdout
