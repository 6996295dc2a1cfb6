"""File descriptors: the server takes no more connections than it has descriptors for.

libzmq aborts the process when it has no descriptor for a new connection at a Unix socket, and it cannot stop
listening without closing the connections that it has. So connections get only a share of the limit: one
beyond it is shut down as soon as it is accepted. The rest serves to watch processes and to accept.
"""

import ctypes
import logging
import resource
import socket

from lmcache_server.host import preflight

logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None)
ENOUGH_LIMIT = 1 << 16
CONNECTIONS = 3072
"""The most connections, at most half of the limit. All allowed sessions fit; more would only cost memory for
clients that never send Hello."""
SPARE = 1100
"""libzmq accepts at most 1,001 connections before the server reads its monitor: then that queue is full."""


def raise_limit() -> None:
    """Raise the soft limit to the hard limit. Logs a warning if that is low; raises StartError if it is very
    low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_LIMIT if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    check = preflight.open_files(_limit())
    preflight.require(check)
    if check.verdict != preflight.OK:
        logger.warning("%(finding)s: %(fix)s", {"finding": check.finding, "fix": check.fix})


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH_LIMIT if soft == resource.RLIM_INFINITY else soft


def for_connections() -> int:
    """The first descriptor that is one connection too many. The kernel gives out the lowest free number, so
    a high number means that all lower ones are taken."""
    return min(_limit() // 2, CONNECTIONS)


def usable() -> int:
    """The first descriptor that stays free for connections that libzmq is about to accept."""
    return max(_limit() - SPARE, _limit() * 5 // 8)


def shut_down(descriptor: int) -> None:
    """End a connection that libzmq owns; libzmq then closes the descriptor."""
    # The number may already belong to a newer connection, whose client then reconnects, or to nothing.
    _libc.shutdown(descriptor, socket.SHUT_RDWR)
