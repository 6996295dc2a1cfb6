"""HTTP: what each page says, also when the event loop does not answer or clients misbehave."""

import contextlib
import http.client
import socket
import time

import pytest

from lmcache_server import http as pages
from lmcache_server.config import StartError

PAGES = {"metrics": b"lmcache_chunks 0\n", "status": b"{}", "health": b"ok", "ready": b"ok"}


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
        assert get(server, "/metrics") == (200, "text/plain; version=0.0.4; charset=utf-8", PAGES["metrics"])
        assert get(server, "/status") == (200, "application/json", b"{}")
        assert get(server, "/healthz") == get(server, "/healthcheck") == (200, text, b"ok")
        assert get(server, "/readyz?verbose") == (200, text, b"ok")
        status, _, body = get(server, "/")
        assert status == 200
        assert b"/metrics" in body
        assert get(server, "/nothing")[0] == 404
        assert get(server, "/../etc/passwd")[0] == 404


def test_only_get_and_head():
    with serving() as server:
        assert get(server, "/status", "HEAD") == (200, "application/json", b"")
        assert get(server, "/status", "POST")[0] == 501


def test_not_ready_is_503():
    with serving(lambda _what: b"") as server:
        assert get(server, "/readyz")[0] == 503


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
