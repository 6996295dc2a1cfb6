"""Where the engines of the tests compute: on this machine's processor, or on its GPU."""

import os
from importlib.util import find_spec
from typing import Any

ON_GPU = os.environ.get("LMCACHE_TEST_DEVICE") == "cuda"
"""`make test-gpu-vllm` says so. Every engine is started afresh there: nobody has tried to fork a process that
has imported vLLM for a GPU."""


def engine_defaults(model: str) -> dict[str, Any]:
    """What engines of this model are started with because of where they compute."""
    if not ON_GPU:
        return {}
    # Several engines share the GPU. How much of it each takes is said by its kv_cache_memory_bytes.
    options: dict[str, Any] = {"gpu_memory_utilization": 0.05, "dtype": "bfloat16"}
    # Where the packages of vLLM's first choice are missing.
    if model.startswith("qwen3") and find_spec("flashinfer") is None:
        options["additional_config"] = {"gdn_prefill_backend": "triton"}
    if model == "gemma4" and find_spec("cutlass") is None:
        options["attention_backend"] = "TRITON_ATTN"
    return options
