"""What the connector asks of the operating system and of ZeroMQ: time, threads, processes, a connection.

The simulation in the tests replaces this as a whole; everything else of the connector runs there as it is.
"""

import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_client.contract.codec import MAX_MESSAGE_BYTES
from lmcache_client.memory.host import allow_tracer

RECONNECT_MS = 100
PROBE_S = 0.2
_READABLE = int(zmq.POLLIN)


class ConnectionLostError(Exception):
    """A frame could not be sent."""


class Connection:
    """A DEALER socket to one address, and what its monitor says of it. Not for two threads at a time."""

    def __init__(self, address: str) -> None:
        # With its context of its own, the end of this connection is the end of its thread and descriptors.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # Nothing is queued for a server that is not there: it would act on stale requests later.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._descriptor = -1
        """The connection's own, once it is up; libzmq's to close."""
        self._poll = select.poll()
        self._poll.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)
        self._socket.connect(address)

    def send(self, frame: bytes) -> None:
        """Never blocks; raises ConnectionLostError."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise ConnectionLostError(str(error)) from error

    def receive(self) -> bytes | None:
        """The next frame, if one has arrived."""
        try:
            return self._socket.recv(zmq.NOBLOCK) if _is_readable(self._socket) else None
        except zmq.ZMQError:  # whatever is wrong with the cache's connection, an engine goes on
            return None

    def event(self) -> bool | None:
        """What became of the connection since the last call: True, it is up; False, it broke."""
        try:
            if not _is_readable(self._monitor):
                return None
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
        except zmq.ZMQError:
            return None
        is_up = event["event"] != zmq.EVENT_DISCONNECTED
        self._descriptor = event["value"] if is_up else -1
        return is_up

    def peer_pid(self) -> int | None:
        """The process id of the server as this process sees it, 0 if it does not see it; None over TCP, where
        the kernel does not say."""
        try:
            with socket.fromfd(self._descriptor, socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                if peer.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) != socket.AF_UNIX:
                    return None
                return int(struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
        except OSError:
            return 0

    def wait(self, wait_s: float) -> None:
        """Until a frame has arrived, or `wait_s` is over, rounded up to milliseconds. Only when `receive`
        had nothing: ZeroMQ's descriptor tells of what is new."""
        self._poll.poll(math.ceil(wait_s * 1000))

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()


def _is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """A fifth of the cost of the exception that tells of an empty socket."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


class Process:
    """Another process, by a descriptor that stays its own when its id is given to another."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def ended(self) -> bool:
        """Whether it has: none of its threads does anything any more."""
        return bool(select.select([self._descriptor], [], [], 0)[0])

    def close(self) -> None:
        os.close(self._descriptor)


class System:
    """See the module."""

    def pid(self) -> int:
        return os.getpid()

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def lock(self) -> "threading.RLock":
        return threading.RLock()

    def event(self) -> threading.Event:
        return threading.Event()

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def connect(self, address: str) -> Connection:
        return Connection(address)

    def open_process(self, pid: int) -> Process | None:
        """None where the id means nothing here: another process namespace, or the process has ended."""
        try:
            return Process(os.pidfd_open(pid))
        except OSError:
            return None

    def nobody_listens(self, address: str) -> bool:
        """Whether the kernel refuses a connection to a ZeroMQ address: whoever listened there has ended."""
        try:
            if address.startswith("ipc://"):
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(PROBE_S)
                    probe.connect(address.removeprefix("ipc://"))
            else:
                host, _, port = address.removeprefix("tcp://").rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            return False
        return False

    def allow_tracer(self, pid: int) -> None:
        allow_tracer(pid)


SYSTEM = System()
