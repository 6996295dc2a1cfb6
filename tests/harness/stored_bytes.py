"""Compares what the server stored of a prompt with the pages that the engine computed, byte by byte.

Runs inside the engine's process. A twin of the engine (the same model, the same geometry, memory of its
own) registers, is in the same namespace therefore, and loads the prompt's pages through the server.
"""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_client.channel import Channel, ChannelError
from lmcache_client.contract.geometry import Geometry
from lmcache_client.contract.keys import ROOT_KEY, chunk_key
from lmcache_client.contract.messages import (
    Challenge,
    Found,
    Join,
    Joined,
    Lookup,
    Memory,
    Prove,
    Register,
    Registered,
    Retrieve,
)
from lmcache_client.memory.host import ProofBuffer, allow_tracer

TIMEOUT_S = 20.0


class Pages:
    """Pages by group, block and region, of a list of buffers that lie as a geometry says."""

    def __init__(self, geometry: Geometry, buffers: list[NDArray[np.uint8]]) -> None:
        self.geometry = geometry
        self.buffers = buffers

    def block(self, group: int, block: int) -> bytes:
        return b"".join(
            self.buffers[region.buffer][region.offset + block * region.stride_bytes :][
                : region.page_bytes
            ].tobytes()
            for region in self.geometry.groups[group].regions
        )


def of_process(geometry: Geometry, buffers: tuple[tuple[int, int], ...]) -> Pages:
    """The pages of this very process at (address, bytes)."""
    import ctypes

    views = [np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8) for start, size in buffers]
    return Pages(geometry, views)


class Twin:
    """A second engine of the same namespace; `register_message` is the worker side's."""

    def __init__(self, address: str, register_message: tuple[Any, ...]) -> None:
        _, self._rank, self._model, self.geometry, buffers = register_message
        self.memory = [np.zeros(size, dtype=np.uint8) for _, size in buffers]
        self.pages = Pages(self.geometry, self.memory)
        self._proof = ProofBuffer()
        self.chunk_size = 0
        self.worker = Channel(address, self._register)
        self.scheduler = Channel(address, self._join)
        for channel in (self.worker, self.scheduler):
            channel.start(5, 5)

    def _register(self, channel: Channel) -> None:
        allow_tracer(channel.server_pid)
        memory = Memory(
            os.getpid(), tuple((each.ctypes.data, each.nbytes) for each in self.memory), self._proof.address
        )
        challenge = channel.call(Register("twin", self._rank, self._model, self.geometry, memory), TIMEOUT_S)
        assert isinstance(challenge, Challenge)
        self._proof.write(challenge.nonce)
        registered = channel.call(Prove(), TIMEOUT_S)
        assert isinstance(registered, Registered)
        self.chunk_size = registered.chunk_size

    def _join(self, channel: Channel) -> None:
        joined = channel.call(Join("twin"), TIMEOUT_S)
        if not isinstance(joined, Joined) or not joined.ready:
            raise ChannelError("not registered yet")

    def load(self, prompt: list[int], resume_tokens: int) -> list[dict[int, int]]:
        """Load the prompt's pages for a resume at `resume_tokens`; per group, block by position."""
        keys, parent = [], ROOT_KEY
        for start in range(0, resume_tokens, self.chunk_size):
            parent = chunk_key(parent, prompt[start : start + self.chunk_size], None)
            keys.append(parent)
        message = Lookup("twin", "twin", tuple(keys), 0, resume_tokens, resume_tokens + 1)
        found = self.scheduler.call(message, TIMEOUT_S)
        assert isinstance(found, Found)
        assert found.resume_tokens == resume_tokens, f"found {found.resume_tokens} of {resume_tokens} tokens"
        free = iter(range(1, self.geometry.num_blocks))
        tables = [
            {position: next(free) for position in group.needed_blocks(resume_tokens)}
            for group in self.geometry.groups
        ]
        ids = tuple(tuple(table.values()) for table in tables)
        self.worker.call(Retrieve("twin", found.lease_id, keys[-1], resume_tokens, 0, ids), TIMEOUT_S)
        return tables

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()
