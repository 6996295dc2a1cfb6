"""The spans that the cache adds to vLLM's traces, as a collector gets them."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from harness.engine import Engine
from harness.prompts import prompt
from harness.served import served
from harness.server import LMCacheServer
from harness.waiting import wait_until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CACHED = prompt(700, 1)


class Received(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that keeps the spans of the cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            self._spans += [
                span
                for resource in request.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
                if span.name.startswith("lmcache.")
            ]
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[Any]:
        with self._lock:
            return sorted(self._spans, key=lambda span: (span.end_time_unix_nano, span.name))

    def names(self) -> list[str]:
        return [span.name for span in self.spans()]


@contextmanager
def collector() -> Iterator[tuple[Received, str]]:
    received, server = Received(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(received, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield received, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def attributes(span: Any) -> dict[str, int | str]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def asked(resume_tokens: int) -> dict[str, int | str]:
    """Without tiers."""
    tokens = {"computed": 0, "resume": resume_tokens, "l1": resume_tokens}
    return {f"lmcache.{name}_tokens": number for name, number in tokens.items()}


def test_lookup_wait_load_and_store_are_in_the_trace_of_the_request(server: LMCacheServer) -> None:
    began_ns = time.time_ns()
    with collector() as (received, endpoint):
        env = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
        with Engine(
            "gemma3", server=server, otlp_traces_endpoint=endpoint, multiprocessing=True, env=env
        ) as engine:
            cold = engine.run(CACHED, trace=f"00-{TRACE}-{PARENT}-01")
            wait_until(lambda: received.names() == ["lmcache.lookup", *["lmcache.store"] * 2])
            loaded = served(engine, CACHED, 512, trace=f"00-{TRACE}-{PARENT}-01")
            assert loaded.output == cold.output
            wait_until(lambda: "lmcache.load" in received.names())
            assert engine.reset_prefix_cache()
            engine.run(CACHED)
    spans = received.spans()
    assert [span.name for span in spans[3:6]] == ["lmcache.lookup", "lmcache.wait", "lmcache.load"]
    for span in spans:
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT), (
            "without a header, no span"
        )
        assert began_ns <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
    assert attributes(spans[0]) == asked(resume_tokens=0) | {
        "lmcache.missed_tokens.not_stored": 512,
        "lmcache.why": "group 0 (sliding_window) ends at 0, group 1 (sliding_window) ends at 0, "
        "group 2 (full) ends at 0",
    }
    assert attributes(spans[3]) == asked(resume_tokens=512) | {"lmcache.why": ""}
    assert attributes(spans[5]) == {"lmcache.tokens": 512, "lmcache.outcome": "ended"}
