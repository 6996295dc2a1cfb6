"""HTTP for people and monitoring: GET and HEAD of a few pages, on threads that own nothing.

What the pages say is asked of the event loop, which owns all state.
"""

import http.server
import logging
import os
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from lmcache_client.contract.endpoint import host_name
from lmcache_server.config import StartError

logger = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 16
POLL_INTERVAL_S = 0.1

Ask = Callable[[str], bytes]

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TEXT_TYPE = "text/plain; charset=utf-8"
_INDEX = b"""lmcache server
/metrics  Prometheus metrics
/healthz  200 while the server answers
/readyz   200 while it can serve
/status   what it holds (JSON)
"""

_PAGES = {
    "/metrics": ("metrics", _METRICS_TYPE),
    "/status": ("status", "application/json"),
    "/healthz": ("health", _TEXT_TYPE),
    "/healthcheck": ("health", _TEXT_TYPE),
    "/readyz": ("ready", _TEXT_TYPE),
}


class Server(http.server.ThreadingHTTPServer):
    """A bound HTTP server; see `bind`."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.ask: Ask | None = None
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._thread: threading.Thread | None = None
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if self.address_family == socket.AF_INET6 else f"{host!s}"
        return f"http://{name}:{port}"

    def start(self, ask: Ask) -> None:
        """Serves on a thread of its own. `ask(what)`, for what in metrics, status, health and ready, is
        called on other threads and returns a page; ready is empty while there is nothing to serve from.
        It raises TimeoutError when the event loop does not answer in time."""
        self.ask = ask
        self._thread = threading.Thread(
            target=self.serve_forever, args=(POLL_INTERVAL_S,), name="http", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Takes no more connections; does not wait for those that are open."""
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
            self._thread = None

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the DNS for this machine's name.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "lmcache", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("HTTP client %s", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = CLIENT_TIMEOUT_S
    server_version = "lmcache"
    sys_version = ""
    server: Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer(200, _INDEX, _TEXT_TYPE)
        elif path in _PAGES:
            self._page(*_PAGES[path])
        else:
            self._answer(404, b"not found; / lists what there is\n", _TEXT_TYPE)

    do_HEAD = do_GET

    def _page(self, what: str, content_type: str) -> None:
        ask = self.server.ask
        try:
            page = ask(what) if ask is not None else b""
        except Exception as error:  # a timeout, a loop that has ended, or a fault in the page: all 503
            logger.warning("HTTP %s: %s", what, repr(error))
            self._answer(503, b"the server does not answer\n", _TEXT_TYPE)
            return
        if not page:
            self._answer(503, b"not ready\n", _TEXT_TYPE)
        else:
            self._answer(200, page, content_type)

    def _answer(self, code: int, body: bytes, content_type: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("HTTP %s: " + format, self.client_address[0], *args)


def bind(host: str, port: int) -> Server:
    """A server that listens on `host` and `port` (0: a free one) and answers once started.

    Raises StartError.
    """
    try:
        return Server(host_name(host), port)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
        raise StartError(
            f"cannot serve HTTP on {host}:{port}: {reason}; "
            "stop what uses it, or choose another --http-port or --http-host"
        ) from error
