"""The connector's access to the operating system and to ZeroMQ: time, threads, processes and connections.

The simulation in the tests replaces this module; it runs the rest of the connector unchanged.
"""

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable

import zmq
from zmq import Event
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from lmcache_client.contract.codec import MAX_FRAME_BYTES
from lmcache_client.contract.endpoint import KEY_FILE, EndpointError, peer_pid, split
from lmcache_client.memory.host import allow_tracer

RECONNECT_MS = 100
PROBE_S = 0.2
_READABLE = int(zmq.POLLIN)
_FAILED = Event.HANDSHAKE_FAILED_NO_DETAIL | Event.HANDSHAKE_FAILED_PROTOCOL | Event.HANDSHAKE_FAILED_AUTH


class ConnectionLostError(Exception):
    """The frame could not be sent."""


class Connection:
    """A DEALER socket to one address, with its monitor. Only one thread at a time may use it."""

    def __init__(self, address: str) -> None:
        plain, key = split(address)
        self._has_key = bool(key)
        whose = "has another key, or none, or was too busy to shake hands" if key else "wants a key"
        self._why = (
            f"{plain} {whose}: give it and its clients the same key file (--key-file of the server and of "
            "commands, lmcache.mp.key_file of engines)"
        )
        self.refusal = ""
        """Why the server did not shake hands, if that may be because of the key; otherwise empty."""
        # Closing a context of its own also ends the thread and the descriptors of this connection.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # ZeroMQ must not queue requests while no server is there: the next server would act on them.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED
        )
        self._descriptor = -1
        """The connection's file descriptor, or -1 until it is up. libzmq closes it."""
        self._signal = int(self._socket.getsockopt(zmq.FD))
        if key:
            # Both sides have the same key pair. Its public key is in the clear nowhere.
            secret = z85.encode(key)
            self._socket.curve_secretkey = secret
            self._socket.curve_publickey = self._socket.curve_serverkey = zmq.curve_public(secret)
        try:
            self._socket.connect(plain)
        except (zmq.ZMQError, ValueError):  # ValueError: text that no address can have
            self.close()
            raise

    def send(self, frame: bytes) -> None:
        """Sends a frame without blocking. Raises ConnectionLostError."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise ConnectionLostError(str(error)) from error

    def receive(self) -> bytes | None:
        """The next frame, or None if none has arrived."""
        try:
            return self._socket.recv(zmq.NOBLOCK) if _is_readable(self._socket) else None
        except zmq.ZMQError:  # a problem with the connection must not stop the engine
            return None

    def event(self) -> bool | None:
        """The next change of the connection: True if it came up, False if it broke, None without a change."""
        with contextlib.suppress(zmq.ZMQError):
            while _is_readable(self._monitor):
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                if event["event"] & _FAILED:  # next, it is disconnected
                    # Without a key, a server that is quick to close tells the reason only at another try.
                    if self._has_key or event["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                        self.refusal = self._why
                elif event["event"] != zmq.EVENT_CONNECTED:
                    return bool(event["event"] != zmq.EVENT_DISCONNECTED)
                else:  # the socket is connected, but the peer has not shaken hands yet
                    self._descriptor = event["value"]
        return None

    def peer_pid(self) -> int | None:
        """The server's process, as endpoint.peer_pid says."""
        return peer_pid(self._descriptor)

    def wait(self, wait_s: float) -> None:
        """Waits until a frame arrives, but at most `wait_s`, rounded up to milliseconds. Call it only after
        `receive` returned None, because ZeroMQ's descriptor signals only new frames. Another thread may use
        or close the connection meanwhile; then the wait may be shorter, or as long as `wait_s`."""
        poll = select.poll()
        poll.register(self._signal, select.POLLIN)
        poll.poll(math.ceil(wait_s * 1000))

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()


def _is_readable(socket: "zmq.Socket[bytes]") -> bool:
    # This costs a fifth of calling recv on an empty socket and catching the exception.
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


class Process:
    """Another process. Its descriptor stays valid even if its id is reused."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def ended(self) -> bool:
        """Whether the process has ended, with all of its threads; False after `close`."""
        if self._descriptor < 0:
            return False
        poll = select.poll()  # select() cannot ask for a descriptor beyond 1,023
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class System:
    """The real system; the simulation has another."""

    pid = staticmethod(os.getpid)
    now_s = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
    random_bytes = staticmethod(os.urandom)
    lock = staticmethod(threading.RLock)
    event = staticmethod(threading.Event)
    allow_tracer = staticmethod(allow_tracer)

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def open_process(self, pid: int) -> Process | None:
        """The process, or None if it has ended or is in another process namespace."""
        try:
            return Process(os.pidfd_open(pid))
        except OSError:
            return None

    def connect(self, address: str) -> Connection:
        """Raises ConnectionLostError, for example when no file descriptor is left."""
        try:
            return Connection(address)
        except (zmq.ZMQError, EndpointError) as error:
            raise ConnectionLostError(str(error)) from error

    def nobody_listens(self, address: str) -> bool:
        """Whether the kernel refuses a connection to a ZeroMQ address: whoever listened there has ended."""
        try:
            plain, _, _ = address.partition(KEY_FILE)
            if plain.startswith("ipc://"):
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(PROBE_S)
                    probe.connect(plain.removeprefix("ipc://"))
            else:
                host, _, port = plain.removeprefix("tcp://").rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
        except OSError as error:
            return isinstance(error, (ConnectionRefusedError, FileNotFoundError))
        return False


SYSTEM = System()
