"""A synthetic engine with one worker: the geometry of its made-up model, its memory, which is this process's,
and what both of a connector's sides send."""

import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lmcache_client.contract.codec import unpacked
from lmcache_client.contract.geometry import FULL, RECURRENT, SLIDING_WINDOW, Geometry, GroupSpec, Region
from lmcache_client.contract.keys import ModelTag, chunk_keys
from lmcache_client.contract.messages import MAX_LEASES, Done, Found, Load, Lookup, Message, Release, Store
from lmcache_client.engine import REGISTER_S, Worker, chunk_object, join, load_message
from lmcache_client.memory.cuda import CudaExport, ExportError
from lmcache_client.memory.host import HostExport
from lmcache_client.server_channel import Channel
from lmcache_kernels import driver as cuda
from lmcache_kernels.driver import CudaError, Driver
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.errors import CommandError

BLOCKS_PER_CHUNK = 4
"""The block size is the server's chunk size divided by this, if that is possible."""
CONNECT_S, ANSWER_S = 30.0, 60.0
LOOKUP_WAIT_S = 0.001
"""The connector waits for lookups in the same portions."""
Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True)
class Workload:
    """Each worker makes `requests` requests of `chunks` chunks of `chunk_size` tokens. A page of `page_bytes`
    is one block in one of the `layers` regions of a group. A `hybrid` model has a full, a sliding-window and
    a recurrent group; else it has a full one. With `seconds`, each operation lasts that long, and loads
    repeat the last `requests` stores."""

    model: str
    chunk_size: int
    hybrid: bool
    layers: int
    page_bytes: int
    chunks: int
    requests: int
    seconds: float = 0.0

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The groups, still without regions."""
        block_size = self.chunk_size // math.gcd(self.chunk_size, BLOCKS_PER_CHUNK)
        full = GroupSpec(FULL, block_size, 0, "bench", ())
        if not self.hybrid:
            return (full,)
        window = GroupSpec(SLIDING_WINDOW, block_size, self.chunk_size // 2 + 1, "bench", ())
        return full, window, GroupSpec(RECURRENT, self.chunk_size, 0, "bench", ())

    @property
    def positions(self) -> list[list[int]]:
        """For each group, the positions of the blocks that a request stores."""
        return [
            [at for chunk in range(self.chunks) for at in group.stored_blocks(chunk, self.chunk_size)]
            for group in self.groups
        ]

    @property
    def num_blocks(self) -> int:
        """The null block, the blocks that a request stores, and as many to load into."""
        return 1 + 2 * sum(map(len, self.positions))

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    @property
    def geometry(self) -> Geometry:
        """vLLM's layout: all groups share the pages of each layer, but every block belongs to one group."""
        layer_bytes = self.num_blocks * self.page_bytes
        starts = range(0, self.layers * layer_bytes, layer_bytes)
        regions = tuple(Region(0, at, self.page_bytes, self.page_bytes) for at in starts)
        groups = tuple(replace(group, regions=regions) for group in self.groups)
        return Geometry(groups, self.num_blocks)

    @property
    def memory_bytes(self) -> int:
        """The size of one worker's memory."""
        return self.num_blocks * self.block_bytes

    @property
    def request_l1_bytes(self) -> int:
        """The L1 space of one request; every object takes whole frames."""
        objects = (len(at) // self.chunks * self.block_bytes for at in self.positions)
        return self.chunks * sum(-(-size // FRAME_BYTES) * FRAME_BYTES for size in objects)


def chain(number: int, request: int, chunks: int) -> tuple[bytes, ...]:
    """The keys of a request's chunks, different for each worker `number` and `request`."""
    return tuple(chunk_keys(((number, request), None) for _ in range(chunks)))


def driver_here() -> Driver:
    """Raises CommandError without a GPU."""
    driver = cuda.load()
    if driver is None:
        raise CommandError("this process sees no GPU")
    return driver


class DeviceMemory:
    """Memory on GPU number `ordinal` with the bytes of `content`. Raises CommandError."""

    def __init__(self, ordinal: int, content: NDArray[np.uint64]) -> None:
        self._driver, self._num_bytes = driver_here(), content.nbytes
        try:
            self._driver.enter(self._driver.retain_context(ordinal))
            self._address = self._driver.allocate(self._num_bytes)
            self._driver.write(self._address, content.tobytes())
            self.export = CudaExport(((self._address, self._num_bytes),), lambda: 0)
        except (CudaError, ExportError) as error:
            raise CommandError(f"the client cannot use the GPU: {error}") from error

    def read(self) -> NDArray[np.uint64]:
        return np.frombuffer(self._driver.read(self._address, self._num_bytes), np.uint64)

    def close(self) -> None:
        """To be called when the server has unmapped the memory."""
        self.export.close()
        self._driver.free(self._address)


class Client:
    """Worker number `number`, on the CPU or on GPU number `gpu`. Every request has its own keys, but all
    store the same pages.

    All methods raise CommandError if the server does not do what they ask for.
    """

    def __init__(self, address: str, workload: Workload, number: int, gpu: int | None = None) -> None:
        self.workload = workload
        self.number = number
        self.stored: deque[int] = deque(maxlen=workload.requests)
        """The numbers of the last requests that were stored."""
        engine_id = f"{workload.model} {number}"
        self._geometry = geometry = workload.geometry
        # All words differ, between clients too, so no page can pass for another.
        words = workload.memory_bytes // 8
        self._memory = np.arange(number << 40, (number << 40) + words, dtype=np.uint64)
        host = HostExport(((self._memory.ctypes.data, self._memory.nbytes),))
        self._device = DeviceMemory(gpu, self._memory) if gpu is not None else None
        # A request's blocks are scattered over memory, as in an engine that has served for a while.
        blocks = iter(np.random.default_rng(number).permutation(np.arange(1, workload.num_blocks)).tolist())
        positions = workload.positions
        self._source = [dict(zip(at, itertools.islice(blocks, len(at)), strict=True)) for at in positions]
        self._target = [list(itertools.islice(blocks, len(at))) for at in positions]
        model = ModelTag(workload.model, (("bench", workload.model),), 1, 1)
        self.worker = Channel(address, lambda _: worker.register())
        self.scheduler = Channel(address, lambda channel: join(channel, engine_id, REGISTER_S))
        export = host if self._device is None else self._device.export
        worker = self._client = Worker(self.worker, engine_id, 0, model, geometry, export, ephemeral=True)

    def __enter__(self) -> "Client":
        for channel in (self.worker, self.scheduler):
            channel.start(0.0, 0.0)
            limit_s = channel.system.now_s() + CONNECT_S + self._client.register_s
            while not (channel.ready or channel.refusal) and channel.system.now_s() < limit_s:
                channel.system.sleep(0.005)
            if not channel.ready:
                self.__exit__()
                late = "the server did not accept the bench in time: it may be busy, so try again"
                raise CommandError(str(channel.refusal or late))
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.close()
        self.worker.close()
        if self._device is not None:
            self._device.close()

    def store_message(self, keys: tuple[bytes, ...], once: bool = False) -> Store:
        return Store(
            once=once,
            objects=tuple(
                chunk_object(keys, chunk, index, tuple(self._source[index][at] for at in stored))
                for chunk in range(len(keys))
                for index, group in enumerate(self._geometry.groups)
                if (stored := group.stored_blocks(chunk, self.workload.chunk_size))
            ),
        )

    def lookup_message(self, keys: tuple[bytes, ...]) -> Lookup:
        limit = len(keys) * self.workload.chunk_size
        return Lookup("bench", keys, 0, limit, limit + 1)

    def load_message(self, found: Found, key: bytes, turn: int) -> Load:
        """A load into other blocks than in the previous `turn`."""
        groups = self._geometry.groups
        needed = [group.needed_blocks(found.resume_tokens) for group in groups]
        tables = [
            {at: target[nth % len(target)] for nth, at in enumerate(places, turn)}
            for target, places in zip(self._target, needed, strict=True)
        ]
        return load_message("bench", found, key, 0, groups, tables)

    def check(self, message: Load) -> None:
        """Compare the pages that `message`, the last load, filled. Raises CommandError if they are wrong."""
        if self._device is not None:
            self._memory = self._device.read()
        pages = self._memory.reshape(self.workload.layers, self.workload.num_blocks, -1)
        for source, group, ids in zip(self._source, self._geometry.groups, message.block_ids, strict=True):
            for at, block in zip(group.needed_blocks(message.resume_tokens), unpacked(ids), strict=True):
                if not np.array_equal(pages[:, source[at]], pages[:, block]):
                    raise CommandError("the server restored wrong bytes: stop it, and report this")

    def release(self, *hits: Found) -> None:
        leases = tuple(hit.lease_id for hit in hits if hit.lease_id)
        for start in range(0, len(leases), MAX_LEASES):
            message = Release(leases[start : start + MAX_LEASES], ())
            self.ask(self.scheduler, message, Done, LOOKUP_WAIT_S)

    @staticmethod
    def ask(channel: Channel, message: Message, expected: type[Reply], wait_s: float = ANSWER_S) -> Reply:
        """The reply to `message`; waits for it in portions of `wait_s` seconds."""
        pending = channel.submit(message, ANSWER_S)
        while not pending.done:
            channel.poll(pending, wait_s)
        if not isinstance(pending.reply, expected):
            raise CommandError(str(pending.error or f"the server answered {type(pending.reply).__name__}"))
        return pending.reply
