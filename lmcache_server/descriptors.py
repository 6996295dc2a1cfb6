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

MAX_DESCRIPTORS = 4096
"""As many as the sessions that may be need; more would only be memory for connections that never greet."""
CONNECTIONS_SHARE = 0.75
USABLE_SHARE = 0.875
TOLD_AGAIN_S = 60.0


class ScarceError(Exception):
    """There is no file descriptor to spare."""


def raise_limit() -> None:
    """Make use of the hard limit, up to MAX_DESCRIPTORS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < MAX_DESCRIPTORS:
        wanted = MAX_DESCRIPTORS if hard == unlimited else min(hard, MAX_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def usable() -> int:
    """Descriptors with this number and higher ones stay free for what must not fail."""
    return int(_limit() * USABLE_SHARE)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)


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
    highest = int(_limit() * CONNECTIONS_SHARE)
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
                "needed, or raise the limit (ulimit -n) up to %d",
                highest,
                MAX_DESCRIPTORS,
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
