"""The HTTP server over a real socket: any bytes get one whole answer, or none."""

import asyncio
import re
import socket

from fuzz.choices import Choices, Target
from lmcache_server.admin import http

ANSWER_S = 20.0
BODY = b"x" * 3000
CODES = {200, 400, 403, 404, 405, 431}
_HEAD = re.compile(rb"HTTP/1\.1 (\d+) [^\r\n]+\r\n((?:[A-Za-z-]+: [^\r\n]*\r\n)*)\r\n")

_REQUESTS = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"HEAD /?a=b HTTP/1.0\r\n\r\n",
    b"GET /start HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nSec-Fetch-Site: same-origin\r\n\r\n",
    b"GET /start HTTP/1.1\r\nHost: [::1]\r\nSec-Fetch-Site: cross-site\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: evil.example\r\nX: " + b"y" * 300 + b"\r\n continued\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET http://localhost/none HTTP/1.1\r\nHost: a@localhost:99999\r\nHost: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"z" * 9000 + b"\r\n\r\n",
)


class PagesTarget(Target):
    """One connection a run. The first byte says in how many pieces the rest is sent, and how it ends."""

    def __init__(self) -> None:
        super().__init__()
        self._started = 0
        self._loop = asyncio.new_event_loop()
        self._server = http.Server("127.0.0.1", 0)
        self._address = "127.0.0.1", int(self._server.url.rpartition(":")[2])
        routes: http.Routes = {"/": lambda: http.Answer(BODY), "/start": self._start}
        self._loop.call_soon(self._server.start, routes)
        self.seeds = [bytes([number % 3, 2 + number % 2]) + head for number, head in enumerate(_REQUESTS)]

    async def _start(self) -> http.Answer:
        self._started += 1
        return http.text("started")

    def close(self) -> None:
        self._loop.run_until_complete(self._server.stop())
        self._server.close()
        self._loop.close()

    def run(self, data: bytes) -> None:
        self.inputs += 1
        self._loop.run_until_complete(asyncio.wait_for(self._speak(Choices(data)), ANSWER_S))

    async def _speak(self, choices: Choices) -> None:
        pieces, ends = 1 + choices.below(3), choices.below(4)
        request = choices.rest()
        with socket.socket() as client:
            client.setblocking(False)
            await self._loop.sock_connect(client, self._address)
            started, answer = self._started, b""
            try:
                size = -(-len(request) // pieces) or 1
                for start in range(0, len(request), size):
                    await self._loop.sock_sendall(client, request[start : start + size])
                    await asyncio.sleep(0)
                if ends:
                    client.shutdown(socket.SHUT_WR)
                elif b"\r\n\r\n" not in request:
                    return  # it would wait for the rest of the request
                while (ends != 1 or not answer) and (piece := await self._loop.sock_recv(client, 1 << 16)):
                    answer += piece
            except (ConnectionResetError, BrokenPipeError):
                return
        if ends != 1:
            self._check(request, answer, self._started - started)

    def _check(self, request: bytes, answer: bytes, started: int) -> None:
        if not answer:
            assert b"\r\n\r\n" not in request, "a whole request gets an answer"
            self.outcomes["none"] += 1
            return
        head = _HEAD.match(answer)
        assert head is not None, answer[:200]
        code, body = int(head[1]), answer[head.end() :]
        self.outcomes[str(code)] += 1
        assert code in CODES, code
        (length,) = re.findall(rb"\r\nContent-Length: (\d+)\r\n", head[0])
        lines = request.split(b"\r\n")
        is_head = lines[0].startswith(b"HEAD ") and code != 431
        assert len(body) == (0 if is_head else int(length)), "one answer, as long as it says"
        if code == 200:
            assert lines[0].startswith((b"GET ", b"HEAD "))
            assert b"\0" not in head[0]
        assert started == (code == 200 and body != BODY and int(length) != len(BODY))
