"""Real messages of clients, from which mutation starts."""

from typing import Any

from msgspec.structs import replace

from fuzz.choices import Choices
from lmcache_client.contract import codec
from lmcache_client.contract.control import Follow, Inspect
from lmcache_client.contract.geometry import Geometry, GroupSpec, Region
from lmcache_client.contract.keys import ROOT_KEY, ModelTag
from lmcache_client.contract.messages import (
    Accept,
    Clear,
    Found,
    Goodbye,
    Hello,
    Join,
    Load,
    Lookup,
    Memory,
    Message,
    Pin,
    Ping,
    Prove,
    Register,
    Release,
    Status,
    Store,
    StoreObject,
    Unpin,
)

BLOCKS = 40
PAGE_BYTES = 1024
CHUNK_SIZE = 256
CHAIN = 2
TENANTS = (b"", b"", b"a", bytes(16))
ENGINES = 3
KINDS = 21


def chain(number: int) -> tuple[bytes, ...]:
    return tuple(bytes([number, index]) * 16 for index in range(CHAIN))


def geometry(kind: int) -> Geometry:
    """Attention alone, or with a window and a recurrent state. One buffer."""

    def spec(name: str, window: int, number: int) -> GroupSpec:
        region = Region(0, number * BLOCKS * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
        return GroupSpec(name, CHUNK_SIZE if name == "recurrent" else 16, window, "", (region,))

    groups = (spec("full", 0, 0), spec("sliding_window", 40, 1), spec("recurrent", 0, 2))
    return Geometry(groups[: 1 + 2 * kind], BLOCKS)


BUFFER_BYTES = 3 * BLOCKS * PAGE_BYTES


class Speaker:
    """Makes what a client may say next. `memory` is the honest one; `promised` is what it was told."""

    def __init__(self, pid: int, memory: Memory) -> None:
        self.pid = pid
        self.memory = memory
        self.promised: list[tuple[Found, Lookup]] = []

    def message(self, choices: Choices) -> Message:
        """An honest message, though perhaps not at its time."""
        engine_id, branch = f"e{choices.below(ENGINES)}", choices.below(4)
        kind = choices.below(KINDS)
        if kind == 2:
            names = ("", "model", "none", "0")
            return Clear(bool(choices.below(2)), *(names[choices.below(4)] for _ in range(3)))
        made = _SIMPLE.get(kind)
        if made is not None:
            return made
        if kind == 6:
            return Hello(self.pid, bytes([choices.below(4)]) * 16, "fuzz")
        if kind == 7:
            model, workers = choices.below(2), 1 + choices.below(2)
            memory = self.memory
            if not choices.below(8):
                memory = replace(memory, device=bytes(16), handles=(bytes(64),))
            elif not choices.below(8):
                memory = replace(memory, device=bytes(16), descriptors=((choices.below(64), 1 << 62),))
            return Register(
                engine_id,
                choices.below(workers),
                ModelTag(f"m{model}", (("a", "b"),), workers, 1),
                geometry(model),
                memory,
                ephemeral=not choices.below(4),
            )
        if kind == 8:
            return Join(engine_id)
        if kind in (9, 10):
            limit = CHUNK_SIZE * (1 + choices.below(CHAIN))
            tokens = limit + 1 + choices.below(300)
            early, tenant, why = kind == 10, TENANTS[branch], tokens % 2 == 1
            return Lookup("r", chain(branch), 0, limit, tokens, early=early, tenant=tenant, why=why)
        if kind == 20:
            return Follow(chain(branch))
        if kind in (11, 12):
            return self._store(branch, choices)
        found = self.promised[choices.below(len(self.promised))] if self.promised else None
        if kind in (13, 14):
            return self._load(found, choices)
        if kind == 19:
            return Accept((("r", CHUNK_SIZE * choices.below(3)),))
        token = f"request number {choices.below(2)}"
        if kind == 16:
            return Pin(("", "one", "two")[choices.below(3)], token)
        if kind == 17:
            return Unpin(("", "one", "two")[choices.below(3)])
        if kind == 18:
            return Inspect(engine_id, chain(branch), CHUNK_SIZE * choices.below(CHAIN + 2))
        return Release((found[0].lease_id,) if found else (), chain(branch), token)

    def _store(self, branch: int, choices: Choices) -> Store:
        specs, keys, objects = geometry(choices.below(2)).groups, (ROOT_KEY, *chain(branch)), []
        for index in range(1 + choices.below(CHAIN)):
            for number, spec in enumerate(specs):
                count = len(spec.stored_blocks(index, CHUNK_SIZE))
                ids = tuple(1 + (index * 16 + at) % (BLOCKS - 1) for at in range(count))
                objects.append(StoreObject(keys[index + 1], keys[index], index, number, ids, TENANTS[branch]))
        return Store(tuple(objects), once=not len(objects) % 3)

    def _load(self, promise: tuple[Found, Lookup] | None, choices: Choices) -> Load:
        found, question = promise or (Found(CHUNK_SIZE, 1, 1, ()), None)
        resume = found.resume_tokens
        ids = tuple(
            tuple(1 + at % (BLOCKS - 1) for at in spec.needed_blocks(resume))
            for spec in geometry(choices.below(2)).groups
        )
        keys = question.keys if question is not None else chain(0)
        last = max(resume // CHUNK_SIZE - 1, 0) % len(keys)
        return Load("r", found.lease_id, keys[last], resume, 0, ids)


# 4 and 5 are the most frequent on purpose: nothing is stored before a registration is proven.
_SIMPLE: dict[int, Message] = {
    0: Ping(), 1: Status(), 3: Goodbye(), 4: Prove(), 5: Prove(),
}  # fmt: skip


def plain(message: Message) -> list[Any]:
    """The message as lists and plain values, to be bent."""
    fields: list[Any] = codec.unpack(codec.pack(message))
    return fields
