"""File descriptors: the server takes no more connections than it has descriptors for.

libzmq ends the whole process when it has none left for a connection at a Unix socket, and it can stop
listening only by closing the connections that it has. So those beyond a share of the limit are shut down
as soon as they are accepted; what is left is for watching processes and for what comes in meanwhile.
"""

import contextlib
import logging
import resource
import socket

from lmcache_server.host import preflight

logger = logging.getLogger(__name__)

ENOUGH_LIMIT = 1 << 16
CONNECTIONS = 3072
"""For connections, at most half of the limit: as many as all sessions that may be need, and more would only
be memory for connections that never greet."""
SPARE = 1100
"""More than libzmq can accept while nobody looks: it waits when its monitor's queue of 1,001 is full."""


def raise_limit() -> None:
    """Make use of the hard limit, and say so when it is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_LIMIT if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    check = preflight.open_files(_limit())
    if check.fix:
        logger.warning("%(finding)s: %(fix)s", {"finding": check.finding, "fix": check.fix})


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH_LIMIT if soft == resource.RLIM_INFINITY else soft


def for_connections() -> int:
    """A connection whose descriptor has this number or a higher one is one too many: the kernel gives out
    the lowest free number, so a high one says that all below are taken."""
    return min(_limit() // 2, CONNECTIONS)


def usable() -> int:
    """Descriptors with this number and higher ones stay free for connections that come in meanwhile."""
    return max(_limit() - SPARE, _limit() * 5 // 8)


def shut_down(descriptor: int) -> None:
    """End a connection that libzmq owns; it closes the descriptor itself."""
    # Meanwhile the number may stand for another connection, whose client then comes back by itself.
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
