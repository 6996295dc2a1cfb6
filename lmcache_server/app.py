"""The server process: memory, socket, event loop, orderly end."""

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import uvloop
import zmq

from lmcache_client.contract.codec import MAX_MESSAGE_BYTES
from lmcache_client.contract.endpoint import (
    EndpointError,
    address,
    check_runtime_directory,
    host_name,
    runtime_directory,
)
from lmcache_client.contract.version import VERSION
from lmcache_server.admin import http
from lmcache_server.admin.selftest import SelfTest
from lmcache_server.admin.status import Report
from lmcache_server.config import Config, describe
from lmcache_server.core.cache import Cache
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.errors import StartError
from lmcache_server.host import descriptors, logs
from lmcache_server.l1 import restart
from lmcache_server.l1.file import L1File
from lmcache_server.l1.memory import UNIT_BYTES, L1Memory
from lmcache_server.net.connections import Connections, is_readable
from lmcache_server.service.copies import Copies
from lmcache_server.service.registry import Registry
from lmcache_server.service.router import Router, Send
from lmcache_server.service.system import System
from lmcache_server.telemetry.metrics import CONTENT_TYPE, Metrics
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.pins import Pins

logger = logging.getLogger("lmcache_server")

TICK_S = 1.0
BURST_FRAMES = 64
"""Requests handled in one go before the loop looks after everything else."""
BURST_S = 0.005
RECEIVE_HIGH_WATER = 8
"""Frames queued from one client, 32 MiB at most; beyond it the client's own queue fills."""
SEND_HIGH_WATER = 1024
"""Replies queued for a client that does not read; beyond it they are dropped, and it times out. More than
the copies that it may have waiting: one whose end it never hears of would hold its blocks."""
HANDSHAKE_MS = 5000
EXIT_CANNOT_START = 2


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises StartError."""
    logs.set_up(config.log_level, config.log_format)
    logger.info(
        "lmcache server %(version)s, %(configuration)s",
        {"version": VERSION, "configuration": describe(config)},
    )
    try:
        return _run(config)
    except StartError as error:
        if config.log_format != logs.JSON:
            raise
        # Who reads the log by machine would miss the sentence that the command ends with.
        logger.critical("%(reason)s", {"reason": str(error)})
        return EXIT_CANNOT_START


def _run(config: Config) -> int:
    descriptors.raise_limit()
    with contextlib.ExitStack() as stack:
        socket, connections = stack.enter_context(_bound_socket(config))
        web = http.Server(config.http_host, config.http_port)
        stack.callback(web.close)
        file = L1File(config.l1_path, config.l1_size_bytes) if config.l1_path else None
        if file is not None:
            stack.callback(file.close)
        l1 = L1Memory(config.l1_size_bytes, hugetlb=config.l1_hugetlb, file=file)
        stack.callback(l1.close)
        return uvloop.run(_serve(config, _Listener(socket, connections), web, l1))


@contextlib.contextmanager
def _bound_socket(config: Config) -> Iterator[tuple["zmq.Socket[bytes]", Connections]]:
    with contextlib.ExitStack() as stack:
        try:
            endpoint = address(config.host, config.port)
            path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
            if path is not None:
                stack.enter_context(_claimed(path, config.port))
        except EndpointError as error:
            raise StartError(str(error)) from error
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        socket = stack.enter_context(context.socket(zmq.ROUTER))
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.IPV6, int(":" in host_name(config.host)))
        connections = Connections(socket)
        stack.callback(connections.close)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise StartError(
                f"cannot listen on {endpoint}: {os.strerror(error.errno or 0).lower()}; "
                "stop what uses it, or choose another --port or --host"
            ) from error
        yield socket, connections


@contextlib.contextmanager
def _claimed(path: Path, port: int) -> Iterator[None]:
    """Own the Unix socket at `path` while this lasts. ZeroMQ takes over a socket file that is in use
    without a word, so a lock beside it says whether it is."""
    directory = runtime_directory()
    try:
        directory.mkdir(mode=0o700, parents=False, exist_ok=True)
        check_runtime_directory(directory)
        lock = os.open(directory / f"{port}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartError(f"cannot use {directory} for the socket: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise StartError(
            f"port {port} is in use: another lmcache server of this user has {path}; "
            "stop it, or choose another --port"
        ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def assemble(
    config: Config, cache: Cache, copies: Copies, metrics: Metrics, send: Send, system: System
) -> tuple[Router, Report]:
    """What answers clients, and what tells people of it, over one cache."""
    registry = Registry(config, cache, copies, system)
    report = Report(config, cache, copies, registry, metrics, system)
    router = Router(config, cache, copies, registry, metrics, send, system.now_s, report.status)
    return router, report


async def _serve(config: Config, listener: "_Listener", web: http.Server, l1: L1Memory) -> int:
    loop = asyncio.get_running_loop()
    # From here on a signal ends the server in order: what a file holds is restored below, and kept.
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    metrics = Metrics()
    cache = Cache(FRAME_BYTES, 0 if l1.file else l1.num_frames, config.lease_s)
    gpus = Gpus()
    l1.pins = Pins(gpus, l1.base_address, l1.num_bytes, UNIT_BYTES)
    system = System(loop, gpus, l1.pins)
    copies = Copies(l1, metrics, system, config.checksums)
    router, report = assemble(config, cache, copies, metrics, listener.send, system)
    if l1.file is not None:
        restart.restore(l1.file, cache, router.registry.known)
    l1.fill(cache.total_frames, lambda frames: loop.call_soon_threadsafe(cache.grow, frames))
    listener.start(router, loop)

    selftest = SelfTest(listener.endpoint, config.chunk_size, router.selftest_ended)
    web.start(_routes(report, metrics, selftest))
    logger.info(
        "ready: engines at %(endpoint)s, HTTP at %(url)s", {"endpoint": listener.endpoint, "url": web.url}
    )
    try:
        gc.freeze()
        while not stop.is_set():
            router.tick()
            report.tick()
            # A look at every chunk of a large index, in search of garbage, would stop the server for seconds:
            # what has lived for a second is not looked at again, and almost nothing here needs a search.
            gc.collect()
            gc.freeze()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), TICK_S)
        logger.info("ending: %(sessions)d sessions", {"sessions": len(router.registry.sessions)})
    finally:
        await web.stop()
        l1.stop()
        router.registry.close()
        # Copies that ended in time have their last word to say; then nothing is held any more.
        await asyncio.sleep(0)
        cache.check_integrity()
        listener.stop()
    if l1.file is not None:
        restart.save(l1.file, cache, router.registry.known)
    return 0


def _routes(report: Report, metrics: Metrics, selftest: SelfTest) -> http.Routes:
    def ready() -> http.Answer:
        why = report.unready()
        return http.text(why, 503) if why else http.text("ok")

    return {
        "/": lambda: http.PAGE,
        "/metrics": lambda: http.Answer(metrics.render(), CONTENT_TYPE),
        "/healthz": lambda: http.text("ok"),
        "/healthcheck": lambda: http.text("ok"),
        "/readyz": ready,
        "/status": lambda: http.as_json(report.status()),
        "/history": lambda: http.as_json(report.history.report()),
        "/selftest": selftest.result,
    }


class _Listener:
    """Moves frames between the ROUTER socket and the router on the event loop.

    ZeroMQ's descriptor signals edges, not levels: after it, and after each send, everything that has
    arrived must be taken in, or it would wait for the next edge.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", connections: Connections) -> None:
        self._socket = socket
        self._connections = connections
        self._loop: asyncio.AbstractEventLoop | None = None
        self._router: Router | None = None
        self._scheduled = False
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self, router: Router, loop: asyncio.AbstractEventLoop) -> None:
        self._router, self._loop = router, loop
        loop.add_reader(int(self._socket.FD), self._on_edge)
        loop.add_reader(self._connections.descriptor, self._end_sessions)
        self._end_sessions()
        self._wake()

    def stop(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(int(self._socket.FD))
        self._loop.remove_reader(self._connections.descriptor)
        self._router = None

    def send(self, identity: bytes, frame: bytes) -> None:
        # A peer that has gone or does not read loses its reply; its own deadline covers that.
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        self._wake()

    def _on_edge(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._drain()

    def _wake(self) -> None:
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        more = False
        try:
            more = self._take_in()
        finally:
            self._scheduled = more
            if more and self._loop is not None:
                self._loop.call_soon(self._drain)

    def _take_in(self) -> bool:
        """Handle what has arrived; True if the loop had better look after something else before the rest."""
        if self._router is None or self._loop is None:
            return False
        end_s = self._loop.time() + BURST_S
        for _ in range(BURST_FRAMES):
            if not is_readable(self._socket):
                return False
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if len(frames) == 2:
                identity, frame = frames[0].bytes, frames[1]
                if self._router.knows(identity) or self._is_connected(identity, frame):
                    self._router.receive(identity, frame.bytes)
            if self._loop.time() > end_s:
                break
        return True

    def _is_connected(self, identity: bytes, frame: zmq.Frame) -> bool:
        self._end_sessions()
        return self._connections.belongs(frame, identity)

    def _end_sessions(self) -> None:
        for identity in self._connections.ended():
            if self._router is not None:
                self._router.disconnected(identity)
