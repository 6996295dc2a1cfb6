"""A tier whose client runs in a helper process, because it is native code that may crash or hang.

A call that misses its deadline costs the process its life. No call returns before its answer or before the
process is gone. So nobody uses frames again into which that process might still write.
"""

import contextlib
import ctypes
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lmcache_server.l1.area import Area, shared_memory
from lmcache_server.options.tiers.base import TierError, checked_name
from lmcache_server.options.tiers.helper import L1, MAX_BYTES, MAX_NAMES, Call, Part, Reply, Request
from lmcache_server.options.tiers.pieces import gather, size, spread

logger = logging.getLogger(__name__)

CHANNELS = 8
"""Calls at the same time: as many as a worker has threads."""
OPEN_S, CALL_S, SLOWEST_BYTES_PER_S = 10.0, 4.0, 50e6
"""The deadline of a start; and of a call, for whose bytes there is more time."""
PIN_BYTES_PER_S = 1e9
"""With RDMA, memory is pinned before it is shared, at least so fast."""
AGAIN_S, KEEP_AGAIN_S = 1.0, 5.0
"""So long after a start of either process that failed nobody tries again."""
SMALL_BYTES = 256 << 10
"""A record of smaller pieces is copied together: clients are slow with many."""
T = TypeVar("T")
_PACKAGES = Path(__file__).resolve().parents[2]


class HelperLostError(Exception):
    """The process has ended, hangs, or talks nonsense."""

    def __init__(self, text: str, hangs: bool = False) -> None:
        super().__init__(text)
        self.hangs = hangs


class _Channel:
    """One call at a time. It has memory of its own, for what does not lie in L1."""

    def __init__(self, number: int, connection: socket.socket, l1: Area | None) -> None:
        self._area = 1 + number
        self._connection = connection
        self._l1 = l1
        self._memory = memoryview(b"")

    def share(self, area: int, memory: Area) -> None:
        part = Part(area, memory.offset, memory.num_bytes)
        timeout_s = OPEN_S + memory.num_bytes / PIN_BYTES_PER_S
        self.ask(Request("share", parts=[part]), timeout_s, [memory.descriptor])

    def ask(self, request: Request, timeout_s: float, descriptors: Sequence[int] = ()) -> list[bool]:
        """Raises HelperLostError, and TierError if the client says why it failed."""
        try:
            self._connection.settimeout(timeout_s)
            socket.send_fds(self._connection, [msgspec.msgpack.encode(request)], descriptors)
            if not (content := self._connection.recv(MAX_BYTES)):
                raise EOFError
            reply = msgspec.msgpack.decode(content, type=Reply)
        except TimeoutError:
            raise HelperLostError(f"gave no answer within {timeout_s:.0f} s", hangs=True) from None
        except (OSError, EOFError):
            raise HelperLostError("has ended") from None
        except msgspec.MsgspecError as error:
            raise HelperLostError("gave no valid answer") from error
        if reply.error:
            raise TierError(reply.error[:300])
        return reply.found

    def move(self, call: Call, name: str, pieces: Sequence[memoryview], timeout_s: float) -> bool:
        """Read or write a record."""
        is_small = size(pieces) < SMALL_BYTES * len(pieces)
        parts: list[Part] = []
        others: list[memoryview] = []
        for piece in pieces:
            if self._l1 is not None and not is_small:
                offset = ctypes.addressof(ctypes.c_char.from_buffer(piece)) - self._l1.address
                if 0 <= offset <= self._l1.num_bytes - piece.nbytes:
                    parts.append(Part(L1, offset, piece.nbytes))
                    continue
            if parts and parts[-1].area != L1:
                parts[-1] = parts[-1]._replace(num_bytes=parts[-1].num_bytes + piece.nbytes)
            else:
                parts.append(Part(self._area, size(others), piece.nbytes))
            others.append(piece)
        buffer = self._own(size(others))
        if call == "write":
            gather(others, buffer)
        (done,) = self.ask(Request(call, [name], parts), timeout_s) or [False]
        if call == "read" and done:
            spread(buffer, others)
        return done

    def close(self) -> None:
        self._connection.close()

    def _own(self, num_bytes: int) -> memoryview:
        """So much memory of this channel."""
        if self._memory.nbytes < num_bytes:
            size_bytes = 1 << (num_bytes - 1).bit_length()
            descriptor, mapping = shared_memory("lmcache-helper", size_bytes)
            memory = memoryview(mapping)
            try:
                self.share(self._area, Area(descriptor, 0, 0, size_bytes))
            finally:
                os.close(descriptor)
            self._memory = memory
        return self._memory[:num_bytes]


class _Process:
    """One life of a helper. Raises TierError if it cannot be started."""

    def __init__(self, settings: dict[str, Any], channels: int, l1: Area | None) -> None:
        self.channels: queue.LifoQueue[_Channel] = queue.LifoQueue()
        self._last_line = ""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(channels)]
                for own, other in pairs:
                    ours.enter_context(own)
                    theirs.enter_context(other)
                passed = [other.fileno() for _, other in pairs]
                # -m adds the working directory to the search path: use one that is on it anyway.
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "lmcache_server.options.tiers.helper", *map(str, passed)],
                    cwd=_PACKAGES, pass_fds=passed, stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                )  # fmt: skip
            except OSError as error:
                raise TierError(f"its process could not be started: {error}") from error
            ours.pop_all()
        threading.Thread(target=self._listen, name="tier-helper", daemon=True).start()
        first, *others = [_Channel(number, own, l1) for number, (own, _) in enumerate(pairs)]
        for channel in (*others, first):
            self.channels.put(channel)
        try:
            timeout_s = OPEN_S + settings.get("segment_bytes", 0) / PIN_BYTES_PER_S
            first.ask(Request("open", settings=settings), timeout_s)
            if l1 is not None:
                first.share(L1, l1)
        except HelperLostError as error:
            raise TierError(f"its process {error}{self.end()}") from None
        except TierError:
            self.end()
            raise

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> str:
        """Kills it, and returns when it is gone, however long that takes. Says how it had ended by itself."""
        self.process.kill()
        code = self.process.wait()
        with self.channels.mutex:
            for channel in self.channels.queue:  # those in use are closed by their users
                channel.close()
        return "" if code == -signal.SIGKILL else f", with exit code {code}: {self._last_line}"

    def give_back(self, channel: _Channel) -> None:
        if not self.is_alive():
            channel.close()
        self.channels.put(channel)

    def _listen(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self._last_line = line.decode(errors="replace").strip()[-200:]
                logger.debug("%(line)s", {"line": self._last_line})


class Isolated:
    """Opens a Mooncake with these settings in a process of its own. `l1` is memory that both map, or None.
    With `holder`, another process opens one with those settings and only holds it open: what it keeps
    survives the end of the first. Raises TierError if the store cannot be used."""

    def __init__(
        self, where: str, settings: dict[str, Any], l1: Area | None, holder: dict[str, Any] | None = None
    ) -> None:
        self._where, self._settings, self._l1 = where, settings, l1
        self._holder_settings = holder
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._holder: _Process | None = None
        self._wait_until_s = self._keep_after_s = 0.0
        self.restarts = 0
        try:
            self._call(lambda _channel: None)
        except BaseException:
            self.close()  # the holder may run
            raise

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        found: list[bool] = []
        for start in range(0, len(names), MAX_NAMES):
            asked = list(map(checked_name, names[start : start + MAX_NAMES]))
            answer = self._ask("present", asked, CALL_S)
            if len(answer) != len(asked):
                raise TierError(f"{self._where} gave no valid answer")
            found += answer
        return found

    def read(self, name: str, pieces: Sequence[memoryview]) -> int:
        """Never a smaller record: these clients read what has exactly the size of their memory."""
        return size(pieces) if self._move("read", name, pieces) else 0

    def write(self, name: str, pieces: Sequence[memoryview]) -> bool:
        return self._move("write", name, pieces)

    def remove(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), MAX_NAMES):
            self._ask("remove", list(map(checked_name, names[start : start + MAX_NAMES])), OPEN_S)

    def clear(self, prefix: str) -> None:
        self._ask("clear", [prefix], OPEN_S)

    def close(self) -> None:
        for process in (self._process, self._holder):
            if process is not None:
                process.end()

    def _move(self, call: Call, name: str, pieces: Sequence[memoryview]) -> bool:
        timeout_s = CALL_S + size(pieces) / SLOWEST_BYTES_PER_S
        checked_name(name)
        return self._call(lambda channel: channel.move(call, name, pieces, timeout_s))

    def _ask(self, call: Call, names: list[str], timeout_s: float) -> list[bool]:
        return self._call(lambda channel: channel.ask(Request(call, names), timeout_s))

    def _call(self, call: Callable[[_Channel], T]) -> T:
        """Errors become a TierError that says whose they are."""
        try:
            return self._once(call, is_last=False)
        except TierError as error:
            raise TierError(f"{self._where} failed: {error}") from None

    def _once(self, call: Callable[[_Channel], T], is_last: bool) -> T:
        process = self._running()
        channel = process.channels.get()
        try:
            return call(channel)
        except HelperLostError as error:
            how = process.end()
            if error.hangs or is_last:
                raise TierError(f"its process {error}{how}") from None
        finally:
            process.give_back(channel)
        # One crash ends all calls that are running, and only one of them may be the reason.
        return self._once(call, is_last=True)

    def _running(self) -> _Process:
        with self._lock:
            if self._process is not None and not self._process.is_alive():
                self.restarts += 1
                values = {"tier": self._where, "how": self._process.end()}
                logger.warning("the helper of %(tier)s is started again%(how)s", values)
                self._process = None
            self._keep()
            if self._process is None:
                if time.monotonic() < self._wait_until_s:
                    raise TierError("its process could not be started a moment ago")
                try:
                    self._process = _Process(self._settings, CHANNELS, self._l1)
                except TierError:
                    self._wait_until_s = time.monotonic() + AGAIN_S
                    raise
            return self._process

    def _keep(self) -> None:
        is_held = self._holder is not None and self._holder.is_alive()
        if self._holder_settings is None or is_held or time.monotonic() < self._keep_after_s:
            return
        if self._holder is not None:
            self.restarts += 1
            self._holder.end()
            self._holder = None
        try:
            self._holder = _Process(self._holder_settings, 1, None)
        except TierError as error:
            self._keep_after_s = time.monotonic() + KEEP_AGAIN_S
            values = {"tier": self._where, "reason": str(error)}
            logger.warning("%(tier)s gets no memory of this machine: %(reason)s", values)
