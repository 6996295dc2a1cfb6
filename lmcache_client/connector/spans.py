"""Spans of what the cache does for a request, in vLLM's own trace of that request (OpenTelemetry)."""

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm.tracing import extract_trace_context, instrument_manual

from lmcache_client.connector.request import Asking
from lmcache_client.contract.messages import Found

if TYPE_CHECKING:
    from vllm.v1.request import Request

Headers = Mapping[str, str]


class Spans:
    """Hands spans to vLLM, which sends them to its `--otlp-traces-endpoint`. A request has spans if its
    client sent a `traceparent` header: without it, nobody here knows vLLM's own span of the request."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._stores: dict[int, list[Headers]] = {}
        """The requests of the stores that are under way, by job."""

    def has(self, request: "Request") -> bool:
        return self._is_on and bool(request.trace_headers)

    def add(self, request: "Request", what: str, since_s: float, now_s: float, **attributes: object) -> None:
        """A span `lmcache.{what}` that ends now. The times are those of one clock, whichever it is."""
        if self.has(request):
            _span(request.trace_headers, what, now_s - since_s, attributes)

    def looked_up(self, request: "Request", asked: Asking, now_s: float) -> None:
        """A lookup has ended, with an answer or an error."""
        found = asked.lookup.reply
        attributes: dict[str, object] = {"error": str(asked.lookup.error)}
        if isinstance(found, Found):
            attributes = {"computed_tokens": asked.computed, "resume_tokens": found.resume_tokens}
            attributes |= {f"missed_tokens.{reason}": number for reason, number in found.missed}
        self.add(request, "lookup", asked.since_s, now_s, **attributes)

    def storing(self, job_id: int, requests: Iterable["Request"]) -> None:
        if self._is_on:
            unique = {request.request_id: request.trace_headers for request in requests}
            self._stores[job_id] = [headers for headers in unique.values() if headers]

    def settled(self, job_id: int, seconds: float) -> None:
        """A job has ended. If it was a store, each of its requests gets a span of so many seconds."""
        for headers in self._stores.pop(job_id, ()):
            _span(headers, "store", seconds, {})


def _span(headers: Headers, what: str, seconds: float, attributes: Mapping[str, object]) -> None:
    end_ns = time.time_ns()
    named = {f"lmcache.{name}": value for name, value in attributes.items()}
    context = extract_trace_context(headers)
    instrument_manual(f"lmcache.{what}", end_ns - int(seconds * 1e9), end_ns, named, context)
