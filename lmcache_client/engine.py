"""The thin client: how an engine's workers and its scheduler side make themselves known to the server over a
channel, and what stores and loads say. The owner (vLLM's connector, the bench or a test) decides when to send
them, and how long to wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lmcache_client.contract import messages
from lmcache_client.contract.codec import packed
from lmcache_client.contract.geometry import Geometry, GroupSpec
from lmcache_client.contract.keys import ROOT_KEY, ModelTag
from lmcache_client.contract.messages import Found, Load, Message, StoreObject
from lmcache_client.memory.cuda import CudaExport
from lmcache_client.memory.host import HostExport
from lmcache_client.server_channel import Channel, ChannelError

REGISTER_S = 10.0
GPU_REGISTER_S = 60.0
"""On a GPU, the server may first have to create a context, while it pins memory for it and for others."""
JOIN_S = 2.0
Export = HostExport | CudaExport
Tables = Sequence[Sequence[int] | Mapping[int, int]]
Reply = TypeVar("Reply", bound=Message)


@dataclass
class Worker:
    """One worker of an engine. Its pages lie in the memory of `export`, laid out as in `geometry`. The server
    forgets what `ephemeral` engines stored when the last engine of their namespace is gone."""

    channel: Channel
    engine_id: str
    rank: int
    model: ModelTag
    geometry: Geometry
    export: Export
    ephemeral: bool = False

    @property
    def register_s(self) -> float:
        """How long a registration may take."""
        return GPU_REGISTER_S if isinstance(self.export, CudaExport) else REGISTER_S

    def register(self) -> messages.Registered:
        """Exports the memory to the server and proves that this process owns it. Call it from the channel's
        `on_up`, because a restarted server needs it again. Raises ChannelError."""
        self.channel.system.allow_tracer(self.channel.server_pid)
        memory = self.export.memory(self.channel.system.pid())
        message = messages.Register(
            self.engine_id, self.rank, self.model, self.geometry, memory, self.ephemeral
        )
        challenge = expect(self.channel.call(message, self.register_s), messages.Challenge)
        with self.export.proving(challenge.nonce):
            return expect(self.channel.call(messages.Prove(), self.register_s), messages.Registered)


def join(channel: Channel, engine_id: str, timeout_s: float = JOIN_S) -> messages.Joined:
    """Joins the engine that the workers have registered; for `on_up`. Raises ChannelError."""
    joined = expect(channel.call(messages.Join(engine_id), timeout_s), messages.Joined)
    if not joined.ready:
        raise ChannelError("the workers of this engine have not all registered yet")
    return joined


def expect(reply: Message, kind: type[Reply]) -> Reply:
    """Returns the reply if it is a `kind`, and raises ChannelError otherwise."""
    if not isinstance(reply, kind):
        raise ChannelError(f"the lmcache server answered {type(reply).__name__}, not {kind.__name__}")
    return reply


def chunk_object(
    keys: Sequence[bytes], chunk: int, group: int, blocks: Sequence[int], tenant: bytes = b""
) -> StoreObject:
    """The object that a group stores for chunk number `chunk` of the prompt with these keys. The blocks must
    not change before the store is settled (see server_channel.py)."""
    parent = keys[chunk - 1] if chunk else ROOT_KEY
    return StoreObject(keys[chunk], parent, chunk, group, packed(blocks), tenant)


def load_message(
    request_id: str, found: Found, key: bytes, computed: int, groups: Sequence[GroupSpec], tables: Tables
) -> Load:
    """The message with which every worker loads the tokens of `found` beyond `computed`. `tables` gives, for
    each group, the block id at each position; `key` is the key of the chunk that ends at the resume point.
    The blocks must not be used before the load is settled."""
    block_ids = tuple(
        packed(table[at] for at in group.needed_blocks(found.resume_tokens, computed))
        for group, table in zip(groups, tables, strict=True)
    )
    return Load(request_id, found.lease_id, key, found.resume_tokens, computed, block_ids)
