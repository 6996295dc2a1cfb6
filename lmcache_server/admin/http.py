"""HTTP for people and probes: the routes that it is given, to read only, and a page for people at /.

It runs on the event loop of the server, so that a loop that hangs does not answer: a probe asks for that.
The page has no part of its own elsewhere: its policy allows no other script, style or address.
"""

import asyncio
import base64
import contextlib
import hashlib
import inspect
import ipaddress
import json
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from email import message_from_string
from email.message import Message
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from lmcache_client.contract.endpoint import host_name, is_loopback
from lmcache_server.errors import StartError

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""For all of a request to come in, and once more for its answer to be taken."""
MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 32
MAX_CONNECTIONS_OF_A_PEER = 8
"""Of one address other than loopback."""
RETRY_S = 0.1


class Answer(NamedTuple):
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    code: int = 200


Routes = Mapping[str, Callable[[], Answer | Awaitable[Answer]]]
"""What is answered at each path. A coroutine starts something, which a page of another site may not do."""


def text(sentence: str, code: int = 200) -> Answer:
    return Answer(f"{sentence}\n".encode(), code=code)


def as_json(value: object, code: int = 200) -> Answer:
    return Answer(json.dumps(value).encode(), "application/json", code)


PAGE = Answer(Path(__file__).with_name("page.html").read_bytes(), "text/html; charset=utf-8")
"""For people."""


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
    """Listens from the beginning, so that a second server fails at once (StartError); `start` answers."""

    def __init__(self, host: str, port: int) -> None:
        name = host_name(host)
        self._names = {"", "localhost", name.lower()}
        self._is_local = is_loopback(host)
        self._routes: Routes = {}
        self._connections: dict[asyncio.Task[None], str] = {}
        """The address of each one's peer, the oldest first."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((name, port))
            self._socket.listen(MAX_CONNECTIONS)
        except (OSError, TypeError, ValueError) as error:
            self.close()
            why = getattr(error, "strerror", None) or str(error)
            raise StartError(
                f"cannot listen on {host}:{port} for HTTP: {why.lower()}; "
                "stop what uses it, or choose another --http-port"
            ) from error
        self._socket.setblocking(False)
        name, port = self._socket.getsockname()[:2]
        self.url = f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"

    def start(self, routes: Routes) -> None:
        """Answer from now on, on the loop that runs."""
        self._routes = routes
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def stop(self) -> None:
        tasks = [self._accepting, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (peer, *_) = await loop.sock_accept(self._socket)
            except OSError:
                # There is no descriptor for it: it goes on waiting, and would be tried at once again.
                await asyncio.sleep(RETRY_S)
                continue
            self._make_room(peer)
            task = loop.create_task(self._serve(connection))
            self._connections[task] = peer
            task.add_done_callback(lambda task: self._connections.pop(task, ""))
            # Who connects without end does not have the loop for himself, and this one begins.
            await asyncio.sleep(0)

    def _make_room(self, peer: str) -> None:
        """The oldest connection gives way: those that send nothing must not keep a probe away."""
        same = [task for task, other in self._connections.items() if other == peer]
        too_many = len(same) >= MAX_CONNECTIONS_OF_A_PEER and not is_loopback(peer)
        if too_many or len(self._connections) >= MAX_CONNECTIONS:
            oldest = same[0] if too_many else next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()

    async def _serve(self, connection: socket.socket) -> None:
        """One request and its answer; a client that breaks off or is slow is no event."""
        with connection, contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
            reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_HEAD_BYTES)
            try:
                method, answer = "", text(f"more than {MAX_HEAD_BYTES} bytes are no request", 431)
                with contextlib.suppress(asyncio.LimitOverrunError):
                    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
                    method, answer = await self._answer(head.decode("latin-1"))
                await asyncio.wait_for(_send(reader, writer, answer, method != "HEAD"), TIMEOUT_S)
            finally:
                writer.transport.abort()

    async def _answer(self, head: str) -> tuple[str, Answer]:
        """(the method, what it is answered) of a request without its body."""
        line, _, fields = head.partition("\r\n")
        if not re.fullmatch(r"[^ ]+ [^ ]+ HTTP/1\.\d", line):
            return "", text("this is no request of HTTP/1", 400)
        method, target, _ = line.split(" ")
        return method, await self._respond(method, target.partition("?")[0], message_from_string(fields))

    async def _respond(self, method: str, path: str, headers: Message) -> Answer:
        if method not in ("GET", "HEAD"):
            return text("nothing can be changed here: only GET and HEAD", 405)
        if not self._is_meant(headers.get("host", "")):
            return text("name this server by its IP address, localhost or what --http-host says", 403)
        if (route := self._routes.get(path)) is None:
            return text(f"not found: lmcache server: {' '.join(self._routes)}", 404)
        if inspect.iscoroutinefunction(route) and headers.get("sec-fetch-site") == "cross-site":
            return text("a page of another site may not start this: open it by its address", 403)
        try:
            answer = route()
            return answer if isinstance(answer, Answer) else await answer
        except Exception:
            logger.exception("%(path)s failed", {"path": path})
            return text("the server failed on this page; its log says why", 503)

    def _is_meant(self, host: str) -> bool:
        """Whether a Host header can be of this server. Any other is that of a stranger's page, whose own name
        was made to lead here so that it may read what it gets (DNS rebinding)."""
        with contextlib.suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            # A name without a dot, as of a container, is none that a stranger can have.
            known = name in self._names or ("." not in name and not self._is_local)
            return known or bool(ipaddress.ip_address(name))
        return False


async def _send(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer, has_body: bool
) -> None:
    head = (
        f"HTTP/1.1 {answer.code} {HTTPStatus(answer.code).phrase}\r\nDate: {formatdate(usegmt=True)}\r\n"
        f"Content-Type: {answer.kind}\r\nContent-Length: {len(answer.body)}\r\n{_HEADERS}\r\n"
    )
    writer.write(head.encode() + (answer.body if has_body else b""))
    writer.write_eof()
    # What a client still sends must be taken in, or the kernel tells it of that and drops the answer.
    while await reader.read(1 << 16):
        pass
    writer.close()
    await writer.wait_closed()
