"""Which client a connection belongs to, so that the end of one is the end of the other.

ROUTER does not say that a peer has gone. Its monitor does, by the number of the connection's descriptor,
and every message knows the descriptor that it came through (ZMQ_SRCFD). This holds in any process
namespace and over TCP, where a process id says nothing.
"""

import contextlib
import logging
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_server.host import descriptors

logger = logging.getLogger(__name__)

TOLD_AGAIN_S = 60.0
QUIET_MS = 50
_MONITOR = "inproc://connections"
_READABLE = int(zmq.POLLIN)
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


def is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """A fifth of the cost of the exception that tells of an empty socket."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


class Connections:
    """Follows the connections of a ROUTER socket; create it before the socket is bound.

    A descriptor's number is used again, but ZeroMQ's one I/O thread reports the end of a connection before
    the messages of the next that has its number. So `ended` must be asked before `belongs`.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        # Not get_monitor_socket, whose queue is twice as long: libzmq accepts no faster than this is read.
        socket.monitor(_MONITOR, _EVENTS)
        self._monitor = socket.context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 1)
        self._monitor.connect(_MONITOR)
        self._most = descriptors.for_connections()
        self._told_s = -TOLD_AGAIN_S
        self._open: dict[int, bytes] = {}
        """The client of each open connection, by descriptor; empty while it has said nothing."""

    @property
    def descriptor(self) -> int:
        """Becomes readable when `ended` may have something; signals edges, as all of ZeroMQ's do."""
        return int(self._monitor.getsockopt(zmq.FD))

    def ended(self) -> list[bytes]:
        """The clients, by ROUTER's name, whose connections have ended since the last call."""
        gone: list[bytes] = []
        while is_readable(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            # An accepted connection has a new descriptor: whoever had the number before has gone.
            identity = self._open.pop(event["value"], b"")
            if identity:
                gone.append(identity)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open[event["value"]] = b""
                if event["value"] >= self._most:
                    self._turn_away(event["value"])
        return gone

    def belongs(self, frame: zmq.Frame, identity: bytes) -> bool:
        """Note that this message came from the client `identity`; False when its connection has ended."""
        try:
            descriptor = frame.get(zmq.SRCFD)
        except zmq.ZMQError:  # an empty frame does not know
            return False
        if descriptor not in self._open:
            return False
        self._open[descriptor] = identity
        return True

    def _turn_away(self, descriptor: int) -> None:
        descriptors.shut_down(descriptor)
        if time.monotonic() - self._told_s >= TOLD_AGAIN_S:
            self._told_s = time.monotonic()
            logger.warning(
                "connections are turned away: %(descriptors)d file descriptors are in use; close clients "
                "that are not needed, or raise the limit of open files (ulimit -n) to %(enough)d",
                {"descriptors": self._most, "enough": 2 * descriptors.CONNECTIONS},
            )

    def close(self) -> None:
        """Take no more connections, then stop following them."""
        # libzmq reports a connection under the lock that `disable_monitor` takes, and under it waits for room
        # in the monitor's queue. So the queue is emptied until nothing more comes.
        with contextlib.suppress(zmq.ZMQError):
            self._socket.unbind(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        while self._monitor.poll(QUIET_MS):
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
        self._socket.disable_monitor()
        self._monitor.close(0)
