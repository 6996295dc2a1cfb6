"""Which records of a tier are compressed, by what its reads, its writes and the compression take."""

import threading
import time
from collections.abc import Sequence

from lmcache_server.options.tiers.compressed_body import AUTO, OFF, SEGMENT_BYTES, ZSTD, compress, expand
from lmcache_server.options.tiers.pieces import first, size
from lmcache_server.options.tiers.record_format import Label, compressed_bytes

LEAST_GAIN = 0.1
"""What does not shrink by so much is left alone, and `auto` wants to save so much of the time of a read."""
ELEMENTS = (2, 4, 1)
FADES = 0.95
TRIES = 3
"""Once alone would often measure another thread's turn."""
MAX_GROUPS, TRY_AGAIN_S = 4096, 60.0
"""Groups are tried again after that time: the first record may have been an odd one, or the machine busy."""


def pays(share: float, read_bytes_per_s: float, expand_bytes_per_s: float) -> bool:
    """Whether to read `share` of the bytes and expand them takes clearly less time than to read them all.
    Both rates are one thread's; False while one is unknown."""
    if not read_bytes_per_s or not expand_bytes_per_s:
        return False
    return share / read_bytes_per_s + 1 / expand_bytes_per_s < (1 - LEAST_GAIN) / read_bytes_per_s


class Peak:
    """The fastest of the last calls. The others waited for each other, or for a processor, and two rates that
    were measured beside other work cannot be compared."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self.bytes_per_s = max(num_bytes / max(seconds, 1e-6), FADES * self.bytes_per_s)


class Compressor:
    """`setting` is compress= of the tier. Threads of the tier call it.

    What an object is like depends on its group. So the first of a group is tried with elements of several
    sizes, and a group that does not shrink is left alone."""

    def __init__(self, setting: str) -> None:
        self._setting, self._method = setting, ZSTD if setting == AUTO else setting
        self._groups: dict[tuple[bytes, int], tuple[int, float]] = {}
        """By namespace and number of the object: the size of an element, or 0 if it is left alone, and what
        share of the bytes is left."""
        self._reads, self._writes, self._expanded = Peak(), Peak(), Peak()
        self._again_s = 0.0
        self._lock = threading.Lock()
        self.stored_bytes = {"read": 0, "write": 0}
        """What records took in the tier."""
        self.read_share = 1.0

    def body(self, label: Label, payload: Sequence[memoryview]) -> list[memoryview]:
        """What to write instead of the payload; nothing if it is to be written as it is."""
        if self._setting == OFF or (self._setting == AUTO and not self._store_bytes_per_s):
            return []
        group = label.namespace, label.bit
        if len(self._groups) >= MAX_GROUPS or time.monotonic() > self._again_s:
            self._groups, self._expanded = {}, Peak()
            self._again_s = time.monotonic() + TRY_AGAIN_S
        element_bytes, share = self._groups[group] = self._groups.get(group) or self._try(payload)
        is_wanted = self._setting != AUTO or pays(share, self._store_bytes_per_s, self._expanded.bytes_per_s)
        if not element_bytes or not is_wanted:
            return []
        body = compress(payload, self._method, element_bytes)
        share = compressed_bytes(body) / label.record_bytes
        is_smaller = share <= 1 - LEAST_GAIN
        self._groups[group] = element_bytes if is_smaller else 0, share
        return body if is_smaller else []

    def was_read(self, label: Label, num_bytes: int, read_s: float, opened_s: float) -> None:
        """A record of so many bytes was read and then opened, in so many seconds each."""
        share = num_bytes / label.record_bytes
        with self._lock:
            self.stored_bytes["read"] += num_bytes
            self.read_share += (share - self.read_share) / 8
            self._reads.add(num_bytes, read_s)
            if share < 1:
                self._expanded.add(label.num_bytes, opened_s)

    def was_written(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self.stored_bytes["write"] += num_bytes
            self._writes.add(num_bytes, seconds)

    @property
    def _store_bytes_per_s(self) -> float:
        """Writes tell how fast it is as long as nothing was read."""
        return self._reads.bytes_per_s or self._writes.bytes_per_s

    def _try(self, payload: Sequence[memoryview]) -> tuple[int, float]:
        sample = first(payload, SEGMENT_BYTES)
        bodies = {each: compress(sample, self._method, each) for each in ELEMENTS}
        best = min(bodies, key=lambda each: size(bodies[each]))
        share = size(bodies[best]) / size(sample)
        if share > 1 - LEAST_GAIN:
            return 0, share
        body, into, seconds = memoryview(b"".join(bodies[best])), memoryview(bytearray(size(sample))), []
        for _ in range(TRIES):
            began_s = time.perf_counter()
            expand(body, [into])
            seconds.append(time.perf_counter() - began_s)
        with self._lock:
            self._expanded.add(size(sample), min(seconds))
        return best, share
