"""File descriptors: the server takes no more connections than it has descriptors for.

libzmq ends the whole process when it has none left for a connection at a Unix socket, and it can stop
listening only by closing the connections that it has. So those beyond a share of the limit are shut down
as soon as they are accepted; what is left is for watching processes and for what comes in meanwhile.
"""

import contextlib
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger(__name__)

LEAST_LIMIT = 4096
"""Half of it is spare: what libzmq accepts in a tenth of a second."""
ENOUGH_LIMIT = 1 << 16
CONNECTIONS = 3072
"""For connections, at most half of the limit: as many as all sessions that may be need, and more would only
be memory for connections that never greet. The rest of the limit is what may come in between two looks."""
USABLE = 4096
"""With what watches the processes of the clients, at most three quarters of the limit."""
TOLD_AGAIN_S = 60.0


class ScarceError(Exception):
    """There is no file descriptor to spare."""


def raise_limit() -> None:
    """Make use of the hard limit, and say so when it is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_LIMIT if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if _limit() < LEAST_LIMIT:
        logger.warning(
            "the limit of open files is %d: clients that connect very often could end the server; raise it "
            "to %d or more (ulimit -n; for a systemd unit LimitNOFILE=)",
            _limit(),
            LEAST_LIMIT,
        )


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH_LIMIT if soft == resource.RLIM_INFINITY else soft


def for_connections() -> int:
    """A connection whose descriptor has this number or a higher one is one too many."""
    return min(_limit() // 2, CONNECTIONS)


def usable() -> int:
    """Descriptors with this number and higher ones stay free for what must not fail."""
    return min(_limit() * 3 // 4, USABLE)


@contextlib.contextmanager
def watched(router: "zmq.Socket[bytes]") -> Iterator[None]:
    """While this lasts, connections to `router` beyond the share are shut down. To be entered before it
    listens."""
    monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED)
    # A thread of its own: the event loop may be busy for longer than the spare descriptors last.
    thread = threading.Thread(target=_watch, args=(monitor,), name="connections", daemon=True)
    thread.start()
    try:
        yield
    finally:
        router.disable_monitor()
        thread.join()
        monitor.close(0)


def _watch(monitor: "zmq.Socket[bytes]") -> None:
    told_s = -TOLD_AGAIN_S
    highest = for_connections()
    while True:
        event = recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_MONITOR_STOPPED:
            return
        # The kernel gives out the lowest free number: a high one says that all below are taken.
        if event["value"] < highest:
            continue
        _shut_down(event["value"])
        if time.monotonic() - told_s >= TOLD_AGAIN_S:
            told_s = time.monotonic()
            logger.warning(
                "connections are turned away: %d file descriptors are in use; close clients that are not "
                "needed, or raise the limit of open files (ulimit -n) to %d",
                highest,
                2 * CONNECTIONS,
            )


def _shut_down(descriptor: int) -> None:
    """End a connection that libzmq owns; it closes the descriptor itself."""
    # Meanwhile the number may stand for another connection, which then comes back by itself.
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
