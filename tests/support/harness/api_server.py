"""vLLM's OpenAI server as a child process."""

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.engine import MODEL_DEFAULTS, START_TIMEOUT_S, Engine
from harness.models import model_path, text_model_path
from harness.processes import ChildProcess, free_port, new_log
from harness.server import LMCacheServer
from harness.waiting import answers, get


class ApiServer:
    """`vllm serve` of a tiny model that uses `server`. A context manager; `flags` are vLLM's options.

    With `text` the model has a tokenizer, of one token a byte, and vLLM its endpoints for developers.
    """

    def __init__(
        self,
        model: str,
        server: LMCacheServer,
        *flags: str,
        text: bool = False,
        **extra_config: Any,
    ) -> None:
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.port": server.port, **extra_config},
        }
        self.port = free_port()
        self.server = server
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = new_log(f"api-{Path(model).name}")
        self.model = str(text_model_path(model) if text else model_path(model))
        self._process: ChildProcess | None = None
        self._environment = Engine(model, server=server, multiprocessing=True).environment
        if text:
            self._environment |= {"VLLM_SERVER_DEV_MODE": "1", "TORCH_COMPILE_DISABLE": "1"}
        self._command = [
            *("vllm.entrypoints.openai.api_server", "--model", self.model),
            *("--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"),
            *(() if text else ("--skip-tokenizer-init",)),
            *(
                part
                for name, value in MODEL_DEFAULTS.get(model, {}).items()
                for part in (f"--{name.replace('_', '-')}", str(value))
            ),
            *("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "8"),
            *("--kv-cache-memory-bytes", str(64 << 20), "--kv-transfer-config", json.dumps(connector)),
            *flags,
        ]

    def __enter__(self) -> Self:
        self.start()
        self.wait_until_ready()
        return self

    def start(self) -> None:
        self._process = ChildProcess(
            "vLLM's server", self._command, self._environment, self.log, forks="engine"
        )

    def wait_until_ready(self) -> None:
        assert self._process is not None
        self._process.wait_until_ready(lambda: answers(f"{self.url}/health"), START_TIMEOUT_S, interval_s=0.2)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.__exit__(kind, error, trace)

    def get(self, path: str) -> str:
        return get(f"{self.url}{path}")

    def complete(
        self, prompt: Sequence[int], replica: int = 0, max_tokens: int = 8, **fields: Any
    ) -> list[int]:
        """The tokens that follow `prompt`, from the data-parallel replica of this number. `fields` are
        further ones of the request."""
        question = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
            **fields,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(question).encode(),
            {"Content-Type": "application/json", "X-data-parallel-rank": str(replica)},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
        return tokens
