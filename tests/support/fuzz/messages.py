"""Real messages of clients, from which mutation starts."""

from collections.abc import Callable
from typing import Any

import msgpack
from msgspec.structs import replace

from fuzz.choices import Choices
from lmcache_client.contract import codec, control, messages
from lmcache_client.contract.codec import packed
from lmcache_client.contract.geometry import Geometry, GroupSpec, Region
from lmcache_client.contract.keys import ROOT_KEY, ModelTag
from lmcache_client.contract.messages import Found, Lookup, Memory, Message, Store, StoreObject

BLOCKS = 40
PAGE_BYTES = 1024
BUFFER_BYTES = 3 * BLOCKS * PAGE_BYTES
CHUNK_SIZE = 256
CHAIN = 2
TENANTS = (b"", b"", b"a", bytes(16))
NAMES = ("", "one", "two", "m0")
KINDS = (
    "ping", "status", "goodbye", "hello", "register", "join", "store", "lookup", "load", "release", "pin",
    "unpin", "inspect", "follow", "retain", "accept", "clear", "prove", "prove", "prove", "prove",
)  # fmt: skip
"""The most frequent is so on purpose: nothing is stored before a registration is proven."""


def chain(number: int) -> tuple[bytes, ...]:
    return tuple(bytes([number, index]) * 16 for index in range(CHAIN))


def geometry(kind: int) -> Geometry:
    """Attention alone, or with a window and a recurrent state. One buffer."""

    def spec(name: str, window: int, number: int) -> GroupSpec:
        region = Region(0, number * BLOCKS * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
        return GroupSpec(name, CHUNK_SIZE if name == "recurrent" else 16, window, "", (region,))

    groups = (spec("full", 0, 0), spec("sliding_window", 40, 1), spec("recurrent", 0, 2))
    return Geometry(groups[: 1 + 2 * kind], BLOCKS)


class Speaker:
    """Makes what a client may say next. `memory` is the honest one; `promised` is what it was told."""

    def __init__(self, pid: int, memory: Memory) -> None:
        self.pid = pid
        self.memory = memory
        self.promised: list[tuple[Found, Lookup]] = []

    def message(self, choices: Choices) -> Message:
        """An honest message, though perhaps not at its time. It takes six choices."""
        kind, engine, branch, model, more, odd = (choices.below(256) for _ in range(6))
        engine_id, request, keys = f"e{engine % 3}", f"request number {engine % 2}", chain(branch % 4)
        tenant, name = TENANTS[branch % 4], NAMES[branch % 3]
        limit = CHUNK_SIZE * (1 + more % CHAIN)
        promise = self.promised[more % len(self.promised)] if self.promised else None
        made: dict[str, Callable[[], Message]] = {
            "ping": messages.Ping,
            "status": control.Status,
            "goodbye": messages.Goodbye,
            "hello": lambda: messages.Hello(self.pid, bytes([branch % 4]) * 16, "fuzz"),
            "register": lambda: self._register(engine_id, model % 2, model // 2 % 2, odd),
            "prove": messages.Prove,
            "join": lambda: messages.Join(engine_id),
            "store": lambda: _store(keys, tenant, model % 2, more % CHAIN, once=odd % 3 == 1),
            "lookup": lambda: Lookup(
                "r", keys, 0, limit, limit + 1 + odd, early=model % 2 == 1, tenant=tenant, why=odd % 2 == 1
            ),
            "load": lambda: _load(promise, model % 2),
            "release": lambda: messages.Release((promise[0].lease_id,) if promise else (), keys, request),
            "pin": lambda: messages.Pin(name, request),
            "unpin": lambda: messages.Unpin(name),
            "inspect": lambda: control.Inspect(engine_id, keys, CHUNK_SIZE * (more % (CHAIN + 2))),
            "follow": lambda: control.Follow(keys),
            "retain": lambda: control.Retain(keys, odd, odd % 101, odd % 3, tenant),
            "accept": lambda: messages.Accept((("r", CHUNK_SIZE * (more % 3)),)),
            "clear": lambda: messages.Clear(
                odd % 2 == 1, NAMES[model % 4], NAMES[branch % 4], NAMES[more % 4], odd % 3 == 1
            ),
        }
        return made[KINDS[kind % len(KINDS)]]()

    def _register(self, engine_id: str, model: int, rank: int, odd: int) -> Message:
        memory, tag = self.memory, ModelTag(f"m{model}", (("a", "b"),), 1 + rank, 1)
        if odd % 8 == 1:
            memory = replace(memory, device=bytes(16), handles=(bytes(64),))
        elif odd % 8 == 2:
            memory = replace(memory, device=bytes(16), descriptors=((odd, 1 << 62),))
        return messages.Register(engine_id, rank, tag, geometry(model), memory, ephemeral=odd % 4 == 3)


def _store(keys: tuple[bytes, ...], tenant: bytes, model: int, last: int, *, once: bool) -> Store:
    parents, objects = (ROOT_KEY, *keys), []
    for index in range(1 + last):
        for number, spec in enumerate(geometry(model).groups):
            count = len(spec.stored_blocks(index, CHUNK_SIZE))
            ids = packed([1 + (index * 16 + at) % (BLOCKS - 1) for at in range(count)])
            objects.append(StoreObject(keys[index], parents[index], index, number, ids, tenant))
    return Store(tuple(objects), once=once)


def _load(promise: tuple[Found, Lookup] | None, model: int) -> Message:
    found, keys = (promise[0], promise[1].keys) if promise else (Found(CHUNK_SIZE, 1, 1, ()), chain(0))
    resume = found.resume_tokens
    blocks = (spec.needed_blocks(resume) for spec in geometry(model).groups)
    ids = tuple(packed([1 + at % (BLOCKS - 1) for at in each]) for each in blocks)
    return messages.Load(
        "r", found.lease_id, keys[max(resume // CHUNK_SIZE - 1, 0) % len(keys)], resume, 0, ids
    )


def plain(message: Message) -> list[Any]:
    """The message as lists and plain values, to be bent."""
    fields: list[Any] = msgpack.unpackb(codec.pack(message))
    return fields
