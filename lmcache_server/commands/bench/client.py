"""A synthetic engine of one worker: memory of this process, and both sides of the connector's wire."""

import itertools
from typing import TypeVar

import numpy as np

from lmcache_client.channel import Channel, ChannelError
from lmcache_client.contract.keys import ROOT_KEY, ModelTag, chunk_key
from lmcache_client.contract.messages import (
    MAX_LEASES,
    Challenge,
    Done,
    EndRequest,
    Found,
    Join,
    Joined,
    Lookup,
    Message,
    Prove,
    Register,
    Registered,
    Retrieve,
    Store,
    StoreObject,
)
from lmcache_client.memory.host import HostExport
from lmcache_server.commands.bench.workload import BenchError, Workload

CONNECT_S = 2.0
REGISTER_S = 10.0
ANSWER_S = 60.0
LOOKUP_WAIT_S = 0.001
"""As the connector waits for a lookup."""
Reply = TypeVar("Reply", bound=Message)


def chain(number: int, request: int, chunks: int) -> tuple[bytes, ...]:
    """The keys of a request of worker `number`."""
    keys = [ROOT_KEY]
    for _ in range(chunks):
        keys.append(chunk_key(keys[-1], (number, request), None))
    return tuple(keys[1:])


class Client:
    """Worker number `number`. Every request has keys of its own, all of them store the same pages.

    Raises BenchError, here and wherever the server does not do what was asked.
    """

    def __init__(self, address: str, workload: Workload, number: int) -> None:
        self.workload = workload
        self.number = number
        self._engine_id = f"{workload.model} {number}"
        geometry = workload.geometry
        # Every word is another, so no page can be taken for one of elsewhere.
        words = workload.memory_bytes // 8
        self._memory = np.arange(number << 40, (number << 40) + words, dtype=np.uint64)
        self._export = HostExport(((self._memory.ctypes.data, self._memory.nbytes),))
        self._geometry = geometry
        # Neighbours are no neighbours in memory, as in an engine that has served for a while.
        blocks = iter(np.random.default_rng(number).permutation(np.arange(1, workload.num_blocks)).tolist())
        positions = workload.positions
        self._source = [dict(zip(at, itertools.islice(blocks, len(at)), strict=True)) for at in positions]
        self._target = [list(itertools.islice(blocks, len(at))) for at in positions]
        self.worker = Channel(address, self._register)
        self.scheduler = Channel(address, self._join)

    def __enter__(self) -> "Client":
        for channel in (self.worker, self.scheduler):
            channel.start(CONNECT_S, REGISTER_S)
            if not channel.ready:
                raise BenchError(
                    str(channel.refusal or "the lmcache server did not accept the bench in time")
                )
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.close()
        self.worker.close()

    def _register(self, channel: Channel) -> None:
        channel.system.allow_tracer(channel.server_pid)
        memory = self._export.memory(channel.system.pid())
        model = ModelTag(self.workload.model, (), 1, 1)
        message = Register(self._engine_id, 0, model, self._geometry, memory, ephemeral=True)
        challenge = channel.call(message, REGISTER_S)
        if not isinstance(challenge, Challenge):
            raise ChannelError("the server did not challenge the registration")
        with self._export.proving(challenge.nonce):
            if not isinstance(channel.call(Prove(), REGISTER_S), Registered):
                raise ChannelError("the server did not confirm the registration")

    def _join(self, channel: Channel) -> None:
        joined = channel.call(Join(self._engine_id), REGISTER_S)
        if not isinstance(joined, Joined) or not joined.ready:
            raise ChannelError("the worker has not registered")

    def store_message(self, keys: tuple[bytes, ...]) -> Store:
        parents = (ROOT_KEY, *keys)
        return Store(
            tuple(
                StoreObject(
                    key, parents[chunk], chunk, index, tuple(self._source[index][at] for at in stored)
                )
                for chunk, key in enumerate(keys)
                for index, group in enumerate(self._geometry.groups)
                if (stored := group.stored_blocks(chunk, self.workload.chunk_size))
            )
        )

    def lookup_message(self, keys: tuple[bytes, ...]) -> Lookup:
        limit = len(keys) * self.workload.chunk_size
        return Lookup(self._engine_id, "bench", keys, 0, limit, limit + 1)

    def retrieve_message(self, found: Found, key: bytes, turn: int) -> Retrieve:
        """Into other blocks than in the `turn` before."""
        ids = []
        for target, group in zip(self._target, self._geometry.groups, strict=True):
            needed = range(turn, turn + len(group.needed_blocks(found.resume_tokens)))
            ids.append(tuple(target[nth % len(target)] for nth in needed))
        return Retrieve("bench", found.lease_id, key, found.resume_tokens, 0, tuple(ids))

    def check(self, message: Retrieve) -> None:
        """Raises BenchError unless what was stored is now where this, the last message, wanted it."""
        pages = self._memory.reshape(self.workload.layers, self.workload.num_blocks, -1)
        for source, group, ids in zip(self._source, self._geometry.groups, message.block_ids, strict=True):
            for at, block in zip(group.needed_blocks(message.resume_tokens), ids, strict=True):
                if not np.array_equal(pages[:, source[at]], pages[:, block]):
                    raise BenchError("the server restored wrong bytes: stop it, and report this")

    def release(self, *found: Found) -> None:
        leases = tuple(each.lease_id for each in found if each.lease_id)
        for start in range(0, len(leases), MAX_LEASES):
            message = EndRequest(self._engine_id, leases[start : start + MAX_LEASES], ())
            self.ask(self.scheduler, message, Done, LOOKUP_WAIT_S)

    @staticmethod
    def ask(channel: Channel, message: Message, expected: type[Reply], wait_s: float = ANSWER_S) -> Reply:
        """The answer, waited for in portions of `wait_s` seconds."""
        pending = channel.submit(message, ANSWER_S)
        while not pending.done:
            channel.poll(pending, wait_s)
        if not isinstance(pending.reply, expected):
            raise BenchError(str(pending.error or f"the server answered {type(pending.reply).__name__}"))
        return pending.reply
