"""A vLLM that the connector is not written for: refused with a sentence, and not disturbed."""

import os
import subprocess
import sys

import pytest

from lmcache_client.contract.version import VERSION, VLLM_SERIES, vllm_refusal

_OTHER_VLLM = """
import sys
import vllm
vllm.__version__ = "0.33.1"
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


def test_a_vllm_of_another_series_is_refused_with_a_sentence_and_goes_on_without_the_connector() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_VLLM],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refusal = vllm_refusal("0.33.1")
    assert done.stdout.splitlines() == [
        "['lmcache_client.connector', 'lmcache_client.connector.plugin']",
        refusal,
        refusal,
        "ExampleConnector",
        "goes on",
    ]
    assert "this vLLM knows no connector of lmcache-mp by its name" in done.stderr


def test_the_sentence_says_what_to_install() -> None:
    assert vllm_refusal("0.31.0") == (
        f"lmcache-mp {VERSION} works with vLLM {VLLM_SERIES}.x and this is vLLM 0.31.0: install that "
        "(pip install 'vllm==0.32.*'), or a version of lmcache-mp for this one"
    )


@pytest.mark.parametrize(
    ("version", "served"),
    [
        ("0.32.0", True), ("0.32.1.dev7+g1234567", True), ("0.32.0+cpu", True), ("0.32", True),
        ("0.33.0", False), ("0.320.0", False), ("1.32.0", False), ("0.3.2", False), ("dev", False),
        ("", False),
    ],
)  # fmt: skip
def test_the_series_is_what_counts(version: str, served: bool) -> None:
    assert (not vllm_refusal(version)) == served
