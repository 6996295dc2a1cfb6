"""HTTP for people and machines that watch: a status page at /, and what _PATHS lists. Read-only.

It runs on threads of its own and asks the event loop for what it shows, so an answer also says that the
loop turns. The page has no part of its own elsewhere: its policy allows no other script, style or address.
"""

import base64
import hashlib
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lmcache_client.contract.endpoint import host_name
from lmcache_server.errors import StartError

Ask = Callable[[str], tuple[int, bytes]]
REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 32
RETRY_S = 0.1

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_PATHS = {
    "/metrics": ("metrics", "text/plain; version=0.0.4; charset=utf-8"),
    "/healthz": ("health", _TEXT),
    "/healthcheck": ("health", _TEXT),
    "/readyz": ("ready", _TEXT),
    "/status": ("status", _JSON),
    "/history": ("history", _JSON),
    "/selftest": ("selftest", _JSON),
}
_INDEX = f"lmcache server: / {' '.join(_PATHS)}\n".encode()
_PAGE = Path(__file__).with_name("page.html").read_bytes()


def _policy(page: bytes) -> str:
    """The Content-Security-Policy of a page that needs nothing but its own script and style."""

    def hashes(tag: bytes) -> str:
        bodies = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(body).digest()).decode() for body in bodies)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes(b'script')}; style-src {hashes(b'style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_HEADERS = {
    "Allow": "GET, HEAD",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": _policy(_PAGE),
}


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT_S
    server_version = "lmcache"
    sys_version = ""
    server: "Server"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer(200, "text/html; charset=utf-8", _PAGE)
        elif path not in _PATHS:
            self._answer(404, _TEXT, b"not found: " + _INDEX)
        else:
            what, kind = _PATHS[path]
            try:
                code, body = self.server.ask(what)
            except Exception:  # the loop does not turn, or the server is ending
                code, kind, body = 503, _TEXT, b"the event loop does not answer\n"
            self._answer(code, kind, body)

    do_HEAD = do_GET

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        if code == 501:
            code, message = 405, "nothing can be changed here: only GET and HEAD"
        self._answer(code, _TEXT, f"{message or 'bad request'}\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """No line per request."""


class Server(ThreadingHTTPServer):
    """Bound, and with `start` serving. At most MAX_CONNECTIONS at a time; more are turned away."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.ask: Ask = lambda _what: (503, b"the server is starting\n")
        self._slots = threading.Semaphore(MAX_CONNECTIONS)
        self._thread: threading.Thread | None = None
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if self.address_family == socket.AF_INET6 else f"{host!s}"
        return f"http://{name}:{port}"

    def start(self, ask: Ask) -> None:
        """Serve; `ask(what)` gives code and body for each name in _PATHS, in the thread of a request."""
        self.ask = ask
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self.shutdown()
            self._thread.join()

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the DNS for the name of this machine and may wait for it.
        socketserver.TCPServer.server_bind(self)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            # Without a descriptor for it the connection goes on waiting, and would be tried at once again.
            time.sleep(RETRY_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        # Waiting here would stop the accepting thread, and with it the end of the server.
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that breaks off is no event."""


def bind(host: str, port: int) -> Server:
    """Raises StartError when the address cannot be had."""
    try:
        return Server(host_name(host), port)
    except OSError as error:
        raise StartError(
            f"cannot listen on {host}:{port} for HTTP: {(error.strerror or str(error)).lower()}; "
            "stop what uses it, or choose another --http-port"
        ) from error
