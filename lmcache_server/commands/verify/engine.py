"""A running vLLM, used over its OpenAI API.

Interfaces: vLLM 0.32, entrypoints/openai/completion and entrypoints/serve/dev.
"""

import contextlib
import http.client
import json
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcache_client.contract.endpoint import is_loopback
from lmcache_server.errors import CommandError
from lmcache_server.service.requests_of_tests import VERIFY

NUM_TOP = 5
"""The number of tokens whose log probabilities are compared at each position."""
LOAD = "lmcache.load"
"""The connector's hint of a request that should load nothing."""
NO_NUMBER = -9999.0
"""vLLM's value for minus infinity. It also stands for null, which vLLM sends for NaN; wrong pages can cause
NaN."""
RESET_TIMEOUT_S = 60.0
LOADED_TOKENS = "vllm:lmcache_mp_loaded_tokens_total"
"""The counter of tokens that vLLM loaded from the server."""
OWN_TOKENS = "vllm:prefix_cache_hits_total"
"""Tokens that vLLM found in its own prefix cache."""
FINISHED, RUNNING = "vllm:request_success_total", "vllm:num_requests_running"
DRAFTS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
"""Of the tokens that a drafter guessed (DRAFTS), those that the model accepted."""
RESET = "/reset_prefix_cache"
_ADVICE: dict[Any, str] = {
    401: "vLLM wants an API key: pass it with --api-key",
    (404, RESET): f"vLLM has no {RESET}: start it with VLLM_SERVER_DEV_MODE=1 in its environment",
}
"""What to do about an HTTP status: from any path, or from one path."""

Prompt = str | list[int]


def new_salt() -> str:
    """A new `cache_salt`, which nobody has used."""
    return f"lmcache verify {secrets.token_hex(8)}"


@dataclass
class Answer:
    """vLLM's answer to a prompt with the tokens `prompt_ids`. `tops[i]` has the log probabilities of the
    likeliest tokens at position i and of the chosen one; tokens are named by their ids."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    tops: list[dict[str, float]] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    first_token_s: float = 0.0


class VllmServer:
    """vLLM at `url`, with or without a final /v1. All methods raise CommandError if a request fails."""

    def __init__(self, url: str, model: str | None, api_key: str | None, timeout_s: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise CommandError(f"{url!r} is not a URL: pass vLLM's, such as http://127.0.0.1:8000")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        with self._opened("/v1/models") as response:
            models = {entry["id"]: entry for entry in json.load(response)["data"]}
            self.model = str(model or next(iter(models), ""))
            own = models.get(self.model, {})
            self.max_tokens = int(own.get("max_model_len") or 0)
            self.root = str(own.get("root") or "")
            """What vLLM was told to load: a name or a path."""
            names = ", ".join(models) or "none"
        if self.model not in models:
            raise CommandError(f"vLLM has no model {self.model!r}: --model can be {names}")

    def ask(
        self, prompt: Prompt, max_tokens: int, salt: str = "", request: str = "", load: bool = True
    ) -> Answer:
        """Stream the completion at temperature 0. Requests with different salts share no cached pages. The
        server counts those with a salt as tests. vLLM's id of the request contains `request`. Without
        `load`, nothing comes from the server."""
        body: dict[str, Any] = {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "logprobs": NUM_TOP, "return_tokens_as_token_ids": True,
            "return_token_ids": True, "stream": True,
        }  # fmt: skip
        headers = {"X-Request-Id": request} if request else {}
        if not load:
            body["kv_transfer_params"] = {LOAD: False}
        if salt:
            body["cache_salt"] = salt
            headers["X-Request-Id"] = VERIFY + secrets.token_hex(8)
        answer = Answer()
        start_s = time.perf_counter()
        with self._opened("/v1/completions", body, headers) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    _add(answer, json.loads(data), time.perf_counter() - start_s)
        if not answer.tokens or not answer.prompt_ids:
            raise CommandError("vLLM ended a completion without a token; its log says why")
        return answer

    def tokens(self, text: str) -> list[int]:
        """The token ids of a prompt. vLLM computes nothing else."""
        with self._opened("/tokenize", {"model": self.model, "prompt": text}) as response:
            return [int(token) for token in json.load(response)["tokens"]]

    def reset_prefix_cache(self) -> None:
        """Make vLLM drop its own prefix cache, not the server's. Waits for stores that still hold blocks."""
        end_s = time.monotonic() + RESET_TIMEOUT_S
        while time.monotonic() < end_s:
            with self._opened(RESET, {}) as response:
                if json.load(response)["success"]:
                    return
            time.sleep(0.05)
        raise CommandError(
            f"vLLM did not reset its prefix cache within {RESET_TIMEOUT_S:.0f} s: let it finish its requests"
        )

    def counters(self) -> Counter[str]:
        """The metrics of vLLM by name, each summed over its labels."""
        totals: Counter[str] = Counter()
        with self._opened("/metrics") as response:
            lines = response.read().decode(errors="replace").splitlines()
        for line in lines:
            series, _, value = line.rpartition(" ")
            with contextlib.suppress(ValueError, OverflowError):
                totals[series.partition("{")[0]] += int(float(value))
        if LOADED_TOKENS not in totals:
            raise CommandError(
                f"vLLM at {self.url} does not use this cache: start it with --kv-transfer-config "
                '\'{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}\''
            )
        return totals

    @contextlib.contextmanager
    def _opened(
        self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[Any]:
        """The response to a request. An error while the caller reads it is also a CommandError."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, {**self._headers, **(headers or {})})
            # A proxy that the user's environment names reaches nothing on this machine.
            is_here = is_loopback(urllib.parse.urlsplit(self.url).hostname or "")
            proxies = urllib.request.ProxyHandler({} if is_here else None)
            try:
                with urllib.request.build_opener(proxies).open(request, timeout=self._timeout_s) as response:
                    yield response
            except urllib.error.HTTPError as error:
                if error.headers.get("Server") == "lmcache":
                    told = f"{self.url} is the HTTP port of lmcache itself: pass vLLM's, such as http://127.0.0.1:8000"
                    raise CommandError(told) from None
                text = f"vLLM answered {path} with {error.code}: {error.read(2000).decode(errors='replace')}"
                raise CommandError(_ADVICE.get((error.code, path)) or _ADVICE.get(error.code, text)) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            reason = getattr(reason, "strerror", None) or reason
            fix = "see whether it runs, or pass the address at which it listens"
            raise CommandError(f"vLLM at {self.url} does not answer {path} ({reason}): {fix}") from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise CommandError(f"the server at {self.url}{path} is not vLLM: {error!r}") from None


def _add(answer: Answer, event: dict[str, Any], after_s: float) -> None:
    if "error" in event:
        raise CommandError(f"vLLM failed: {event['error']}")
    for choice in event["choices"]:
        answer.prompt_ids = list(choice.get("prompt_token_ids") or answer.prompt_ids)
        logprobs = choice.get("logprobs") or {}
        if logprobs.get("tokens"):
            answer.first_token_s = answer.first_token_s or after_s
            answer.tokens += logprobs["tokens"]
            for top in logprobs["top_logprobs"]:
                answer.tops.append(
                    {token: NO_NUMBER if value is None else float(value) for token, value in top.items()}
                )
        answer.text += choice["text"]
