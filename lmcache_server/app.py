"""The server process: takes memory and sockets, runs the event loop, and shuts down in order."""

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence

import uvloop

from lmcache_client.contract.version import VERSION
from lmcache_server.admin import http
from lmcache_server.admin.readiness import unready
from lmcache_server.admin.selftest import SelfTest
from lmcache_server.admin.status import Report
from lmcache_server.config import Config, describe, unknown_variables, values
from lmcache_server.core.cache import Cache
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.errors import StartError
from lmcache_server.host import descriptors, logs
from lmcache_server.l1.memory import UNIT_BYTES, L1Memory
from lmcache_server.net.listener import Listener, bound_listener
from lmcache_server.options import parts
from lmcache_server.service.option import Base, Make, Option
from lmcache_server.service.router import Router, Send
from lmcache_server.service.sessions import PeerPid, Sessions
from lmcache_server.service.system import System
from lmcache_server.telemetry.failures import Failures
from lmcache_server.telemetry.metrics import CONTENT_TYPE, Metrics
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.locked_memory import LockedMemory

logger = logging.getLogger("lmcache_server")

TICK_S = 1.0
THAW_TICKS = 600
THAW_CHUNKS = 50_000
END_S = 5.0
"""How long the shutdown waits for running copies; one that hangs ends with the process."""
EXIT_FAILED = 1


def run(config: Config) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP; returns the exit code. Raises StartError."""
    logs.set_up(config.log_level, config.log_format)
    values = {"version": VERSION, "configuration": describe(config)}
    logger.info("lmcache server %(version)s, %(configuration)s", values)
    for sentence in unknown_variables(os.environ):
        logger.warning("%(sentence)s", {"sentence": sentence})
    if config.key_file and not config.host:
        logger.warning("--key-file has no effect without --host: the Unix socket needs no key")
    try:
        return _run(config)
    except StartError as error:
        if config.log_format != logs.JSON:
            raise
        # A program that reads the JSON log would miss the line that the command prints at its end.
        logger.critical("%(reason)s", {"reason": str(error)})
        return error.exit_code
    finally:
        logs.flush()


def _run(config: Config) -> int:
    descriptors.raise_limit()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bound_listener(config))
        web = http.Server(config.http_host, config.http_port)
        stack.callback(web.close)
        backings = (made(values(config), config.l1_size_bytes) for made in parts("server", "backing"))
        if (backing := next(filter(None, backings), None)) is not None:
            stack.callback(backing.close)
        shared = any(needed(values(config)) for needed in parts("flags", "shares_l1"))
        l1 = L1Memory(config.l1_size_bytes, hugetlb=config.l1_hugetlb, backing=backing, shared=shared)
        stack.callback(l1.close)
        failed = uvloop.run(_serve(config, listener, web, l1))
    if l1.is_in_use:  # Python would wait for the thread of a copy that hangs
        logs.flush()
        os._exit(EXIT_FAILED if failed else 0)
    return EXIT_FAILED if failed else 0


def assemble(
    config: Config,
    cache: Cache,
    l1: L1Memory,
    metrics: Metrics,
    send: Send,
    system: System,
    peer_pid: PeerPid = lambda _identity: None,
    makers: Sequence[Make] | None = None,
) -> tuple[Router, Report]:
    """The objects that answer clients, and the report about them, over one cache."""
    sessions, options = Sessions(config, cache, system, peer_pid), list[Option]()
    base = Base(config, cache, l1, sessions, metrics, Failures(), system, options)
    options += [make(base) for make in (parts("server", "Server") if makers is None else makers)]
    sessions.may_wait_longer = any(option.places() for option in options)
    report = Report(base)
    return Router(base, send, report.status), report


async def _serve(config: Config, listener: Listener, web: http.Server, l1: L1Memory) -> bool:
    """Returns whether it ended because a GPU, or what fills L1, has failed."""
    loop = asyncio.get_running_loop()
    # From here on, a signal ends the server in order, which saves the chunks that are restored below.
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does with SIGHUP
            loop.add_signal_handler(number, stop.set)
    metrics = Metrics()
    num_frames = 0 if l1.backing else l1.num_frames
    cache = Cache(FRAME_BYTES, num_frames, config.lease_s)
    gpus = Gpus(with_kernel=config.gpu_kernel)
    threading.Thread(target=gpus.compile_kernel, name="gpu-kernel", daemon=True).start()
    lacking = lambda runs: loop.call_soon_threadsafe(cache.set_aside, runs)  # noqa: E731
    locked = LockedMemory(gpus, l1.base_address, l1.num_bytes, UNIT_BYTES, lacking)
    system = System(loop, gpus, locked)
    router, report = assemble(config, cache, l1, metrics, listener.send, system, listener.peer_pid)
    for option in router.options:
        await option.open()
    for option in router.options:  # when all are open: a start that fails later loses what was saved
        option.restore()
    l1.fill(lambda frames: loop.call_soon_threadsafe(cache.grow, frames), locked)
    listener.start(router, loop)

    selftest = SelfTest(listener.endpoint, config.chunk_size, report.selftest_ended)
    gpu_selftest = SelfTest(listener.endpoint, config.chunk_size, report.selftest_ended, on_gpus=True)
    web.start(_routes(report, metrics, selftest, gpu_selftest))
    addresses = {"endpoint": listener.endpoint, "url": web.url}
    logger.info("ready: engines at %(endpoint)s, HTTP at %(url)s", addresses)
    try:
        ending = lambda: stop.set() if gpus.lost or l1.failure else None  # noqa: E731
        due = (router.tick, report.tick, lambda: listener.tick(system.now_s()), ending)
        await _tick(stop, due, cache)
        if has_failed := bool(reason := gpus.lost or l1.failure):
            # Only the end of a process gives back what it has mapped of such a GPU, and an engine that
            # starts again needs that memory. Nobody would notice that L1 stays empty.
            logger.critical("%(reason)s: this server ends, and has to be started again", {"reason": reason})
        count = len(router.sessions.by_identity)
        logger.info("stopping with %(sessions)d sessions open", {"sessions": count})
    finally:
        await web.stop()
        await asyncio.to_thread(l1.stop)
        router.sessions.close()
        for option in router.options:
            option.stop()
        # Copies that end in time still report to the cache, which then ends their reads and reservations.
        l1.is_in_use = not await system.all_ended(END_S)
        cache.check_integrity()
        listener.stop()
    for option in router.options:
        option.save()
    for option in router.options:
        await option.close()
    l1.is_in_use = not await system.all_ended(END_S)
    return has_failed


async def _tick(stop: asyncio.Event, due: Sequence[Callable[[], object]], cache: Cache) -> None:
    """Does once a second what is due, until `stop`."""
    gc.freeze()
    for ticks in itertools.count():
        if stop.is_set():
            return
        for each in due:
            each()
        collect_garbage(ticks, cache.num_chunks)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), TICK_S)


def collect_garbage(ticks: int, num_chunks: int) -> None:
    """Called once a second. A collection over a large index would stop the server for seconds. So objects
    that are a second old are frozen, which means never searched again. Almost none of ours are in reference
    cycles.

    Some cycles are frozen before they are garbage, for example after an error. Every THAW_TICKS calls all
    objects are searched for these, unless the index has so many chunks that the pause would be noticed.
    """
    if ticks % THAW_TICKS == THAW_TICKS - 1 and num_chunks <= THAW_CHUNKS:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


def _routes(report: Report, metrics: Metrics, selftest: SelfTest, gpu_selftest: SelfTest) -> http.Routes:
    def ready() -> http.Answer:
        reason = unready(report.cache, report.l1)
        return http.text(reason, 503) if reason else http.text("ok")

    return {
        "/": lambda: http.PAGE,
        "/metrics": lambda: http.Answer(metrics.render(), CONTENT_TYPE),
        "/healthz": lambda: http.text("ok"),
        "/healthcheck": lambda: http.text("ok"),
        "/readyz": ready,
        "/status": lambda: http.as_json(report.status()),
        "/history": lambda: http.as_json(report.history.report()),
        "/selftest": selftest.result,
        "/selftest/gpu": gpu_selftest.result,
    }
