"""A running vLLM, by its OpenAI API.

Interfaces: vLLM 0.32, entrypoints/openai/completion and entrypoints/serve/dev.
"""

import contextlib
import http.client
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NUM_TOP = 5
"""Tokens whose log probabilities are compared at each position."""
NO_NUMBER = -9999.0
"""What vLLM gives for minus infinity. NaN, which wrong pages may lead to, comes as null, and counts so."""
RESET_TIMEOUT_S = 60.0
LOADED_TOKENS = "vllm:lmcache_mp_loaded_tokens_total"
FAILED_LOADS = "vllm:lmcache_mp_failed_loads_total"
FINISHED = "vllm:request_success_total"
RUNNING = "vllm:num_requests_running"

Prompt = str | list[int]


def new_salt() -> str:
    """A `cache_salt` that nobody has used."""
    return f"lmcache verify {secrets.token_hex(8)}"


class VerifyError(Exception):
    """What keeps the answer from being known: one sentence that says what to do."""


@dataclass
class Answer:
    """What came for one prompt, which has the tokens `prompt_ids`. `tops[i]` has the log probabilities of the
    likeliest tokens at position i, the chosen one among them; tokens are named by their id."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    tops: list[dict[str, float]] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    first_token_s: float = 0.0


class Engine:
    """vLLM at `url`, with or without a final /v1. Raises VerifyError whenever it does not do as asked."""

    def __init__(self, url: str, model: str | None, api_key: str | None, timeout_s: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise VerifyError(f"{url!r} is no address: give vLLM's, as http://127.0.0.1:8000")
        self.api_key = api_key or ""
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        with self._told("/v1/models"):
            models = {each["id"]: each for each in json.loads(self._read("/v1/models"))["data"]}
        self.model = model or next(iter(models), "")
        if self.model not in models:
            raise VerifyError(f"vLLM serves no model {self.model!r}, but {', '.join(models) or 'none'}")
        self.max_tokens = int(models[self.model].get("max_model_len") or 0)

    def ask(self, prompt: Prompt, max_tokens: int, salt: str = "") -> Answer:
        """Stream the completion at temperature 0. What is cached under one salt is unknown to others."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": NUM_TOP,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "stream": True,
        }
        if salt:
            body["cache_salt"] = salt
        answer = Answer()
        start_s = time.perf_counter()
        with self._open("/v1/completions", body) as response, self._told("/v1/completions"):
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    _add(answer, json.loads(data), time.perf_counter() - start_s)
        if not answer.tokens:
            raise VerifyError("vLLM ended a completion without a token; its log says why")
        return answer

    def reset_prefix_cache(self) -> None:
        """Make vLLM forget its own prefix cache alone. Waits for stores that still hold blocks of it."""
        end_s = time.monotonic() + RESET_TIMEOUT_S
        while time.monotonic() < end_s:
            with self._told("/reset_prefix_cache"):
                if json.loads(self._read("/reset_prefix_cache", {}))["success"]:
                    return
            time.sleep(0.05)
        raise VerifyError(
            f"vLLM did not reset its prefix cache within {RESET_TIMEOUT_S:.0f} s: let it finish its requests"
        )

    def counters(self) -> dict[str, float]:
        """Each series of /metrics by its name, added up over its labels."""
        totals: dict[str, float] = {}
        for line in self._read("/metrics").splitlines():
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name = series.partition("{")[0]
                with contextlib.suppress(ValueError):
                    totals[name] = totals.get(name, 0.0) + float(value)
        if LOADED_TOKENS not in totals:
            raise VerifyError(
                f"vLLM at {self.url} does not use this cache: start it with --kv-transfer-config "
                '\'{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}\''
            )
        return totals

    def _read(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        with self._open(path, body) as response, self._told(path):
            content: bytes = response.read()
        return content.decode(errors="replace")

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        with self._told(path):
            return urllib.request.urlopen(request, timeout=self._timeout_s)

    @contextlib.contextmanager
    def _told(self, path: str) -> Any:
        try:
            yield
        except urllib.error.HTTPError as error:
            if error.code == 404 and path == "/reset_prefix_cache":
                raise VerifyError(
                    "vLLM has no /reset_prefix_cache: start it with VLLM_SERVER_DEV_MODE=1 in its environment"
                ) from None
            if error.code == 401:
                raise VerifyError("vLLM wants an API key: give it with --api-key") from None
            said = error.read(2000).decode(errors="replace")
            raise VerifyError(f"vLLM answered {path} with {error.code}: {said}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise VerifyError(f"vLLM at {self.url} does not answer {path}: {reason}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise VerifyError(f"what answers {self.url}{path} is not vLLM: {error!r}") from None


def _add(answer: Answer, event: dict[str, Any], after_s: float) -> None:
    if "error" in event:
        raise VerifyError(f"vLLM failed: {event['error']}")
    for choice in event["choices"]:
        answer.prompt_ids = choice.get("prompt_token_ids") or answer.prompt_ids
        found = choice.get("logprobs") or {}
        if found.get("tokens"):
            answer.first_token_s = answer.first_token_s or after_s
            answer.tokens += found["tokens"]
            for top in found["top_logprobs"]:
                answer.tops.append(
                    {token: NO_NUMBER if each is None else each for token, each in top.items()}
                )
        answer.text += choice["text"]
