"""Which vLLM is served, and whether this one has all that the connector uses."""

import pytest
from harness.api_server import ApiServer
from harness.changed_vllm import run_python, version, without
from harness.server import LMCacheServer

from lmcache_client.connector import vllm_surface as surface
from lmcache_client.contract.version import VERSION, too_old, untested

_TOO_OLD = """
import sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins
load_general_plugins()
print(sorted(name for name in sys.modules if name.startswith("lmcache_client.connector")))
for path in (None, "lmcache_client.connector"):
    transfer = KVTransferConfig(
        kv_connector="LMCacheMPConnector", kv_role="kv_both", kv_connector_module_path=path
    )
    try:
        KVConnectorFactory.get_connector_class(transfer)
    except RuntimeError as error:
        print(error)
print(KVConnectorFactory.get_connector_class_by_name("ExampleConnector").__name__)
from lmcache_client.connector.plugin import register
del KVConnectorFactory._registry
register()
print("goes on")
"""


def test_a_vllm_that_is_too_old_is_refused_and_goes_on_without_the_connector() -> None:
    done = run_python(_TOO_OLD, version("0.30.1"))
    assert done.returncode == 0, done.stderr
    refusal = too_old("0.30.1")
    assert done.stdout.splitlines() == [
        "['lmcache_client.connector', 'lmcache_client.connector.plugin']",
        refusal,
        refusal,
        "ExampleConnector",
        "goes on",
    ]
    assert "the connector of lmcache-mp could not be registered with vLLM" in done.stderr


def test_the_errors_say_what_to_install() -> None:
    assert too_old("0.30.0") == (
        f"lmcache-mp {VERSION} works with vLLM 0.31 to 0.33 and this is vLLM 0.30.0: "
        "install a newer vLLM (pip install 'vllm==0.33.*')"
    )
    assert untested("0.34.0") == (
        f"vLLM 0.34.0, and lmcache-mp {VERSION} was tested with vLLM 0.31 to 0.33: install one of these "
        "(pip install 'vllm==0.33.*') or a newer lmcache-mp. To cache anyway, set "
        '"lmcache.mp.untested_vllm": true in kv_connector_extra_config and check the answers with '
        "'lmcache verify'"
    )


OLD, SERVED, NEW = "old", "served", "new"


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("0.30.9", OLD), ("0.3.2", OLD), ("0.2", OLD), ("0.1.5", OLD),
        ("0.31.0", SERVED), ("0.31", SERVED), ("0.32.1.dev7+g1234567", SERVED), ("0.33.0+cpu", SERVED),
        ("0.33.1", SERVED), ("0.33.0rc1", SERVED),
        ("0.33.1.dev7+g1234567", NEW), ("0.34.0", NEW), ("0.330.0", NEW), ("1.32.0", NEW),
        ("0.1.dev11+g1234567", NEW), ("dev", NEW), ("", NEW), ("0.x", NEW),
    ],
)  # fmt: skip
def test_the_series_is_what_counts(version: str, verdict: str) -> None:
    assert bool(too_old(version)) == (verdict == OLD)
    # Nobody asks whether a version that is refused has been tested.
    assert verdict == OLD or bool(untested(version)) == (verdict == NEW)


def test_this_vllm_has_all_that_the_connector_uses() -> None:
    assert surface.missing() == []


_CHANGED = f"""
{without("vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1", "bind_gpu_block_pool")}
{without("vllm.v1.core.kv_cache_manager:KVCacheBlocks", "get_block_ids")}
from vllm.v1.core.block_pool import BlockPool
BlockPool.touch = lambda self, pinned: None
from vllm.v1.request import Request
code = Request.__init__.__code__
names = [name.replace("skip_reading_prefix_cache", "skip_reading") for name in code.co_names]
Request.__init__.__code__ = code.replace(co_names=tuple(names))
from vllm.config import KVTransferConfig
del KVTransferConfig.kv_load_failure_policy, KVTransferConfig.__annotations__["kv_load_failure_policy"]
"""


def test_a_name_or_an_argument_that_is_gone_is_found() -> None:
    program = "from lmcache_client.connector.vllm_surface import missing\nprint(missing())"
    done = run_python(program, _CHANGED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(
        [
            "KVConnectorBase_V1.bind_gpu_block_pool(gpu_block_pool)",
            "BlockPool.touch(blocks)",
            "KVCacheBlocks.get_block_ids()",
            "Request.skip_reading_prefix_cache",
            "KVTransferConfig.kv_load_failure_policy",
        ]
    )


def test_a_wrong_key_ends_vllm_with_one_sentence_before_it_loads_the_weights() -> None:
    vllm = ApiServer("llama", LMCacheServer(), **{"lmcache.mp.prot": 1})
    with pytest.raises(RuntimeError, match="exit code 1"):
        vllm.__enter__()
    log = vllm.log.read_text()
    assert log.splitlines()[-1] == (
        "RuntimeError: lmcache: unknown key 'lmcache.mp.prot' in kv_connector_extra_config: "
        "did you mean lmcache.mp.port?"
    )
    assert "EngineCore" not in log
    assert "oading weights" not in log


_SWITCHED_OFF = """
import os
os.environ["LMCACHE_MP_PLUGIN"] = "0"
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins
load_general_plugins()
try:
    print(KVConnectorFactory.get_connector_class_by_name("LMCacheMPConnector").__module__)
except ImportError as error:
    print(error)
"""


def test_a_variable_gives_vllm_its_own_connector_of_that_name_back() -> None:
    """Which needs LMCache."""
    assert run_python(_SWITCHED_OFF).stdout.splitlines() == ["No module named 'lmcache'"]
