"""The thin client: what an engine asks of the server, over a channel.

A `Worker` registers its memory, loads and stores. The `Scheduler` joins the engine, looks up and releases.
Requests return their Pending at once. What to ask, when, and how long to wait is for the owner to decide:
vLLM's connector, the bench, a test.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lmcache_client.channel import Channel, ChannelError, Pending
from lmcache_client.contract import messages
from lmcache_client.contract.geometry import Geometry, GroupSpec
from lmcache_client.contract.keys import ROOT_KEY, ModelTag
from lmcache_client.contract.messages import Found, Load, Message, Store, StoreObject
from lmcache_client.memory.cuda import CudaExport
from lmcache_client.memory.host import HostExport

REGISTER_S = 10.0
JOIN_S = 2.0
RELEASE_S = 5.0
Export = HostExport | CudaExport
Tables = Sequence[Sequence[int] | Mapping[int, int]]
Reply = TypeVar("Reply", bound=Message)


@dataclass
class Worker:
    """One worker of an engine, whose pages lie in the memory of `export` as `geometry` says. What an
    `ephemeral` engine stores is forgotten with the last engine of its namespace."""

    channel: Channel
    engine_id: str
    rank: int
    model: ModelTag
    geometry: Geometry
    export: Export
    ephemeral: bool = False

    def register(self) -> messages.Registered:
        """Hand over the memory and prove that it is this process's own; to be done for each new life of the
        server, in the channel's `on_up`. Raises ChannelError."""
        self.channel.system.allow_tracer(self.channel.server_pid)
        memory = self.export.memory(self.channel.system.pid())
        message = messages.Register(
            self.engine_id, self.rank, self.model, self.geometry, memory, self.ephemeral
        )
        challenge = expect(self.channel.call(message, REGISTER_S), messages.Challenge)
        with self.export.proving(challenge.nonce):
            return expect(self.channel.call(messages.Prove(), REGISTER_S), messages.Registered)

    def load(self, message: Load, timeout_s: float) -> Pending:
        """Have pages copied into this worker's blocks, which nobody may use before it is settled."""
        return self.channel.submit(message, timeout_s)

    def store(self, message: Store, timeout_s: float) -> Pending:
        """Have pages copied out of this worker's blocks, which must not change before it is settled."""
        return self.channel.submit(message, timeout_s)


@dataclass
class Scheduler:
    """The scheduler side of an engine, which asks for all of its workers."""

    channel: Channel
    engine_id: str

    def join(self, timeout_s: float = JOIN_S) -> messages.Joined:
        """Find the engine that the workers have registered; for `on_up`. Raises ChannelError."""
        joined = expect(self.channel.call(messages.Join(self.engine_id), timeout_s), messages.Joined)
        if not joined.ready:
            raise ChannelError("the workers of this engine have not all registered yet")
        return joined

    def lookup(
        self, request_id: str, keys: Sequence[bytes], computed: int, limit: int, tokens: int, timeout_s: float
    ) -> Pending:
        """Ask for a resume point, as `messages.Lookup` says; the answer is a Found. If it comes when nobody
        waits any more, its lease is released."""
        question = messages.Lookup(request_id, tuple(keys), computed, limit, tokens)
        return self.channel.submit(question, timeout_s, on_late=self._release_late)

    def forget(self, lookup: Pending) -> None:
        """Nobody waits for this lookup any more: release what it has promised, or will promise yet."""
        lookup.abandon()
        self._release_late(lookup.reply)

    def _release_late(self, reply: Message | None) -> None:
        if isinstance(reply, Found) and reply.lease_id:
            self.release((reply.lease_id,))

    def release(self, leases: tuple[int, ...], keys: tuple[bytes, ...] = (), request_id: str = "") -> Pending:
        """Give up leases and touch the chunks of `keys`; with `request_id` if that request has ended."""
        return self.channel.submit(messages.Release(leases, keys, request_id), RELEASE_S)


def expect(reply: Message, kind: type[Reply]) -> Reply:
    """The reply, if it is a `kind`; raises ChannelError if it is anything else."""
    if not isinstance(reply, kind):
        raise ChannelError(f"the lmcache server answered {type(reply).__name__}, not {kind.__name__}")
    return reply


def chunk_object(keys: Sequence[bytes], chunk: int, group: int, block_ids: tuple[int, ...]) -> StoreObject:
    """What a group stores for chunk number `chunk` of the prompt that has these keys."""
    return StoreObject(keys[chunk], keys[chunk - 1] if chunk else ROOT_KEY, chunk, group, block_ids)


def load_message(
    request_id: str, found: Found, key: bytes, computed: int, groups: Sequence[GroupSpec], tables: Tables
) -> Load:
    """What every worker sends to load what was `found` beyond `computed` tokens, into the blocks that
    `tables` give for each group by position. `key` is that of the chunk which ends at the resume point."""
    block_ids = tuple(
        tuple(table[at] for at in group.needed_blocks(found.resume_tokens, computed))
        for group, table in zip(groups, tables, strict=True)
    )
    return Load(request_id, found.lease_id, key, found.resume_tokens, computed, block_ids)
