"""Replies on their way to clients, bounded in bytes even for clients that never read.

ZeroMQ bounds what it holds for a connection by the number of messages, and a reply may have hundreds of KiB.
So it gets only a few replies of each connection. Further ones wait here, where their bytes are counted.
"""

from collections import deque
from itertools import islice

import zmq

HIGH_WATER = 32
"""Replies to one connection that ZeroMQ queues. It holds one more, which it is writing."""
MAX_REPLIES = 1024
"""Replies to one connection that wait here. This exceeds the copies that one client can have waiting: without
the reply to a copy, the client would keep holding its blocks."""
MAX_BYTES = 4 << 20
"""Bytes of the replies to one connection that wait here. Beyond this, only small replies are kept."""
MAX_TOTAL_BYTES = 64 << 20
"""The same for all connections together."""
SMALL_BYTES = 512
"""The reply to a copy has fewer bytes than this."""
TRIES = 16
"""Clients that one call of `flush` tries to send to."""


class _Queue:
    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.num_bytes = 0


class Replies:
    """Sends replies through a ROUTER socket, which it configures. Beyond the limits it drops replies; the
    requests of these clients then time out."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        # Without ROUTER_MANDATORY, ZeroMQ silently drops what exceeds the high water mark.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket = socket
        self._queues: dict[bytes, _Queue] = {}
        self.num_bytes = 0
        """Of all replies that wait here."""

    @property
    def are_waiting(self) -> bool:
        return bool(self._queues)

    def send(self, identity: bytes, frame: bytes) -> None:
        queue = self._queues.get(identity)
        if queue is None:
            if self._sent(identity, frame) or (self._learn() and self._sent(identity, frame)):
                return
            queue = self._queues[identity] = _Queue()
        size = len(frame)
        if len(queue.frames) >= MAX_REPLIES:
            return
        most = min(MAX_BYTES - queue.num_bytes, MAX_TOTAL_BYTES - self.num_bytes)
        if size <= SMALL_BYTES or size <= most:
            queue.frames.append(frame)
            queue.num_bytes += size
            self.num_bytes += size

    def flush(self) -> None:
        """Sends replies to some of the clients, as far as they take them now. Each call begins with other
        clients."""
        self._learn()
        for identity in list(islice(self._queues, TRIES)):
            queue = self._queues.pop(identity)
            while queue.frames and self._sent(identity, queue.frames[0]):
                size = len(queue.frames.popleft())
                queue.num_bytes -= size
                self.num_bytes -= size
            if queue.frames:
                self._queues[identity] = queue

    def forget(self, identity: bytes) -> None:
        """Drops the waiting replies of a client whose connection has ended."""
        if queue := self._queues.pop(identity, None):
            self.num_bytes -= queue.num_bytes

    def _learn(self) -> bool:
        """Lets ZeroMQ see which of its queues have room again: sending alone looks only now and then."""
        self._socket.getsockopt(zmq.EVENTS)
        return True

    def _sent(self, identity: bytes, frame: bytes) -> bool:
        """Whether ZeroMQ took the reply. A client that has gone loses it, as if it had been sent."""
        try:
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            pass
        return True
