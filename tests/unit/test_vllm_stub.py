"""Without vLLM, a stub has what the connector uses of it, whatever that is (support/vllm_stub.py)."""

import os
import subprocess
import sys

import vllm_stub
from harness.paths import ROOT, SUPPORT

STUB_FIRST = "import inspect, sys, vllm_stub\nsys.meta_path.insert(0, vllm_stub.Finder())\n"


def run(program):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", SUPPORT)))}
    command = [sys.executable, "-c", STUB_FIRST + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_connector_and_its_options_load_and_all_that_they_use_is_there():
    program = """
import lmcache_client.connector.connector as it
from lmcache_client import options
assert options.classes().keys() == set(options.NAMES)
from lmcache_client.connector.vllm_surface import missing
assert it.KVConnectorBase_V1.__module__ == "vllm_stub"
assert not inspect.isabstract(it.LMCacheMPConnector)
assert missing() == [], missing()
print(*(name for name in sys.modules if name.startswith("vllm.")))
"""
    assert "vllm.v1.kv_cache_interface" in run(program)


def test_a_name_that_the_connector_does_not_use_is_missing_in_the_stub(tmp_path):
    (tmp_path / "new.py").write_text(
        "from vllm.v1 import thing as it\nfrom vllm.v1.thing import other\nit.More"
    )
    assert {"vllm.v1.thing:other", "vllm.v1.thing:More"} <= vllm_stub.used(tmp_path).keys()
    assert "vllm.v1.thing:other" not in vllm_stub.used()
    program = (
        "try: from vllm.v1.request import RequestStatus\nexcept ImportError as error: print('ImportError')"
    )
    assert run(program) == ["ImportError"]


def test_what_the_stub_can_do_is_something_that_the_connector_uses():
    assert vllm_stub.BEHAVIOUR.keys() <= vllm_stub.used().keys()
