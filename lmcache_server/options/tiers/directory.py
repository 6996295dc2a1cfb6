"""A tier in a directory: of a local NVMe, or of any POSIX file system that several machines mount."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence

import numpy as np

from lmcache_server.host.units import size
from lmcache_server.options.tiers import folders
from lmcache_server.options.tiers.base import TierError, Usage
from lmcache_server.options.tiers.catalog import Catalog, Kept
from lmcache_server.options.tiers.files import FULL, Files, temporary_name
from lmcache_server.options.tiers.folders import path_of

logger = logging.getLogger(__name__)

FREE_PART = 0.02
CLOSE_S = 5.0
SWEEP_EVERY_S = 60.0  # or ten times as long as a sweep takes
LEFTOVER_S = 3600.0  # nobody writes a record for so long
SKEW_S = 300.0  # if clocks differ by more, the age of a record is unknown
BATCH = 64  # records, while no other thread may change the catalog


class Directory:
    """One file for each record, in 256 subdirectories. Raises TierError if the directory cannot be used.

    `size_bytes` is the most that all records may take; besides, 2 % of the file system stay free. A record
    that was written more than `max_age_s` ago is gone.

    Not shared, the directory belongs to this server. It evicts the least recently used records before it
    writes, overwrites their files instead of deleting them, and knows all records from memory (some 450
    bytes each). It writes nothing until it has listed the files that were there at its start.

    Shared, any number of servers use it, and presence is asked of the file system. The server that got the
    lock evicts for all: each minute it deletes the files written first until the rest fits. In between
    there may be more; only the free space is checked before a write.
    """

    def __init__(
        self, path: str, size_bytes: int, shared: bool = False, max_age_s: float = float("inf")
    ) -> None:
        self._path, self._size_bytes, self._shared, self._max_age_s = path, size_bytes, shared, max_age_s
        self._lock = threading.Lock()
        self._catalog = Catalog()
        self._arriving_bytes = 0
        self._listed, self._sweeps = shared, not shared
        self._evicted_records = 0
        self._closing = threading.Event()
        with contextlib.ExitStack() as opened, self._explained("use"):
            self._root = folders.open_root(path, shared, opened)
            self._files = Files(self._root, notes_use=not shared)
            self._zero_s = folders.now_s(self._root) - time.clock_gettime(time.CLOCK_BOOTTIME)
            self._opened = opened.pop_all()
        self._keeper = threading.Thread(target=self._keep_house, name="tier-directory", daemon=True)
        self._keeper.start()

    @property
    def usage(self) -> Usage | None:
        """None if only the file system knows."""
        if self._shared:
            return None
        oldest = self._catalog.oldest()
        age_s = max(int(time.time() - oldest.used_s), 0) if oldest else 0
        records = len(self._catalog), self._evicted_records
        return Usage(self._catalog.used_bytes, self._size_bytes, *records, age_s)

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        with self._explained("use"):
            self._check_place()
        if self._listed and not self._shared:
            return self._catalog.present(names, time.time() - self._max_age_s)
        with self._explained("read"):
            found = [self._files.stat(path_of(name)) for name in names]
        return [status is not None and self._is_young(status) for status in found]

    def read(self, name: str, pieces: Sequence[memoryview]) -> int:
        path = path_of(name)
        with self._lock:
            self._catalog.use(name)
        try:
            with self._explained("read"):
                if num_bytes := self._files.read(path, pieces, self._is_young):
                    return num_bytes
                with self._lock:
                    if self._files.stat(path) is None:  # somebody else has deleted it
                        self._catalog.pop(name)
                return 0
        finally:
            with self._lock:
                self._catalog.release(name)

    def write(self, name: str, pieces: Sequence[memoryview]) -> bool:
        path, num_bytes = path_of(name), sum(piece.nbytes for piece in pieces)
        with self._explained("write to"):
            self._check_place()
        with self._lock, self._explained("write to"):
            if (victims := self._victims(num_bytes)) is None:
                return False
            removed = self._take(victims)
            self._evicted_records += len(removed)
            self._arriving_bytes += (counted_bytes := num_bytes)
        # To overwrite a victim's file takes less time than to delete it.
        same = next((file for file in removed if file[1] == num_bytes), None)
        temporary = same[0] if same else f"{path[:2]}/{temporary_name()}"
        try:
            with self._explained("write to"):
                self._files.unlink(*(victim for victim, _ in removed if victim != temporary))
                self._files.write(temporary, pieces)
                with self._lock:
                    renamed = self._files.rename(temporary, path)
                    if renamed and not self._shared:
                        self._arriving_bytes -= counted_bytes
                        now_s = time.time()
                        self._catalog.add(name, Kept(num_bytes, now_s, now_s))
                        counted_bytes = 0
            return renamed
        except TierError as error:
            with contextlib.suppress(OSError):
                self._files.unlink(temporary)
            if getattr(error.__cause__, "errno", 0) in FULL:
                self._make_room(num_bytes)
                return False
            raise
        finally:
            with self._lock:
                self._arriving_bytes -= counted_bytes

    def remove(self, names: Sequence[str]) -> None:
        with self._explained("delete from"):
            for start in range(0, len(names), BATCH):
                with self._lock:
                    removed = self._take(names[start : start + BATCH])
                self._files.unlink(*(path for path, _ in removed))

    def clear(self, prefix: str) -> None:
        with self._explained("read"):
            self._check_place()
            names = [name for name, _ in folders.records(self._files) if name.startswith(prefix)]
        self.remove(names)

    def close(self) -> None:
        self._closing.set()
        self._keeper.join(CLOSE_S)
        if self._keeper.is_alive():  # the file system hangs
            return
        with contextlib.suppress(OSError):
            self._opened.close()

    def _check_place(self) -> None:
        """Raises TierError if the next server will not find what is written here. Raises OSError."""
        if not os.path.samestat(os.stat(self._path), os.fstat(self._root)):
            raise TierError(f"the directory {self._path} is another one since the start: restart the server")

    def _is_young(self, status: os.stat_result) -> bool:
        return time.time() - status.st_mtime <= self._max_age_s

    def _victims(self, num_bytes: int) -> Sequence[str] | None:
        """What has to go before so much is written; None if that is not enough."""
        free, whole = self._files.free_bytes()
        arriving_bytes = self._arriving_bytes + num_bytes
        missing = arriving_bytes + int(whole * FREE_PART) - free
        if self._shared:
            return [] if missing <= 0 else None
        if not self._listed or num_bytes > self._size_bytes:
            return None
        missing = max(missing, self._catalog.used_bytes + arriving_bytes - self._size_bytes)
        return self._catalog.victims(missing)

    def _make_room(self, num_bytes: int) -> None:
        """The file system had no room, although it said so: its user has a quota, or no inode is left. So the
        oldest records go, for the next ones."""
        if self._shared:
            return
        with self._lock:
            victims = self._catalog.victims(BATCH * num_bytes, BATCH) or []
        with contextlib.suppress(TierError):
            self.remove(victims)
            self._evicted_records += len(victims)

    def _take(self, names: Sequence[str]) -> list[tuple[str, int]]:
        """Records become temporary files: their paths and bytes."""
        taken = []
        for name in names:
            path = path_of(name)
            temporary = f"{path[:2]}/{temporary_name()}"
            is_there = self._files.rename(path, temporary)
            kept = self._catalog.pop(name)
            if is_there:
                taken.append((temporary, kept.num_bytes if kept else 0))
        return taken

    def _keep_house(self) -> None:
        while not self._closing.is_set():
            started_s = time.monotonic()
            try:
                with self._explained("sweep"):
                    self._sweep()
            except TierError as error:
                logger.warning("%(error)s", {"error": str(error)})
            self._closing.wait(max(SWEEP_EVERY_S, 10 * (time.monotonic() - started_s)))

    def _sweep(self) -> None:
        now_s = self._trusted_now_s()
        oldest_s = now_s - self._max_age_s
        if self._shared:
            self._sweeps = self._sweeps or folders.may_sweep(self._root, self._opened)
            if self._sweeps:
                folders.delete_leftovers(self._files, now_s - LEFTOVER_S)
                folders.delete_oldest(self._files, self._size_bytes, oldest_s)
            return
        if not self._listed:
            self._list()
        victims = [name for name, kept in self._catalog.items() if kept.written_s < oldest_s]
        while True:
            self.remove(victims)
            with self._lock:
                victims = self._catalog.victims(self._catalog.used_bytes - self._size_bytes, BATCH) or []
                self._evicted_records += len(victims)
            if not victims or self._closing.is_set():
                return

    def _trusted_now_s(self) -> float:
        """The time; or -inf, so that nothing is old, if a clock is wrong or was set since the start."""
        now_s = folders.now_s(self._root)
        expected_s = self._zero_s + time.clock_gettime(time.CLOCK_BOOTTIME)
        if max(abs(now_s - time.time()), abs(now_s - expected_s)) <= SKEW_S:
            return now_s
        logger.warning(
            "no record of %(path)s is deleted because of its age: the clock of this machine or of its file "
            "server is wrong or was set; correct it, then restart this server",
            {"path": self._path},
        )
        return -float("inf")

    def _list(self) -> None:
        """Find the records that were there at the start. Their files say when they were used."""
        folders.delete_leftovers(self._files, float("inf"))
        records, used_s = list[tuple[str, Kept]](), list[float]()
        for name, entry in folders.records(self._files):
            if self._closing.is_set():
                return
            if found := folders.status(entry):
                used_s.append(max(found.st_atime, found.st_mtime))
                records.append((name, Kept(found.st_size, found.st_mtime, used_s[-1])))
        order = np.argsort(used_s, kind="stable").tolist()  # unlike sort(), it stops no other thread
        for start in range(0, len(order), BATCH):
            with self._lock:
                for number in order[start : start + BATCH]:
                    self._catalog.add(*records[number])
        self._listed = True
        free, whole = self._files.free_bytes()
        if (room := free + self._catalog.used_bytes - int(whole * FREE_PART)) < self._size_bytes:
            logger.warning(
                "the tier in %(path)s may take %(size)s, but its file system has room for %(room)s: free the "
                "rest, or ask for less with size_gb",
                {"path": self._path, "size": size(self._size_bytes), "room": size(max(room, 0))},
            )

    def _explained(self, what: str) -> contextlib.AbstractContextManager[None]:
        return folders.explained(what, self._path)
