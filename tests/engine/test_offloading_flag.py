"""vLLM's own flags for offloading, which reach this connector: --kv-offloading-backend lmcache and a size."""

from harness.engine import Engine
from harness.prompts import prompt
from harness.served import served
from harness.server import LMCacheServer


def test_the_size_is_compared_with_the_servers_and_pages_are_served() -> None:
    cached = prompt(700, 1)
    flags = {"kv_offloading_backend": "lmcache", "kv_offloading_size": 2.0}
    with LMCacheServer(l1_size_gb=0.06) as server, Engine("llama", server=server, **flags) as engine:
        cold = served(engine, cached, 0)
        assert engine.reset_prefix_cache()
        assert served(engine, cached, 512).output == cold.output
        log = engine.log.read_text()
    assert "--kv-offloading-size asks for 2 GB, but the server has 0.06: start it with --l1-size-gb 2" in log
    assert "LMCacheMPConnector is that of lmcache-mp" in log
    assert " have room for about " in log
