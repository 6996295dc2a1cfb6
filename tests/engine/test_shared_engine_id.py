"""Two vLLM engines to which somebody gave one engine_id, as a copied configuration does."""

from harness.engine import Engine
from harness.prompts import prompt
from harness.server import LMCacheServer

SHARED = {"engine_id": "prod"}
MEMORY = 16 << 20


def test_the_earlier_engine_is_served_and_the_later_is_told() -> None:
    """They have different numbers of KV cache groups: an answer for the other would be nonsense."""
    with LMCacheServer(l1_size_gb=0.1) as server:
        with Engine("gemma3", server=server, connector=SHARED, kv_cache_memory_bytes=MEMORY) as earlier:
            cold = earlier.run(prompt(700, 1))
            with Engine("llama", server=server, connector=SHARED, kv_cache_memory_bytes=MEMORY) as later:
                assert later.run(prompt(700, 2)).tokens
                assert later.run(prompt(700, 2)).external_tokens == 0
                assert earlier.reset_prefix_cache()
                restored = earlier.run(prompt(700, 1))
                assert restored.external_tokens == 512
                assert restored.output == cold.output
        log = server.log.read_text()
        assert log.count("another live engine has the engine_id 'prod': give each engine") == 1
