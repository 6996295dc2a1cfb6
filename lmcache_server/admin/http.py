"""A read-only HTTP server for people and probes, with the status page.

It runs on the server's event loop: if the loop hangs, probes get no answer, as they should. The status page
is one file; its content security policy allows no other script, style or address.
"""

import asyncio
import base64
import contextlib
import errno
import functools
import hashlib
import inspect
import ipaddress
import json
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from email import message_from_string
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from lmcache_client.contract.endpoint import host_name, is_loopback
from lmcache_server.errors import NotNowError, StartError
from lmcache_server.host.machine import page

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""For the client to send its request, and again to take the answer."""
LAST_LOOK_S = 0.1
MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 32
MAX_CONNECTIONS_OF_A_PEER = 8
"""From one address that is not loopback."""
RETRY_S = 0.1


class Answer(NamedTuple):
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    code: int = 200


Routes = Mapping[str, Callable[[], Answer | Awaitable[Answer]]]
"""A function for each path. An async one starts work, so pages of other sites may not call it."""


def text(line: str, code: int = 200) -> Answer:
    return Answer(f"{line}\n".encode(), code=code)


def as_json(value: object, code: int = 200) -> Answer:
    return Answer(json.dumps(value).encode(), "application/json", code)


PAGE = Answer(Path(__file__).with_name("page.html").read_bytes(), "text/html; charset=utf-8")


def _hashes(tag: str) -> str:
    bodies = re.findall(f"<{tag}>(.*?)</{tag}>".encode(), PAGE.body, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(body).digest()).decode() for body in bodies)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


_HEADERS = f"""Server: lmcache\r
Connection: close\r
Allow: GET, HEAD\r
Cache-Control: no-store\r
X-Content-Type-Options: nosniff\r
Referrer-Policy: no-referrer\r
Content-Security-Policy: default-src 'none'; script-src {_hashes("script")}; style-src {_hashes("style")}; \
img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r
"""


class Server:
    """Listens when it is created, so that a port in use is a StartError at once; answers after `start`."""

    def __init__(self, host: str, port: int) -> None:
        name = host_name(host)
        self._names = {"", "localhost", name.lower()}
        self._is_local = is_loopback(host)
        self._routes: Routes = {}
        self._accepting: asyncio.Handle
        self._connections: dict[asyncio.Task[None], str] = {}
        """The peer's address of each connection, the oldest first."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((name, port))
            self._socket.listen(MAX_CONNECTIONS)
        except (OSError, TypeError, ValueError) as error:
            self.close()
            reason = getattr(error, "strerror", None) or str(error)
            fix = "choose another --http-port, above 1023, or another --http-host"
            number = getattr(error, "errno", 0)
            if number == errno.EADDRINUSE:
                program = "another program" if page(name, port) is None else "another lmcache server"
                fix = f"{program} uses this port: choose another --http-port (0 takes a free one)"
            kind = NotNowError if number == errno.EADDRNOTAVAIL else StartError
            raise kind(f"cannot listen on {host}:{port} for HTTP: {reason.lower()}; {fix}") from error
        self._socket.setblocking(False)
        name, port = self._socket.getsockname()[:2]
        self.url = f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"

    def start(self, routes: Routes) -> None:
        """Answer requests from now on, on the running loop."""
        self._routes = routes
        self._accepting = asyncio.get_running_loop().call_soon(self._watch)

    async def stop(self) -> None:
        self._accepting.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        tasks = [*self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self._socket.close()

    def _watch(self) -> None:
        # Not `sock_accept`: cancelled at the wrong moment, it loses the connection that it was just given.
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Take one connection. The rest of the server runs before the next, even if new ones keep coming."""
        loop = asyncio.get_running_loop()
        try:
            connection, (peer, *_) = self._socket.accept()
        except OSError:
            # No descriptor is free. The connection keeps waiting, so do not try again at once.
            loop.remove_reader(self._socket)
            self._accepting = loop.call_later(RETRY_S, self._watch)
            return
        self._make_room(peer)
        task = loop.create_task(self._serve(connection))
        self._connections[task] = peer
        task.add_done_callback(functools.partial(self._ended, connection))

    def _ended(self, connection: socket.socket, task: "asyncio.Task[None]") -> None:
        """Also closes the connection of a task that was cancelled before its first step."""
        connection.close()
        self._connections.pop(task, "")

    def _make_room(self, peer: str) -> None:
        """Drop the oldest connection if there are too many, so that idle ones cannot keep a probe out."""
        same = [task for task, other in self._connections.items() if other == peer]
        too_many = len(same) >= MAX_CONNECTIONS_OF_A_PEER and not is_loopback(peer)
        if too_many or len(self._connections) >= MAX_CONNECTIONS:
            oldest = same[0] if too_many else next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()

    async def _serve(self, connection: socket.socket) -> None:
        """Answer one request. A client that breaks off or is too slow is dropped without a log line.

        It uses neither streams nor `wait_for`: after an error these leave cycles of objects. The server
        freezes its objects, so it would never free such cycles.
        """
        with contextlib.suppress(OSError, EOFError):
            connection.setblocking(False)
            with _Deadline():
                head = await _receive_head(connection)
            answer = text(f"send a request head of at most {MAX_HEAD_BYTES} bytes", 431)
            if len(head) <= MAX_HEAD_BYTES:
                answer = await self._answer(head.decode("latin-1"))
            with _Deadline():
                await _send(connection, answer, has_body=not head.startswith(b"HEAD "))

    async def _answer(self, head: str) -> Answer:
        line, _, fields = head.partition("\r\n")
        if not re.fullmatch(r"[^ ]+ [^ ]+ HTTP/1\.\d", line):
            return text("this is not an HTTP/1 request", 400)
        method, target, _ = line.split(" ")
        path, headers = target.partition("?")[0], message_from_string(fields)
        if method not in ("GET", "HEAD"):
            return text("this server is read-only: use GET or HEAD", 405)
        if not self._is_own_name(headers.get("host", "")):
            return text("use this server's IP address, localhost or the name from --http-host", 403)
        if (route := self._routes.get(path)) is None:
            return text(f"not found: lmcache server: {' '.join(self._routes)}", 404)
        if inspect.iscoroutinefunction(route) and headers.get("sec-fetch-site", "").endswith("-site"):
            return text("a page of another address may not start this: open its address yourself", 403)
        try:
            answer = route()
            return answer if isinstance(answer, Answer) else await answer
        except Exception:
            logger.exception("%(path)s failed", {"path": path})
            return text("the server failed on this page; its log says why", 503)

    def _is_own_name(self, host: str) -> bool:
        """Whether a Host header can name this server. A stranger's page can make its own name point here to
        read our answers (DNS rebinding), but then the header has that name."""
        with contextlib.suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            # No stranger can own a name without a dot, such as a container's.
            known = name in self._names or ("." not in name and not self._is_local)
            return known or bool(ipaddress.ip_address(name))
        return False


class _Deadline:
    """Cancels the running task if the block takes longer than TIMEOUT_S."""

    def __enter__(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._timer = self._loop.call_later(TIMEOUT_S, self._over)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _over(self) -> None:
        # If the server stood still, what came meanwhile was in time, and the loop has yet to read it.
        assert self._task is not None
        self._timer = self._loop.call_later(LAST_LOOK_S, self._task.cancel)


async def _receive_head(connection: socket.socket) -> bytes:
    """The client's bytes up to the first empty line; more than MAX_HEAD_BYTES if none comes before. Raises
    EOFError."""
    loop, received = asyncio.get_running_loop(), b""
    while b"\r\n\r\n" not in received and len(received) <= MAX_HEAD_BYTES:
        if not (more := await loop.sock_recv(connection, MAX_HEAD_BYTES)):
            raise EOFError
        received += more
    return received[: received.find(b"\r\n\r\n") + 4] if b"\r\n\r\n" in received else received


async def _send(connection: socket.socket, answer: Answer, has_body: bool) -> None:
    head = (
        f"HTTP/1.1 {answer.code} {HTTPStatus(answer.code).phrase}\r\nDate: {formatdate(usegmt=True)}\r\n"
        f"Content-Type: {answer.kind}\r\nContent-Length: {len(answer.body)}\r\n{_HEADERS}\r\n"
    )
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, head.encode() + (answer.body if has_body else b""))
    connection.shutdown(socket.SHUT_WR)
    # Read what the client still sends: otherwise the kernel resets the connection and drops the answer.
    while await loop.sock_recv(connection, 1 << 16):
        pass
