"""Calls a tier from threads of its own, so that nothing else waits for it."""

import asyncio
import contextlib
import functools
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lmcache_server.options.tiers.base import Tier, TierError, Usage
from lmcache_server.options.tiers.compressed_body import OFF
from lmcache_server.options.tiers.compression_choice import Compressor
from lmcache_server.options.tiers.pieces import size
from lmcache_server.options.tiers.record_format import DamagedRecordError, EncryptedRecord, Label, Record
from lmcache_server.transfer.digest import has_changed

READERS, ASKERS, WRITERS = 4, 2, 2
STUCK_S = 5.0
PAUSE_S = 0.1

Payload = Sequence[tuple[int, int]]
T = TypeVar("T")


class Lane:
    """Calls that wait for one of some threads. A call that hangs blocks only its thread: nobody joins it."""

    def __init__(self, name: str, threads: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._threads = threads
        self._running_since_s: dict[int, float] = {}
        """By thread: when its call began."""
        self.closing = False
        for _ in range(threads):
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self._loop.create_future()
        # Nobody may be waiting when it fails; asyncio would log that.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        with self._changed:
            if not self.closing:
                self._waiting.append((call, future))
                self._changed.notify()
                return future
        future.set_exception(TierError("the server is ending"))
        return future

    def touch(self) -> None:
        """Called in a thread of the lane: its call does not hang, it waits on purpose."""
        self._running_since_s[threading.get_ident()] = time.monotonic()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_hanging(self) -> int:
        """How many threads have been in their call for more than STUCK_S seconds."""
        now_s = time.monotonic()
        return sum(now_s - since_s > STUCK_S for since_s in list(self._running_since_s.values()))

    def is_stuck(self) -> bool:
        return self.num_hanging == self._threads

    def is_busy(self) -> bool:
        return bool(self._running_since_s)

    def close(self) -> None:
        """Fail the waiting calls, and end the threads after the calls that are running."""
        with self._changed:
            self.closing = True
            self._changed.notify_all()
            self.fail_waiting("the server is ending")

    def fail_waiting(self, reason: str) -> None:
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
        for _, future in waiting:
            self._settle_soon(future, None, TierError(reason))

    def _work(self) -> None:
        own = threading.get_ident()
        while True:
            with self._changed:
                while not (self._waiting or self.closing):
                    self._changed.wait()
                if not self._waiting:
                    return
                call, future = self._waiting.popleft()
                self._running_since_s[own] = time.monotonic()
            result: Any = None
            error: Exception | None = None
            try:
                result = call()
            except BaseException as failure:  # any must reach the owner of the call, also a panic of Rust
                kind = DamagedRecordError if isinstance(failure, DamagedRecordError) else TierError
                error = kind(str(failure) or type(failure).__name__)
                _clear_frames(failure)
            del self._running_since_s[own]
            self._settle_soon(future, result, error)

    def _settle_soon(self, future: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
        def settle() -> None:
            if not future.done():
                future.set_result(result) if error is None else future.set_exception(error)

        # If the call hung until the server had ended, the loop is closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(settle)


class TierWorker:
    """One tier with its threads: reads wait for no writes, and questions for neither. `open_tier` is called
    in a thread when the tier is first needed, and again while it fails. With a `cipher`, records are
    encrypted; `compress` says which are compressed first. Futures may fail with TierError, and those of
    `read` and `write` with DamagedRecordError."""

    def __init__(
        self,
        name: str,
        open_tier: Callable[[], Tier],
        loop: asyncio.AbstractEventLoop,
        rates: "Rates",
        cipher: Any = None,
        lane: type[Lane] = Lane,
        compress: str = OFF,
    ) -> None:
        self._open_tier = open_tier
        self._tier: Tier | None = None
        self._opening = threading.Lock()
        self._reads = lane(f"{name}-read", READERS, loop)
        self._asks = lane(f"{name}-ask", ASKERS, loop)
        self._writes = lane(f"{name}-write", WRITERS, loop)
        self._lanes = (self._reads, self._asks, self._writes)
        self._rates = rates
        self._cipher = cipher
        self._record = functools.partial(EncryptedRecord, cipher=cipher) if cipher else Record
        self.compressor = Compressor(compress)

    def open(self) -> "asyncio.Future[Tier]":
        return self._reads.submit(self._opened)

    def present(self, names: Sequence[str]) -> "asyncio.Future[Sequence[bool]]":
        return self._asks.submit(lambda: self._opened().present(list(map(self._named, names))))

    def read(self, label: Label, payload: Payload) -> "asyncio.Future[bytes | None]":
        """Reads an object into L1: its digest, or None if the tier does not have it."""
        return self._reads.submit(lambda: self._read(label, payload))

    def write(self, label: Label, payload: Payload) -> "asyncio.Future[str]":
        """Writes an object: "written", "present" if it was there, "full" if the tier has no room."""
        return self._writes.submit(lambda: self._write(label, payload))

    def remove(self, names: Sequence[str]) -> "asyncio.Future[None]":
        return self._writes.submit(lambda: self._opened().remove(list(map(self._named, names))))

    def clear(self, prefixes: Sequence[str]) -> "asyncio.Future[Any]":
        """Forget the records whose names begin with one of the prefixes."""
        return self._reads.submit(lambda: list(map(self._opened().clear, prefixes)))

    @property
    def reads_waiting(self) -> int:
        return self._reads.num_waiting + self._asks.num_waiting

    @property
    def restarts(self) -> int:
        """Of its helper process, if it has one."""
        return getattr(self._tier, "restarts", 0)

    @property
    def usage(self) -> Usage | None:
        """What the tier holds; None if it does not know."""
        return getattr(self._tier, "usage", None)

    def read_delay_s(self, num_bytes: int) -> float:
        """How long reads of so many bytes wait because of a limit."""
        return self._rates.read.delay_s(int(num_bytes * self.compressor.read_share))

    @property
    def writes_hanging(self) -> int:
        return self._writes.num_hanging

    def is_stuck(self) -> bool:
        return any(lane.is_stuck() for lane in self._lanes)

    def fail_stuck(self) -> None:
        """Fails the calls that wait for threads which all hang. Those may never return."""
        for lane in self._lanes:
            if lane.is_stuck():
                lane.fail_waiting("all its calls hang")

    def close(self, timeout_s: float) -> None:
        """Fails the waiting calls, waits for the running ones, and closes the tier. A tier whose calls hang
        for longer is left as it is."""
        for lane in self._lanes:
            lane.close()
        end_s = time.monotonic() + timeout_s
        while any(lane.is_busy() for lane in self._lanes):
            if time.monotonic() > end_s:
                return
            time.sleep(0.01)
        if self._tier is not None:
            with contextlib.suppress(TierError):
                self._tier.close()

    # -- in the threads ---------------------------------------------------------------------------

    def _opened(self) -> Tier:
        with self._opening:
            if self._tier is None:
                self._tier = self._open_tier()
            return self._tier

    def _read(self, label: Label, payload: Payload) -> bytes | None:
        began_s = time.monotonic()
        self._rates.read.take(label.num_bytes, self._reads)
        record, tier = self._record(label, payload), self._opened()
        name = self._named(label.name)
        num_bytes = tier.read(name, record.pieces)
        if not num_bytes:
            if tier.present((name,))[0]:  # with another size: it would be found again
                tier.remove((name,))
            return None
        self._rates.read.give_back(max(label.num_bytes - num_bytes, 0))
        read_s = time.monotonic()
        try:
            found = record.open(num_bytes)
        except DamagedRecordError:
            tier.remove((name,))
            raise
        record.release()
        self.compressor.was_read(label, num_bytes, read_s - began_s, time.monotonic() - read_s)
        return found

    def _named(self, name: str) -> str:
        """Servers with another key, or none, must not take these records for damaged."""
        return f"{name}.{self._cipher.key_id}" if self._cipher else name

    def _write(self, label: Label, payload: Payload) -> str:
        tier = self._opened()
        name = self._named(label.name)
        if tier.present((name,))[0]:
            return "present"
        if has_changed(payload, label.digest):
            raise DamagedRecordError("its stored pages have changed")
        record = self._record(label, payload)
        record.seal(self.compressor.body(label, record.payload))
        num_bytes, began_s = size(record.pieces), time.monotonic()
        for pace in (self._rates.write, self._rates.daily):
            pace.take(min(num_bytes, label.num_bytes), self._writes)
        if not tier.write(name, record.pieces):
            return "full"
        record.release()
        self.compressor.was_written(num_bytes, time.monotonic() - began_s)
        return "written"


class Pace:
    """Bytes per second that calls together may move; 0 means any number. `burst_s` seconds' worth may go at
    once."""

    def __init__(self, bytes_per_s: float, burst_s: float = 1.0) -> None:
        self._rate = bytes_per_s
        self._burst = bytes_per_s * burst_s
        self._left = self._burst
        self._filled_s = time.monotonic()
        self._lock = threading.RLock()

    def delay_s(self, num_bytes: int) -> float:
        """How long so many bytes would wait."""
        if not self._rate:
            return 0.0
        with self._lock:
            now_s = time.monotonic()
            self._left = min(self._left + (now_s - self._filled_s) * self._rate, self._burst)
            self._filled_s = now_s
            return max((num_bytes - self._left) / self._rate, 0.0)

    def give_back(self, num_bytes: int) -> None:
        """So many bytes that were taken were not moved."""
        with self._lock:
            self._left += num_bytes

    def take(self, num_bytes: int, lane: Lane) -> None:
        """Waits until so many bytes may go. Raises TierError if the lane closes first."""
        with self._lock:
            until_s = time.monotonic() + self.delay_s(num_bytes)
            self._left -= num_bytes
        while (left_s := until_s - time.monotonic()) > 0:
            if lane.closing:
                raise TierError("the server is ending")
            time.sleep(min(left_s, PAUSE_S))
            lane.touch()


class Rates:
    """What a user allows: MB (10**6 bytes) per second each way, and TB (10**12 bytes) written per day. 0
    means no limit. The share of a quarter of an hour may be written at once."""

    def __init__(self, read_mb_s: float = 0, write_mb_s: float = 0, write_tb_day: float = 0) -> None:
        self.read = Pace(read_mb_s * 1e6)
        self.write = Pace(write_mb_s * 1e6)
        self.daily = Pace(write_tb_day * 1e12 / 86400, burst_s=900.0)


def _clear_frames(failure: BaseException | None) -> None:
    """Frees what the frames of an error hold. The garbage collector must not find it there: before 3.12.7,
    CPython crashes if it frees a memoryview before what uses its memory (gh-77894)."""
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__context__
