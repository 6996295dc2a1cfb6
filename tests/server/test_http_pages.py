"""HTTP: what each page says, also when the event loop does not answer or clients misbehave."""

import contextlib
import http.client
import re
import socket
import time

import pytest

from lmcache_server.admin import http as pages
from lmcache_server.errors import StartError

PAGES = {
    "metrics": (200, b"lmcache_chunks 0\n"),
    "status": (200, b"{}"),
    "history": (200, b"[]"),
    "health": (200, b"ok"),
    "ready": (200, b"ok"),
    "selftest": (503, b'{"ok": false}'),
}


@contextlib.contextmanager
def serving(ask=PAGES.__getitem__, host="127.0.0.1"):
    server = pages.bind(host, 0)
    server.start(ask)
    try:
        yield server
    finally:
        server.stop()
        server.server_close()


def get(server, path, method="GET"):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=5)
    with contextlib.closing(connection):
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read()


def test_each_page():
    text = "text/plain; charset=utf-8"
    with serving() as server:
        metrics = b"lmcache_chunks 0\n"
        assert get(server, "/metrics") == (200, "text/plain; version=0.0.4; charset=utf-8", metrics)
        assert get(server, "/status") == (200, "application/json", b"{}")
        assert get(server, "/healthz") == get(server, "/healthcheck") == (200, text, b"ok")
        assert get(server, "/readyz?verbose") == (200, text, b"ok")
        assert get(server, "/history") == (200, "application/json", b"[]")
        assert get(server, "/selftest") == (503, "application/json", b'{"ok": false}')
        status, kind, body = get(server, "/")
        assert (status, kind) == (200, "text/html; charset=utf-8")
        assert body.startswith(b"<!doctype html>")
        status, _, body = get(server, "/nothing")
        assert (status, body) == (
            404,
            b"not found: lmcache server: / " + " ".join(pages._PATHS).encode() + b"\n",
        )
        assert get(server, "/../etc/passwd")[0] == 404


def test_only_get_and_head():
    with serving() as server:
        assert get(server, "/status", "HEAD") == (200, "application/json", b"")
        for method in ("POST", "DELETE", "OPTIONS", "MAKE"):
            code, kind, body = get(server, "/status", method)
            assert (code, kind) == (405, "text/plain; charset=utf-8")
            assert body == b"nothing can be changed here: only GET and HEAD\n"


def test_what_is_no_request_is_told_so():
    with serving() as server:
        for request in (
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /" + b"x" * 70_000 + b" HTTP/1.0\r\n\r\n",
        ):
            with socket.create_connection(server.server_address[:2], timeout=5) as connection:
                connection.sendall(request)
                assert connection.makefile("rb").read().endswith(b"\n")


def test_no_answer_is_kept_and_the_page_may_load_nothing():
    with serving() as server:
        connection = http.client.HTTPConnection(*server.server_address[:2], timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", "/")
            headers = connection.getresponse().headers
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_the_page_is_one_file():
    page = pages._PAGE.decode()
    assert len(page.splitlines()) <= 400
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|<script .|@import|url\(", page
    )
    addresses = set(re.findall(r"[a-z]+://[^'\"` ]*", page))
    assert addresses == {"http://www.w3.org/2000/svg", "tcp://${host}"}, "of namespaces and of examples only"


def test_not_ready_says_why():
    with serving(lambda _what: (503, b"why\n")) as server:
        assert get(server, "/readyz") == (503, "text/plain; charset=utf-8", b"why\n")


def test_a_loop_that_does_not_answer_is_503():
    def ask(_what):
        raise TimeoutError

    with serving(ask) as server:
        status, _, body = get(server, "/healthz")
        assert status == 503
        assert body


def test_before_it_is_started_it_is_not_ready():
    server = pages.bind("127.0.0.1", 0)
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}"
    server.stop()
    server.server_close()


def test_a_port_in_use_is_one_sentence():
    with serving() as server:
        port = server.server_address[1]
        with pytest.raises(StartError) as caught:
            pages.bind("127.0.0.1", port)
    assert f"127.0.0.1:{port} for HTTP: address already in use" in str(caught.value)
    assert "--http-port" in str(caught.value)


def test_an_unknown_host_is_one_sentence():
    with pytest.raises(StartError, match=r"cannot listen on no\.such\.host\.invalid:1 for HTTP"):
        pages.bind("no.such.host.invalid", 1)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback")
    with serving(host="[::1]") as server:
        assert server.url.startswith("http://[::1]:")
        assert get(server, "/healthz")[0] == 200


def test_silent_clients_neither_use_up_threads_nor_delay_the_end():
    with serving() as server, contextlib.ExitStack() as stack:
        for _ in range(pages.MAX_CONNECTIONS + 5):
            stack.enter_context(socket.create_connection(server.server_address[:2], timeout=5))
        extra = stack.enter_context(socket.create_connection(server.server_address[:2], timeout=5))
        assert extra.recv(1) == b""  # turned away
        started_s = time.monotonic()
        server.stop()
        assert time.monotonic() - started_s < 2.0
