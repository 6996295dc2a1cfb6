"""HTTP: what each page says, also when the event loop does not answer or clients misbehave."""

import asyncio
import contextlib
import gc
import http.client
import logging
import re
import socket
import threading
import time

import pytest
import uvloop
from harness.waiting import PATIENCE_S, timed, wait_until

from lmcache_server.admin import http as pages
from lmcache_server.errors import StartError
from lmcache_server.telemetry.metrics import CONTENT_TYPE


async def selftest():
    return pages.as_json({"ok": False}, 503)


ROUTES = {
    "/": lambda: pages.PAGE,
    "/metrics": lambda: pages.Answer(b"lmcache_chunks 0\n", CONTENT_TYPE),
    "/healthz": lambda: pages.text("ok"),
    "/readyz": lambda: pages.text("ok"),
    "/status": lambda: pages.as_json({}),
    "/selftest": selftest,
}


class Loop:
    """An event loop in a thread of its own, as a server of which nobody else is asked."""

    def __init__(self, server):
        self.server = server
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def call(self, function, *arguments):
        async def called():
            result = function(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(PATIENCE_S)

    def end(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextlib.contextmanager
def serving(routes=ROUTES, host="127.0.0.1"):
    server = pages.Server(host, 0)
    loop = Loop(server)
    loop.call(server.start, routes)
    try:
        yield server
        loop.call(server.stop)
    finally:
        loop.end()
        server.close()


@pytest.fixture
def server():
    with serving() as server:
        yield server


def address(server):
    host, port = re.fullmatch(r"http://\[?(.+?)\]?:(\d+)", server.url).groups()
    return host, int(port)


def connected(server):
    return socket.create_connection(address(server), timeout=PATIENCE_S)


def say(server, request):
    """Everything that a client hears which says this and nothing more."""
    with connected(server) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").read()


def get(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(*address(server), timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, headers={name.replace("_", "-"): headers[name] for name in headers})
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read()


def test_each_page_is_there_to_be_read(server):
    text = "text/plain; charset=utf-8"
    metrics = b"lmcache_chunks 0\n"
    assert get(server, "/metrics") == (200, "text/plain; version=0.0.4; charset=utf-8", metrics)
    assert get(server, "/status") == (200, "application/json", b"{}")
    assert get(server, "/readyz?verbose") == (200, text, b"ok\n")
    assert get(server, "/selftest") == (503, "application/json", b'{"ok": false}')
    status, kind, body = get(server, "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert body.startswith(b"<!doctype html>")
    status, _, body = get(server, "/nothing")
    assert (status, body) == (404, f"not found: lmcache server: {' '.join(ROUTES)}\n".encode())
    assert get(server, "/../etc/passwd")[0] == 404
    # Only to read.
    assert get(server, "/status", "HEAD") == (200, "application/json", b"")
    for method in ("POST", "DELETE", "OPTIONS", "MAKE"):
        code, kind, body = get(server, "/status", method)
        assert (code, kind) == (405, "text/plain; charset=utf-8")
        assert body == b"this server is read-only: use GET or HEAD\n"


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"\xff\x00 / \r\n\r\n", 400),
        (b"GET /" + b"x" * pages.MAX_HEAD_BYTES + b" HTTP/1.0\r\n\r\n", 431),
        (b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 200_000 + b"\r\n", 431),
        (b"GET /healthz HTTP/1.0\r\n\r\n" + b"x" * 1_000_000, 200),
        (b"POST /healthz HTTP/1.1\r\n\r\n" + b"x" * 1_000_000, 405),
    ],
    ids=lambda value: value if isinstance(value, int) else value[:12].decode("latin-1"),
)
def test_what_is_no_request_is_told_so(server, request_, code):
    answer = say(server, request_)
    assert answer.startswith(b"HTTP/1.1 %d " % code)
    assert answer.endswith(b"\n")


def test_a_client_that_sends_nothing_more_gets_all_of_a_long_answer():
    long = pages.Answer(b"x" * 10_000_000)
    with serving({"/": lambda: long}) as server:
        assert say(server, b"GET / HTTP/1.0\r\n\r\n").endswith(long.body)


def test_a_page_of_another_name_cannot_read(server):
    """A stranger's page may have its own name lead here (DNS rebinding); it says so in Host."""
    port = address(server)[1]
    for host in ("127.0.0.1", f"127.0.0.1:{port}", "10.1.2.3", "[::1]:8080", "localhost", "LOCALHOST:1"):
        assert get(server, "/status", Host=host)[0] == 200, host
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "evil", "[", "a@b.c"):
        code, _, body = get(server, "/status", Host=host)
        assert (code, b"--http-host" in body) == (403, True), host
    answer = say(server, b"GET /status HTTP/1.0\r\n\r\n")
    assert answer.endswith(b"{}"), "old clients and probes send no Host"
    # Other machines may use a name without a dot, and the one that was given.
    with serving(host="0.0.0.0") as server:
        assert get(server, "/status", Host="lmcache:8080")[0] == 200, "as Prometheus does beside a container"
        assert get(server, "/status", Host="lmcache.evil.example")[0] == 403
        server._names.add("cache.example")
        assert get(server, "/status", Host="cache.example:8080")[0] == 200


def test_a_page_of_another_site_cannot_start_a_test(server):
    for site in ("cross-site", "same-site"):  # the latter: a page of another port of this machine
        assert get(server, "/selftest", Sec_Fetch_Site=site)[0] == 403
    assert get(server, "/selftest", Sec_Fetch_Site="same-origin")[0] == 503
    assert get(server, "/status", Sec_Fetch_Site="cross-site")[0] == 200, "as by a link"


def test_the_page_is_one_file_may_load_nothing_and_no_answer_is_kept(server):
    connection = http.client.HTTPConnection(*address(server), timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("GET", "/")
        headers = connection.getresponse().headers
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    page = pages.PAGE.body.decode()
    assert len(page.splitlines()) <= 400
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|<script .|@import|url\(", page
    )
    addresses = set(re.findall(r"[a-z]+://[^'\"` ]*", page))
    assert addresses == {"http://www.w3.org/2000/svg", "tcp://${host}"}, "of namespaces and of examples only"


def test_a_page_that_fails_is_503_and_the_next_is_answered(caplog):
    def broken():
        raise RuntimeError("a fault")

    with serving({**ROUTES, "/status": broken}) as server, caplog.at_level(logging.ERROR):
        assert get(server, "/status")[::2] == (503, b"the server failed on this page; its log says why\n")
        assert get(server, "/healthz")[0] == 200
    assert "/status failed" in caplog.text
    assert "a fault" in caplog.text


def test_a_loop_that_hangs_does_not_answer():
    reached, go_on = threading.Event(), threading.Event()

    def hang():
        reached.set()
        assert go_on.wait(PATIENCE_S)
        return pages.text("late")

    with serving({**ROUTES, "/status": hang}) as server:
        with connected(server) as slow, connected(server) as probe:
            slow.sendall(b"GET /status HTTP/1.0\r\n\r\n")
            assert reached.wait(PATIENCE_S)
            probe.settimeout(0.3)
            probe.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            with pytest.raises(TimeoutError):
                probe.recv(1)
        go_on.set()
        assert get(server, "/healthz")[0] == 200


def test_before_it_is_started_its_port_is_taken_and_nothing_is_answered():
    server = pages.Server("127.0.0.1", 0)
    port = address(server)[1]
    with pytest.raises(StartError) as caught:
        pages.Server("127.0.0.1", port)
    assert f"127.0.0.1:{port} for HTTP: address already in use" in str(caught.value)
    assert "--http-port" in str(caught.value)
    with connected(server) as early:
        early.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        early.settimeout(0.2)
        with pytest.raises(TimeoutError):
            early.recv(1)
    server.close()


@pytest.mark.parametrize("host", ["a" * 100 + ".example", "\udcff", "a\0b", "no.such.host.invalid"])
def test_what_is_no_name_of_a_host_is_one_sentence(host):
    with pytest.raises(StartError, match=r"cannot listen on .*:1 for HTTP") as caught:
        pages.Server(host, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback")
    with serving(host="[::1]") as server:
        assert server.url.startswith("http://[::1]:")
        assert get(server, "/healthz")[0] == 200


def test_silent_clients_give_way_and_do_not_delay_the_end(monkeypatch):
    monkeypatch.setattr(pages, "TIMEOUT_S", 1000.0)
    with contextlib.ExitStack() as stack, serving() as server:
        silent = [stack.enter_context(connected(server)) for _ in range(pages.MAX_CONNECTIONS + 5)]
        assert [each.recv(1) for each in silent[:5]] == [b""] * 5, "the oldest gave way"
        assert get(server, "/healthz")[0] == 200
        assert len(server._connections) <= pages.MAX_CONNECTIONS


def test_connections_that_drip_do_not_keep_probes_away(server, monkeypatch):
    """A byte now and then on every connection that may be, and a new one for each that is ended."""
    monkeypatch.setattr(pages, "TIMEOUT_S", 2.0)
    with contextlib.ExitStack() as stack:
        ended = threading.Event()

        def drip():
            while not ended.is_set():
                with contextlib.suppress(OSError), connected(server) as connection:
                    while not ended.is_set():
                        connection.sendall(b"G")
                        ended.wait(0.1)

        threads = [threading.Thread(target=drip) for _ in range(pages.MAX_CONNECTIONS)]
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.callback(ended.set)
        for thread in threads:
            thread.start()
        wait_until(lambda: len(server._connections) >= pages.MAX_CONNECTIONS)
        for _ in range(40):
            assert get(server, "/healthz")[0] == 200


def test_a_request_has_5_seconds_whatever_comes_in_meanwhile(server, monkeypatch):
    monkeypatch.setattr(pages, "TIMEOUT_S", 0.5)
    with connected(server) as slow:
        slow.settimeout(0.05)

        def is_ended():
            with contextlib.suppress(TimeoutError):
                slow.sendall(b"G")
                return slow.recv(1) == b""
            return False

        def wait() -> None:
            with contextlib.suppress(ConnectionError):
                wait_until(is_ended, what="the server ends the connection")

        assert timed(wait)[1] > 0.4


def test_a_request_that_came_while_the_server_stood_still_is_answered(monkeypatch):
    monkeypatch.setattr(pages, "TIMEOUT_S", 1.0)
    stands_still, goes_on = threading.Event(), threading.Event()

    def stand_still():
        stands_still.set()
        assert goes_on.wait(PATIENCE_S)
        return pages.text("ok")

    with serving({**ROUTES, "/still": stand_still}) as server, connected(server) as client:
        wait_until(lambda: server._connections)
        with connected(server) as other:
            other.sendall(b"GET /still HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert stands_still.wait(PATIENCE_S)
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            time.sleep(2 * pages.TIMEOUT_S)
            goes_on.set()
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")


def test_who_does_not_read_is_ended(monkeypatch):
    monkeypatch.setattr(pages, "TIMEOUT_S", 0.5)
    long = pages.Answer(b"x" * 50_000_000)
    with serving({"/": lambda: long}) as server, connected(server) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        wait_until(lambda: server._connections, what="the connection is there")
        wait_until(lambda: not server._connections, what="the connection is ended")


def test_another_machine_has_a_few_connections_and_others_are_not_touched():
    class Task:
        cancelled = False

        def cancel(self):
            self.cancelled = True

    with contextlib.closing(pages.Server("127.0.0.1", 0)) as server:
        before = []
        for peer in ["10.0.0.2"] + ["10.0.0.1"] * 8 + ["127.0.0.1"] * 12:
            server._make_room(peer)
            before.append(Task())
            server._connections[before[-1]] = peer
        assert not any(task.cancelled for task in before)
        server._make_room("10.0.0.1")
        assert [task for task in before if task.cancelled] == [before[1]], "the oldest of its own"
        assert len(server._connections) == len(before) - 1


def test_requests_that_break_off_leave_nothing_to_the_garbage_collector(monkeypatch):
    """The server freezes its objects once a second, so cycles that a request leaves would stay for ever."""
    monkeypatch.setattr(pages, "TIMEOUT_S", 0.3)

    def break_off(server, number):
        for _ in range(number):
            for start in (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET "):
                with socket.create_connection(address(server)) as connection:
                    connection.sendall(start)
            with socket.create_connection(address(server)) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1" + bytes(7))
                connection.sendall(b"GET / HT")
            slow.append(socket.create_connection(address(server)))
        wait_until(lambda: not server._connections)

    slow: list[socket.socket] = []
    with serving() as server:
        break_off(server, 5)
        gc.collect()
        gc.disable()
        try:
            break_off(server, 40)
            assert gc.collect() < 200, "some 5,000 with one cycle for each request"
        finally:
            gc.enable()
            for each in slow:
                each.close()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, None])
def test_a_connection_that_comes_as_the_server_stops_is_closed(turns):
    """Whatever the loop had begun with it; None is all. One that is not closed warns as it is collected."""
    with contextlib.ExitStack() as clients, contextlib.closing(pages.Server("127.0.0.1", 0)) as server:

        async def stop():
            client = clients.enter_context(connected(server))
            for _ in range(turns or 0):
                await asyncio.sleep(0)
            while turns is None and not server._connections:
                await asyncio.sleep(0)
            await server.stop()
            return client

        loop = Loop(server)
        try:
            loop.call(server.start, ROUTES)
            client = loop.call(stop)
            assert turns is not None or client.recv(1) == b""
        finally:
            loop.end()
    gc.collect()
