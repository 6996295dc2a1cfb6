"""L1 and one tier in this process, with what brings objects from one into the other; and records."""

import asyncio
import ctypes
import inspect
import itertools
import mmap
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from harness.tiers import InMemory
from harness.waiting import PATIENCE_S

from lmcache_client.contract.geometry import FULL, GroupSpec, Region
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache, Layout, Reservation
from lmcache_server.core.named_limits import Limits
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.host.units import GB_BYTES
from lmcache_server.l1.memory import L1Memory
from lmcache_server.options.tiers.compressed_body import SEGMENT_BYTES, compress
from lmcache_server.options.tiers.fetches import Fetches
from lmcache_server.options.tiers.record_format import EncryptedRecord, Label, Record, RecordCipher
from lmcache_server.options.tiers.server import Server
from lmcache_server.options.tiers.spills import Spills
from lmcache_server.options.tiers.tier_states import Tiers, TierState
from lmcache_server.options.tiers.tier_worker import Rates, TierWorker
from lmcache_server.service.option import Base
from lmcache_server.service.system import System
from lmcache_server.telemetry.failures import Failures
from lmcache_server.telemetry.metrics import Metrics

GROUP = GroupSpec(FULL, 16, 0, "", (Region(0, 0, FRAME_BYTES, FRAME_BYTES),))
LAYOUT = Layout(b"n" * 32, 16, (GROUP,), ((0,),))
HANGS = b"\x01" * 32
"""The key of a chunk whose reads hang."""


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


KIB = 1 << 10
CIPHERS = (None, RecordCipher(AESGCM(b"1" * 32), "one"))
each_cipher = pytest.mark.parametrize("cipher", CIPHERS, ids=["plain", "encrypted"])
GUARD = b"\x5a" * 4096
OTHERS: tuple[dict[str, Any], ...] = (
    {"key": b"j" * 32}, {"namespace": b"m" * 32}, {"bit": 2}, {"num_blocks": 1},
)  # fmt: skip
"""What makes a label that of another object."""


class Memory:
    """Page-aligned memory for an object, in runs of these sizes and a last one; between them are guards."""

    def __init__(self, num_bytes: int, *runs: int) -> None:
        sizes = [*itertools.takewhile(lambda size: size, (min(size, num_bytes) for size in runs)), 0]
        sizes = [size for size in sizes if size < num_bytes]
        sizes[-1:] = [num_bytes - sum(sizes[:-1])]
        self._map = mmap.mmap(-1, sum(-(-size // 4096) * 4096 + 4096 for size in sizes))
        base, offset = ctypes.addressof(ctypes.c_char.from_buffer(self._map)), 0
        self.runs, self._guards = list[tuple[int, int]](), list[int]()
        for size in sizes:
            self.runs.append((base + offset, size))
            offset += -(-size // 4096) * 4096
            ctypes.memmove(base + offset, GUARD, len(GUARD))
            self._guards.append(base + offset)
            offset += len(GUARD)

    @property
    def content(self) -> bytes:
        assert all(ctypes.string_at(guard, len(GUARD)) == GUARD for guard in self._guards)
        return b"".join(ctypes.string_at(*run) for run in self.runs)

    def fill(self, content: bytes) -> "Memory":
        for address, size in self.runs:
            ctypes.memmove(address, content[:size], size)
            content = content[size:]
        return self


def label(num_bytes: int, **changes: Any) -> Label:
    given = {"namespace": b"n" * 32, "key": b"k" * 32, "bit": 3, "num_blocks": 2, "num_bytes": num_bytes}
    return Label(**{**given, **changes})


def record_of(what: Label, memory: Memory, cipher: RecordCipher | None) -> Record:
    return EncryptedRecord(what, memory.runs, cipher) if cipher else Record(what, memory.runs)


def sealed(content: bytes, cipher: RecordCipher | None, method: str = "", element: int = 2) -> bytes:
    """A record of an object, compressed if a method is named."""
    memory = Memory(len(content), 64 * KIB, SEGMENT_BYTES).fill(content)
    record = record_of(label(len(content)), memory, cipher)
    record.seal(*([compress(record.payload, method, element)] if method else []))
    whole = b"".join(record.pieces)
    record.release()
    return whole


def opened(whole: bytes, what: Label, cipher: RecordCipher | None, *runs: int) -> bytes:
    memory = Memory(what.num_bytes, *runs)
    record, rest = record_of(what, memory, cipher), whole
    for piece in record.pieces:
        piece[: len(rest)] = rest[: len(piece)]
        rest = rest[len(piece) :]
    try:
        record.open(len(whole))
    finally:
        content = memory.content
    record.release()
    return content


class Store(InMemory):
    """What is to wait by `waits` ("read", "write") does not return before `opened` is set. Neither does a
    read of HANGS, ever."""

    def __init__(self, waits: str = "") -> None:
        super().__init__()
        self.waits = waits
        self.opened, self.hangs = threading.Event(), threading.Event()
        self.writing = threading.Semaphore(0)
        self.asked = 0
        self.has_room = True

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        found = super().present(names)
        self.asked += 1
        return found

    def read(self, name: str, pieces: Sequence[memoryview]) -> int:
        if HANGS.hex() in name:
            self.hangs.set()
            self.opened.wait()
            return 0
        assert self.waits != "read" or self.opened.wait(PATIENCE_S)
        return super().read(name, pieces)

    def write(self, name: str, pieces: Sequence[memoryview]) -> bool:
        self.writing.release()
        assert self.waits != "write" or self.opened.wait(PATIENCE_S)
        return self.has_room and super().write(name, pieces)


class Rig:
    """`frames` of L1, in which a tenant may have `quota_frames`. Namespaces that are `known` are fetched."""

    def __init__(
        self,
        frames: int,
        waits: str = "",
        cold: bool = False,
        quota_frames: float = 0,
        frame_bytes: int = FRAME_BYTES,
    ) -> None:
        loop, nothing = asyncio.get_running_loop(), None
        self.store: Any = Store(waits)
        self.l1 = L1Memory(max(frames * frame_bytes, FRAME_BYTES))
        self.cache = Cache(frame_bytes, frames)
        if quota_frames:
            from lmcache_server.options.quotas.tenants import Tenants

            self.cache.order.tenant_policy = Tenants(
                Limits(quota_frames * frame_bytes / GB_BYTES), frame_bytes
            )
        self.system = System(loop, nothing, nothing)  # type: ignore[arg-type]
        self.tier = TierState(0, "tier", cold, TierWorker("tier", lambda: self.store, loop, Rates()))
        self.metrics, self.known = Metrics(), dict[bytes, Any]()
        for row in Server.METRICS:
            self.metrics.add(row)
        sessions: Any = SimpleNamespace(known=self.known)
        options: list[Any] = []
        parts = sessions, self.metrics, Failures(), self.system, options
        base = Base(Config(), self.cache, self.l1, *parts)
        self.tiers = Tiers([self.tier], base)
        self.spills = Spills(self.tiers, base)
        options.append(SimpleNamespace(damaged=self.spills.forget))
        self.fetches = Fetches(self.tiers, base, lambda _rooms: None)

    def fill(self, *numbers: int, tenant: bytes = b"", once: bool = False) -> list[Reservation]:
        """L1 has objects of one frame, each in a chunk of its own, of which the spills have not heard."""
        rooms = []
        for number in numbers:
            frame_bytes = self.cache.frame_bytes
            room = self.cache.reserve(LAYOUT, key(number), 0, 0, 1, frame_bytes, once=once, tenant=tenant)
            assert isinstance(room, Reservation)
            self.cache.commit(room)
            rooms.append(room)
        return rooms

    def keep(self, *numbers: int, tenant: bytes = b"", once: bool = False) -> None:
        """Engines have stored such objects."""
        self.spills.stored(LAYOUT, self.fill(*numbers, tenant=tenant, once=once))

    async def all_ended(self) -> None:
        assert await self.system.all_ended(60)


def option(*urls: str) -> Server:
    """The option of a server with these tiers, which are not open yet."""
    sessions: Any = SimpleNamespace(known={})
    nothing: Any = None
    config = Config(of_options={"tier": urls})
    cache: Any = SimpleNamespace(on_kept=[])
    return Server(Base(config, cache, nothing, sessions, Metrics(), nothing, nothing, []))


def with_rig(frames: int, **options: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """The test is a coroutine, whose first argument is a Rig. At its end, what waits in the tier goes on."""

    def decorated(body: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def whole(fixtures: dict[str, Any]) -> None:
            rig = Rig(frames, **options)
            try:
                await asyncio.wait_for(body(rig, **fixtures), 120)
                rig.cache.check_integrity()
            finally:
                rig.store.opened.set()
                await rig.spills.close()
                rig.l1.close()

        def test(**fixtures: Any) -> None:
            uvloop.run(whole(fixtures))

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        _, *parameters = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorated
