"""A synthetic engine with one worker: its memory is this process's, and it sends what both of a connector's
sides send."""

import itertools
from collections import deque
from typing import TypeVar

import numpy as np

from lmcache_client.contract.codec import unpacked
from lmcache_client.contract.keys import ModelTag, chunk_keys
from lmcache_client.contract.messages import MAX_LEASES, Done, Found, Load, Lookup, Message, Release, Store
from lmcache_client.engine import REGISTER_S, Worker, chunk_object, join, load_message
from lmcache_client.memory.host import HostExport
from lmcache_client.server_channel import Channel
from lmcache_server.commands.bench.device import DeviceMemory
from lmcache_server.commands.bench.workload import BenchError, Workload

CONNECT_S, ANSWER_S = 30.0, 60.0
LOOKUP_WAIT_S = 0.001
"""The connector waits for lookups in the same portions."""
Reply = TypeVar("Reply", bound=Message)


def chain(number: int, request: int, chunks: int) -> tuple[bytes, ...]:
    """The keys of a request's chunks, different for each worker `number` and `request`."""
    return tuple(chunk_keys(((number, request), None) for _ in range(chunks)))


class Client:
    """Worker number `number`, on the CPU or on GPU number `gpu`. Every request has its own keys, but all
    store the same pages.

    All methods raise BenchError if the server does not do what they ask for.
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
                raise BenchError(str(channel.refusal or late))
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
        """Compare the pages that `message`, the last load, filled. Raises BenchError if they are wrong."""
        if self._device is not None:
            self._memory = self._device.read()
        pages = self._memory.reshape(self.workload.layers, self.workload.num_blocks, -1)
        for source, group, ids in zip(self._source, self._geometry.groups, message.block_ids, strict=True):
            for at, block in zip(group.needed_blocks(message.resume_tokens), unpacked(ids), strict=True):
                if not np.array_equal(pages[:, source[at]], pages[:, block]):
                    raise BenchError("the server restored wrong bytes: stop it, and report this")

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
            raise BenchError(str(pending.error or f"the server answered {type(pending.reply).__name__}"))
        return pending.reply
