"""The tiers of the soak's server, a directory and a Valkey behind a proxy, and what befalls them."""

import contextlib
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from harness import stores
from harness.proxy import Proxy

TROUBLE_S = (2.0, 12.0)
PEACE_S = (2.0, 8.0)
DAMAGED = 20
"""Records of a directory that are changed, and as many that are removed, at one time."""


class Troubles:
    """One trouble after another, with some peace between them. Not a thread: `turn` does what is due."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._records = directory / "records"
        self._stack = contextlib.ExitStack()
        self._store = self._stack.enter_context(stores.valkey(directory, maxmemory="256mb"))
        self._proxy = self._stack.enter_context(Proxy(self._store.port))
        self.urls = (f"dir://{self._records}?size_gb=1", f"valkey://127.0.0.1:{self._proxy.port}")
        self._present = contextlib.ExitStack()
        self._due_s = time.monotonic() + PEACE_S[1]
        self._is_peace = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._stack.close()
        shutil.rmtree(self._records, ignore_errors=True)

    def turn(self) -> None:
        if time.monotonic() < self._due_s:
            return
        if self._is_peace:
            trouble = self._draw.choice(TROUBLES)
            self.counts[trouble.__name__] += 1
            self._present.enter_context(contextlib.contextmanager(trouble)(self))
            self._is_peace = False
            self._due_s = time.monotonic() + self._draw.uniform(*TROUBLE_S)
        else:
            self.end()

    def end(self) -> None:
        """The present trouble ends; the next one comes after some peace."""
        self._present.close()
        self._is_peace = True
        self._due_s = time.monotonic() + self._draw.uniform(*PEACE_S)

    def store_is_killed(self) -> Iterator[None]:
        with self._store.failing("is killed"):
            yield

    def store_hangs(self) -> Iterator[None]:
        with self._store.failing("hangs"):
            yield

    def store_is_silent(self) -> Iterator[None]:
        """The connections that are open stay so, and bring nothing any more."""
        self._proxy.silence()
        yield

    def store_is_late(self) -> Iterator[None]:
        self._proxy.delay_s = self._draw.uniform(0.05, 1.5)
        yield
        self._proxy.delay_s = 0.0

    def store_is_slow(self) -> Iterator[None]:
        self._proxy.bytes_per_s = self._draw.uniform(2e5, 2e7)
        yield
        self._proxy.bytes_per_s = 0.0

    def answers_are_cut(self) -> Iterator[None]:
        self._proxy.cut_bytes = self._draw.randrange(1 << 18)
        yield
        self._proxy.cut_bytes = None

    def store_is_full(self) -> Iterator[None]:
        for setting in ("maxmemory-policy noeviction", "maxmemory 1mb"):
            stores.ask(self._store.port, f"CONFIG SET {setting}")
        yield
        for setting in ("maxmemory 256mb", "maxmemory-policy allkeys-lru"):
            stores.ask(self._store.port, f"CONFIG SET {setting}")

    def store_forgets(self) -> Iterator[None]:
        stores.ask(self._store.port, "FLUSHALL")
        yield

    def records_are_damaged(self) -> Iterator[None]:
        files = list(self._records.glob("??/*"))
        for each in self._draw.sample(files, min(2 * DAMAGED, len(files))):
            # The server may rename or evict it meanwhile.
            with contextlib.suppress(OSError):
                if self._draw.random() < 0.5:
                    each.unlink()
                else:
                    with each.open("r+b") as file:
                        file.seek(self._draw.randrange(each.stat().st_size))
                        file.write(self._draw.randbytes(8))
        yield

    def directory_is_away(self) -> Iterator[None]:
        away = self._records.with_name("away")
        self._records.rename(away)
        yield
        # The server may have made another one.
        shutil.rmtree(self._records, ignore_errors=True)
        away.rename(self._records)


TROUBLES: tuple[Callable[[Troubles], Iterator[None]], ...] = (
    Troubles.store_is_killed,
    Troubles.store_hangs,
    Troubles.store_is_silent,
    Troubles.store_is_late,
    Troubles.store_is_slow,
    Troubles.answers_are_cut,
    Troubles.store_is_full,
    Troubles.store_forgets,
    Troubles.records_are_damaged,
    Troubles.directory_is_away,
)
