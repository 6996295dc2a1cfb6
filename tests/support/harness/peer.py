"""A client that says exactly what it is told, true or not: one socket, no thread, nothing by itself."""

import os
from types import TracebackType
from typing import Self

import numpy as np
import zmq

from harness.waiting import PATIENCE_S
from lmcache_client.contract import messages
from lmcache_client.contract.codec import packed
from lmcache_client.contract.geometry import MAX_GROUPS, Geometry, GroupSpec, Region
from lmcache_client.contract.keys import ModelTag, chunk_keys
from lmcache_client.contract.messages import (
    Challenge,
    Found,
    Goodbye,
    Hello,
    Join,
    Load,
    Lookup,
    Memory,
    Message,
    Prove,
    Register,
    Release,
    Store,
    Welcome,
)
from lmcache_client.engine import chunk_object
from lmcache_client.memory.host import ProofBuffer, allow_tracer

TIMEOUT_S = PATIENCE_S
BLOCKS = 40
CHUNK_SIZE = 256
CHUNKS = 2
PAGE_BYTES = 4096
CHUNK_BLOCKS = CHUNK_SIZE // 16


def widest_geometry() -> Geometry:
    """Of as many groups as there may be."""
    region = Region(0, 0, 16, 16)
    groups = (GroupSpec("full", 16, 0, str(number), (region,)) for number in range(MAX_GROUPS))
    return Geometry(tuple(groups), BLOCKS)


class Peer:
    """Worker and scheduler side of an engine in one session. `life` is everything that one can say, in
    order; a message of it is made when the one before it has been answered."""

    def __init__(self, address: str, engine_id: str = "peer", page_bytes: int = PAGE_BYTES) -> None:
        self.engine_id = engine_id
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._last_id = 0
        region = Region(0, 0, page_bytes, page_bytes)
        self.geometry = Geometry((GroupSpec("full", 16, 0, "peer", (region,)),), BLOCKS)
        self.model = ModelTag("peer", (), 1, 1)
        self.memory = np.zeros(BLOCKS * page_bytes, dtype=np.uint8)
        self.proof = ProofBuffer()
        self.client_id = os.urandom(16)
        self.keys = tuple(chunk_keys(([chunk], engine_id) for chunk in range(CHUNKS)))
        self.found: Found | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()

    # -- one message ------------------------------------------------------------------------------

    def send(self, message: Message) -> int:
        self._last_id += 1
        self.socket.send(messages.encode_request(self._last_id, message))
        return self._last_id

    def receive(self, timeout_s: float = TIMEOUT_S) -> tuple[int, Message]:
        """(request id, reply) of the next reply; raises TimeoutError."""
        if not self.socket.poll(int(timeout_s * 1000)):
            raise TimeoutError("the server did not answer")
        _, request_id, reply = messages.decode_reply(self.socket.recv())
        return request_id, reply

    def wait_for(self, request_id: int) -> Message:
        """The reply to a request; replies to others are passed over."""
        while True:
            answered, reply = self.receive()
            if answered == request_id:
                self._act_on(reply)
                return reply

    def ask(self, message: Message) -> Message:
        return self.wait_for(self.send(message))

    def _act_on(self, reply: Message) -> None:
        if isinstance(reply, Welcome):
            allow_tracer(reply.server_pid)
        elif isinstance(reply, Challenge):
            self.proof.write(reply.nonce)
        elif isinstance(reply, Found):
            self.found = reply

    # -- everything that a client says ------------------------------------------------------------

    def hello(self, pid: int = 0) -> Hello:
        return Hello(pid or os.getpid(), self.client_id, "peer")

    def host_memory(self) -> Memory:
        return Memory(os.getpid(), ((self.memory.ctypes.data, self.memory.nbytes),), self.proof.address)

    def register(self) -> Register:
        return Register(self.engine_id, 0, self.model, self.geometry, self.host_memory())

    def lookup(self) -> Lookup:
        limit = CHUNKS * CHUNK_SIZE
        return Lookup("request", self.keys, 0, limit, limit + 1)

    def load(self) -> Load:
        lease_id = self.found.lease_id if self.found is not None else 0
        ids = tuple(range(1, 1 + CHUNKS * CHUNK_BLOCKS))
        return Load("request", lease_id, self.keys[-1], CHUNKS * CHUNK_SIZE, 0, (packed(ids),))

    def store(self) -> Store:
        return Store(
            tuple(chunk_object(self.keys, chunk, 0, self.chunk_blocks(chunk)) for chunk in range(CHUNKS))
        )

    @staticmethod
    def chunk_blocks(chunk: int) -> tuple[int, ...]:
        return tuple(range(1 + chunk * CHUNK_BLOCKS, 1 + (chunk + 1) * CHUNK_BLOCKS))

    def release(self) -> Release:
        leases = (self.found.lease_id,) if self.found is not None else ()
        return Release(leases, self.keys)

    LIFE = ("hello", "register", "prove", "join", "store", "lookup", "load", "release", "goodbye")

    def message(self, name: str) -> Message:
        plain: dict[str, Message] = {"prove": Prove(), "join": Join(self.engine_id), "goodbye": Goodbye()}
        made: Message = plain[name] if name in plain else getattr(self, name)()
        return made

    def live(self, until: str, since: str = LIFE[0]) -> None:
        """Everything from `since` up to and including `until`, each message answered."""
        for name in self.LIFE[self.LIFE.index(since) : self.LIFE.index(until) + 1]:
            reply = self.ask(self.message(name))
            assert not isinstance(reply, messages.Refused), f"{name}: {reply.message}"
