"""What a directory of this server alone holds: its records in the order of their last use, in memory."""

import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Kept(NamedTuple):
    """A record's file. Its name is the key."""

    num_bytes: int
    written_s: float
    used_s: float


class Catalog:
    """Records by name, least recently used first, of `used_bytes` in all. Not for several threads at once,
    except for `present` and `oldest`."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, Kept] = OrderedDict()
        self._in_use: Counter[str] = Counter()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def present(self, names: Sequence[str], written_after_s: float) -> list[bool]:
        get = self._records.get
        return [(kept := get(name)) is not None and kept.written_s >= written_after_s for name in names]

    def oldest(self) -> Kept | None:
        """The record that was not used for the longest time."""
        for _ in range(3):
            with contextlib.suppress(RuntimeError):  # another thread has just changed them
                return next(iter(self._records.values()), None)
        return None

    def items(self) -> list[tuple[str, Kept]]:
        return list(self._records.items())

    def add(self, name: str, kept: Kept) -> None:
        """As the last one used; in place of a record of that name."""
        self.pop(name)
        self._records[name] = kept
        self.used_bytes += kept.num_bytes

    def pop(self, name: str) -> Kept | None:
        if (kept := self._records.pop(name, None)) is not None:
            self.used_bytes -= kept.num_bytes
        return kept

    def use(self, name: str) -> None:
        """Somebody reads the record: it is no victim until `release`, and then the last one to go."""
        self._in_use[name] += 1
        if kept := self._records.get(name):
            self._records[name] = kept._replace(used_s=time.time())
            self._records.move_to_end(name)

    def release(self, name: str) -> None:
        self._in_use[name] -= 1
        if not self._in_use[name]:
            del self._in_use[name]

    def victims(self, missing_bytes: int, at_most: int | None = None) -> list[str] | None:
        """The records to evict in order to free so much, `at_most` so many; None if they do not suffice."""
        victims: list[str] = []
        for name, kept in self._records.items():
            if missing_bytes <= 0 or len(victims) == at_most:
                return victims
            if name not in self._in_use:
                victims.append(name)
                missing_bytes -= kept.num_bytes
        return victims if missing_bytes <= 0 or at_most is not None else None
