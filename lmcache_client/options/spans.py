"""Spans of what the cache does for a request, in vLLM's own trace of that request (OpenTelemetry)."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.tracing import extract_trace_context, instrument_manual

from lmcache_client.connector.option import Engine, Option
from lmcache_client.connector.request import Asking, Tracked, fits, why_not_more
from lmcache_client.contract.messages import Found

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Spans(Option):
    """Hands spans to vLLM, which sends them to its `--otlp-traces-endpoint`. A request has spans if its
    client sent a `traceparent` header: without it, nobody here knows vLLM's own span of the request."""

    def __init__(self, engine: Engine, wanted: Any) -> None:
        self._groups = engine.groups

    @classmethod
    def wanted(cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> bool:
        return bool(vllm_config.observability_config.otlp_traces_endpoint)

    def began(self, tracked: Tracked, hints: Mapping[str, Any]) -> None:
        tracked.why = bool(tracked.request.trace_headers)

    def answered(self, tracked: Tracked, asked: Asking, now_s: float) -> None:
        found = asked.lookup.reply
        attributes: dict[str, object] = {"error": str(asked.lookup.error)}
        if isinstance(found, Found):
            attributes = {"computed_tokens": asked.computed, "resume_tokens": found.resume_tokens}
            attributes["l1_tokens"] = found.l1_tokens
            if fits(found, self._groups, tracked.chunk_size, asked.limit):
                attributes["why"] = why_not_more(self._groups, tracked.chunk_size, found, asked)
            attributes |= {f"missed_tokens.{reason}": number for reason, number in found.missed}
        self._add(tracked, "lookup", now_s - asked.since_s, attributes)

    def loading(self, tracked: Tracked, since_s: float, now_s: float) -> None:
        self._add(tracked, "wait", now_s - since_s, {})

    def loaded(self, tracked: Tracked, tokens: int, outcome: str, since_s: float, now_s: float) -> None:
        self._add(tracked, "load", now_s - since_s, {"tokens": tokens, "outcome": outcome})

    def settled(self, requests: Sequence[Tracked], seconds: float) -> None:
        for tracked in {each.request.request_id: each for each in requests}.values():
            self._add(tracked, "store", seconds, {})

    @staticmethod
    def _add(tracked: Tracked, what: str, seconds: float, attributes: Mapping[str, object]) -> None:
        """A span `lmcache.{what}` that ends now."""
        if headers := tracked.request.trace_headers:
            end_ns = time.time_ns()
            named = {f"lmcache.{name}": value for name, value in attributes.items()}
            context = extract_trace_context(headers)
            instrument_manual(f"lmcache.{what}", end_ns - int(seconds * 1e9), end_ns, named, context)


OPTION = Spans
