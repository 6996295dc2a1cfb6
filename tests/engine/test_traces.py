"""The spans that the cache adds to vLLM's traces, behind a real collector.

vLLM sends them to Rotel, a collector in a wheel (the extra `deploy`), which sends them on to the test. Where
it is not installed or cannot run, the test itself is the collector.
"""

import importlib.util
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from harness.engine import Engine
from harness.processes import ChildProcess, free_port
from harness.prompts import prompt
from harness.server import LMCacheServer
from harness.stores import connects
from harness.waiting import wait_until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CACHED = prompt(700, 1)


class Received(trace_service_pb2_grpc.TraceServiceServicer):
    """The end of the way; keeps the spans of the cache."""

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
        with rotel(f"http://127.0.0.1:{port}") as endpoint:
            yield received, endpoint
    finally:
        server.stop(None).wait()


@contextmanager
def rotel(target: str) -> Iterator[str]:
    """Where a collector listens that sends its spans to `target`; without one, `target` itself."""
    found = importlib.util.find_spec("rotel")
    program = Path(found.origin).with_name("rotel-agent") if found and found.origin else None
    # It needs the shared library of Python, which not every Python has.
    if program is None or subprocess.run([program, "--help"], capture_output=True, check=False).returncode:
        yield target
        return
    port, http_port = free_port(), free_port()
    grpc_address, http_address = f"127.0.0.1:{port}", f"127.0.0.1:{http_port}"
    listens = ["--otlp-grpc-endpoint", grpc_address, "--otlp-http-endpoint", http_address]
    sends = ["--exporter", "otlp", "--otlp-exporter-endpoint", target, "--batch-timeout", "100ms"]
    with ChildProcess("rotel", [str(program), "start", *listens, *sends]) as process:
        process.wait_until_ready(lambda: connects(port), 30)
        yield f"http://{grpc_address}"
        process.stop(30)


def attributes(span: Any) -> dict[str, int | str]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def asked(resume_tokens: int) -> dict[str, int | str]:
    return {"lmcache.computed_tokens": 0, "lmcache.resume_tokens": resume_tokens}


def test_lookup_wait_load_and_store_are_in_the_trace_of_the_request(server: LMCacheServer) -> None:
    with collector() as (received, endpoint):
        env = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
        with Engine(
            "gemma3", server=server, otlp_traces_endpoint=endpoint, multiprocessing=True, env=env
        ) as engine:
            cold = engine.run(CACHED, trace=f"00-{TRACE}-{PARENT}-01")
            wait_until(lambda: received.names() == ["lmcache.lookup", *["lmcache.store"] * 2], 60)
            assert engine.reset_prefix_cache()
            loaded = engine.run(CACHED, trace=f"00-{TRACE}-{PARENT}-01")
            assert loaded.external_tokens == 512
            assert loaded.output == cold.output
            wait_until(lambda: "lmcache.load" in received.names(), 60)
            assert engine.reset_prefix_cache()
            engine.run(CACHED)
    spans = received.spans()
    assert [span.name for span in spans[3:6]] == ["lmcache.lookup", "lmcache.wait", "lmcache.load"]
    for span in spans:
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT), (
            "without a header, no span"
        )
        assert 0 <= span.end_time_unix_nano - span.start_time_unix_nano < 60e9
    assert attributes(spans[0]) == asked(resume_tokens=0) | {"lmcache.missed_tokens.not_stored": 512}
    assert attributes(spans[3]) == asked(resume_tokens=512)
    assert attributes(spans[5]) == {"lmcache.tokens": 512, "lmcache.outcome": "ended"}
