"""Which client a connection belongs to, so that a client's session ends with its connection.

A ROUTER socket does not say that a peer has gone. Its monitor does: it reports the number of the connection's
descriptor. And every message has the number of the descriptor that it came through (ZMQ_SRCFD). This works
over TCP and between process namespaces, where a process id means nothing.
"""

import contextlib
import logging
import time
from collections.abc import Hashable

import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_client.contract.endpoint import peer_pid
from lmcache_server.host import descriptors
from lmcache_server.net.authenticator import Authenticator

logger = logging.getLogger(__name__)

WARN_EVERY_S = 60.0
QUIET_MS = 50
MOST_EVENTS = 1_024
"""Read in one call. The monitor's queue holds 1,001 (libzmq's default and our 1). So a call reads all that
were reported before it, and it ends though clients connect without pause."""
_MONITOR = "inproc://connections"
_READABLE = int(zmq.POLLIN)
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message is waiting. Costs a fifth of trying to receive one and catching zmq.Again."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


def _is_later(identity: bytes, owner: bytes) -> bool:
    """Whether `identity` connected after `owner`, so that it may have the same descriptor. ROUTER numbers
    clients as they connect."""
    names = [int.from_bytes(name[1:], "big") for name in (identity, owner)]
    return not owner or (names[0] - names[1]) % (1 << 32) < 1 << 31


class Connections:
    """Follows the connections of a ROUTER socket; create it before the socket is bound. With a `key`, it
    admits only clients that have that key.

    Descriptor numbers are used again. But ZeroMQ's one I/O thread reports the end of a connection before it
    delivers messages of the next one with that number. So call `ended` before `belongs`. Messages of the
    former client may still wait then, and come between those of the next one.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", key: bytes = b"") -> None:
        self._socket = socket
        self.authenticator = Authenticator(socket, key) if key else None
        # Not get_monitor_socket, whose queue is twice as long: the queue must be short, because a full one
        # stops libzmq from accepting more.
        socket.monitor(_MONITOR, _EVENTS | (_REFUSED if key else 0))
        self._monitor = socket.context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 1)
        self._monitor.connect(_MONITOR)
        self._most = descriptors.for_connections()
        self._warned_s: dict[str, float] = {}
        self._open: dict[int, bytes] = {}
        """The client of each open connection, by descriptor; empty until its first message."""
        self._replaced: list[bytes] = []
        """Clients whose connection had ended before their first message was read. It was taken for a message
        of the next connection, which has the same descriptor."""
        self._processes: dict[bytes, Hashable] = {}
        """By client: its process id, or the client itself if the kernel does not tell."""

    @property
    def descriptor(self) -> int:
        """Becomes readable when `ended` may have news. Like all of ZeroMQ's descriptors, it signals edges."""
        return int(self._monitor.getsockopt(zmq.FD))

    @property
    def has_more(self) -> bool:
        """Whether `ended` would have news."""
        return is_readable(self._monitor)

    def ended(self) -> list[bytes]:
        """The ROUTER identities of clients whose connections have ended since the last call. There may be
        more: see `has_more`."""
        gone, self._replaced = self._replaced, []
        for _ in range(MOST_EVENTS):
            if not is_readable(self._monitor):
                break
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] & _REFUSED:
                self._warn("a client is refused: it does not have the key of %(flag)s", flag="--key-file")
                continue
            # If a connection was accepted, the former owner of its descriptor number has gone.
            if identity := self._open.pop(event["value"], b""):
                gone.append(identity)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open[event["value"]] = b""
                if event["value"] >= self._most:
                    self._turn_away(event["value"])
        for identity in gone:
            self._processes.pop(identity, None)
        return gone

    def process(self, identity: bytes) -> Hashable | None:
        """What stands for the process of a client that has sent a message; None if its connection ended."""
        return self._processes.get(identity)

    def belongs(self, frame: zmq.Frame, identity: bytes) -> bool:
        """Note that this message came from the client `identity`. False if its connection has ended."""
        try:
            descriptor = frame.get(zmq.SRCFD)
        except zmq.ZMQError:  # an empty frame has no descriptor
            return False
        owner = self._open.get(descriptor)
        if owner is None or not _is_later(identity, owner):
            return False
        if owner and owner != identity:
            self._replaced.append(owner)
        self._open[descriptor] = identity
        self._processes[identity] = peer_pid(descriptor) or identity
        return True

    def peer_pid(self, identity: bytes) -> int | None:
        """The process of a client, as endpoint.peer_pid says."""
        numbers = [number for number, client in self._open.items() if client == identity]
        return peer_pid(numbers[0] if len(numbers) == 1 else -1)

    def _turn_away(self, descriptor: int) -> None:
        descriptors.shut_down(descriptor)
        self._warn(
            "connections are turned away: %(descriptors)d file descriptors are in use; stop clients "
            "that you do not need, or raise the limit of open files (ulimit -n) to %(enough)d",
            descriptors=self._most,
            enough=2 * descriptors.CONNECTIONS,
        )

    def _warn(self, text: str, **values: object) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s.get(text, -WARN_EVERY_S) >= WARN_EVERY_S:
            self._warned_s[text] = now_s
            logger.warning(text, values)

    def close(self) -> None:
        """Take no more connections, then stop following them."""
        # To report a connection, libzmq takes the lock that `disable_monitor` needs, and holds it while it
        # waits for room in the monitor's queue. So the queue is emptied until nothing more comes.
        with contextlib.suppress(zmq.ZMQError):
            self._socket.unbind(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        while self._monitor.poll(QUIET_MS):
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
        self._socket.disable_monitor()
        if self.authenticator is not None:
            self.authenticator.close()
        self._monitor.close(0)
