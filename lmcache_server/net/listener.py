"""Binds the ROUTER socket, and moves its frames to and from the router on the event loop."""

import asyncio
import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Hashable, Iterator
from pathlib import Path

import zmq

from lmcache_client.contract.codec import MAX_FRAME_BYTES
from lmcache_client.contract.endpoint import EndpointError, address, host_name, split
from lmcache_server.config import Config
from lmcache_server.errors import NotNowError, StartError
from lmcache_server.net.claim import Claim, claimed
from lmcache_server.net.connections import Connections, is_readable
from lmcache_server.net.outbox import Replies
from lmcache_server.net.turns import Turns
from lmcache_server.service.router import Router

BURST_FRAMES = 64
"""Requests received, and requests handled, before the event loop gets its turn."""
BURST_S = 0.005
RECEIVE_HIGH_WATER = 8
"""Frames queued from one client, 32 MiB at most; further ones wait in the client's own queue."""
RETRY_S = 0.005
"""How soon waiting replies are offered to ZeroMQ again, if nothing else happens on the socket."""
HANDSHAKE_MS = 5000


@contextlib.contextmanager
def bound_listener(config: Config) -> Iterator["Listener"]:
    """Listens at the address of `config` inside the context. Raises StartError."""
    with contextlib.ExitStack() as stack:
        try:
            whole = address(config.host, config.port, config.key_file)
            endpoint, key = split(whole)
            path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
            claim = stack.enter_context(claimed(path, config.port)) if path is not None else None
        except EndpointError as error:
            raise StartError(str(error)) from error
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        # ROUTER numbers its clients from rand(), which libzmq does not seed. A peer that gives itself the
        # next number ends the process (zmq_assert in socket_base.cpp, libzmq 4.3.5).
        ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))
        socket = stack.enter_context(context.socket(zmq.ROUTER))
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.IPV6, int(":" in host_name(config.host)))
        connections, replies = Connections(socket, key), Replies(socket)
        stack.callback(connections.close)
        if claim is not None:
            socket.setsockopt(zmq.USE_FD, claim.listening.detach())
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            fix = {
                errno.EADDRINUSE: "perhaps another lmcache server uses it: choose another --port",
                errno.EACCES: "choose a --port above 1023",
            }.get(error.errno or 0, "choose another --host: an address of this machine ('ip address')")
            # At the start of a machine, its addresses may come later.
            kind = NotNowError if error.errno == errno.EADDRNOTAVAIL else StartError
            reason = os.strerror(error.errno or 0).lower()
            raise kind(f"cannot listen on {endpoint}: {reason}; {fix}") from error
        listener = Listener(socket, connections, replies, claim)
        listener.endpoint += whole.removeprefix(endpoint)
        yield listener


class Listener:
    """Moves frames between the ROUTER socket and the router on the event loop.

    ZeroMQ's descriptor signals edges, not levels. So after each edge and each send, all waiting messages must
    be read, or they would wait for the next edge.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", connections: Connections, replies: Replies, claim: Claim | None
    ) -> None:
        self._socket = socket
        self._connections = connections
        self.peer_pid = connections.peer_pid
        self._replies = replies
        self._claim = claim
        self._readers = {connections.descriptor: self._end_sessions, int(socket.FD): self._on_edge}
        if connections.authenticator is not None:
            self._readers[connections.authenticator.descriptor] = connections.authenticator.answer
        self._loop: asyncio.AbstractEventLoop
        """Set by `start`."""
        self._router: Router | None = None
        self._turns = Turns()
        self._handled_s = 0.0
        """When the last request was handled, if more were waiting then; otherwise 0."""
        self._scheduled = self._retrying = self._ending = False
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self, router: Router, loop: asyncio.AbstractEventLoop) -> None:
        self._router, self._loop = router, loop
        for descriptor, work in self._readers.items():
            loop.add_reader(descriptor, work)
            work()  # what came before has had its edge

    def tick(self, now_s: float) -> None:
        """Called once a second, with the monotonic time."""
        if self._claim is not None:
            self._claim.tick(now_s)

    def stop(self) -> None:
        for descriptor in self._readers:
            self._loop.remove_reader(descriptor)
        self._router = None

    def send(self, identity: bytes, frame: bytes) -> None:
        self._replies.send(identity, frame)
        self._wake()

    def _on_edge(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._drain()

    def _wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        more = False
        try:
            if self._replies.are_waiting:
                self._replies.flush()
            if self._replies.are_waiting and not self._retrying:
                self._retrying = True
                self._loop.call_later(RETRY_S, self._retry)
            more = self._take_in()
        finally:
            self._scheduled = more
            if more:
                self._loop.call_soon(self._drain)

    def _retry(self) -> None:
        self._retrying = False
        self._wake()

    def _take_in(self) -> bool:
        """Handle waiting requests. Returns True if more may wait, but the event loop should get its turn."""
        if self._router is None:
            return False
        more = self._receive(self._router)
        started_s = time.monotonic()
        end_s = started_s + BURST_S
        if self._handled_s:
            # Since then, the event loop has run the coroutine that handles the last request.
            self._turns.charge(started_s - self._handled_s)
        self._handled_s = 0.0
        for _ in range(BURST_FRAMES):
            if (turn := self._turns.take()) is None:
                return more
            more = True  # the reply may have taken the edge of another message
            identity, frame = turn
            if self._connections.process(identity) is not None:
                self._router.receive(identity, frame.bytes)
            now_s = time.monotonic()
            self._turns.charge(now_s - started_s)
            started_s = now_s
            if now_s > end_s:
                break
        self._handled_s = started_s
        return True

    def _receive(self, router: Router) -> bool:
        """Let waiting frames wait for the turns of their processes. Returns True if more may wait."""
        for _ in range(BURST_FRAMES):
            if not is_readable(self._socket):
                return False
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if len(frames) != 2:
                continue
            identity, frame = frames[0].bytes, frames[1]
            process = self._connections.process(identity) or self._first_seen(identity, frame)
            if process is not None and not self._turns.add(process, identity, frame):
                router.turn_away(identity, frame.buffer)
        return True

    def _first_seen(self, identity: bytes, frame: zmq.Frame) -> Hashable | None:
        self._end_sessions()
        if not self._connections.belongs(frame, identity):
            return None
        # This client may have replaced another one.
        self._loop.call_soon(self._end_sessions)
        return self._connections.process(identity)

    def _end_sessions(self) -> None:
        for identity in self._connections.ended():
            self._replies.forget(identity)
            if self._router is not None:
                self._router.disconnected(identity)
        if self._connections.has_more and not self._ending:
            self._ending = True
            self._loop.call_soon(self._end_more)

    def _end_more(self) -> None:
        self._ending = False
        if self._router is not None:
            self._end_sessions()
