"""Requests that wait to be handled. The processes that sent them take turns of equal time.

ZeroMQ takes one frame of each connection in turn, so a process with many connections would get most of the
server's time.
"""

from collections import deque
from collections.abc import Hashable

import zmq

TURN_S = 0.001
MAX_BYTES = 32 << 20
"""Of the waiting frames of one process."""
MIN_FRAME_BYTES = 640
"""A small frame counts as this many bytes, because that is what it takes in memory."""
COPIED_BYTES = 1 << 13
"""A smaller frame is copied: it would keep all of the buffer of 8 KiB with which ZeroMQ received it."""


class _Waiting:
    def __init__(self) -> None:
        self.frames: deque[tuple[bytes, zmq.Frame]] = deque()
        self.num_bytes = 0
        self.left_s = 0.0
        """Of its turn. A request that takes longer leaves a debt, for which later turns are skipped."""


class Turns:
    def __init__(self) -> None:
        self._processes: dict[Hashable, _Waiting] = {}
        """Those with waiting frames or a debt. The first one has its turn."""
        self._last: _Waiting | None = None

    def add(self, process: Hashable, identity: bytes, frame: zmq.Frame) -> bool:
        """Lets a frame of a client wait for its process's turn. False if too much of that process waits."""
        waiting = self._processes.get(process) or _Waiting()
        size = max(len(frame), MIN_FRAME_BYTES)
        if waiting.num_bytes + size > MAX_BYTES:
            return False
        waiting.frames.append((identity, zmq.Frame(frame.bytes) if len(frame) < COPIED_BYTES else frame))
        waiting.num_bytes += size
        self._processes[process] = waiting
        return True

    def take(self) -> tuple[bytes, zmq.Frame] | None:
        """The next client and its frame; None if nothing waits."""
        while self._processes:
            process, waiting = next(iter(self._processes.items()))
            if waiting.frames and waiting.left_s > 0:
                self._last = waiting
                identity, frame = waiting.frames.popleft()
                waiting.num_bytes -= max(len(frame), MIN_FRAME_BYTES)
                return identity, frame
            del self._processes[process]
            waiting.left_s = min(waiting.left_s, 0.0) + TURN_S
            if waiting.frames or waiting.left_s < 0:
                self._processes[process] = waiting
        return None

    def charge(self, seconds: float) -> None:
        """The frame that was taken last has cost so much time."""
        if self._last is not None:
            self._last.left_s -= seconds
