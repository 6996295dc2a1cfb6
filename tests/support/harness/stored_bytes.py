"""Compares what the server stored of a prompt with the pages that the engine computed, byte by byte.

Runs inside the engine's process. A twin of the engine (the same model, the same geometry, memory of its
own) registers, is in the same namespace therefore, and loads the prompt's pages through the server.
"""

import ctypes

import numpy as np
from numpy.typing import NDArray

from harness.raw_scheduler import RawScheduler
from harness.rawclient import chain
from harness.waiting import PATIENCE_S
from lmcache_client.contract.geometry import Geometry
from lmcache_client.contract.messages import Found, Lookup
from lmcache_client.engine import Worker, expect, load_message
from lmcache_client.memory.cuda import CudaExport
from lmcache_client.memory.host import HostExport
from lmcache_client.server_channel import Channel

TIMEOUT_S = PATIENCE_S


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


class GpuPages(Pages):
    """Pages of this very process on its GPU, at one address for each buffer."""

    def __init__(self, geometry: Geometry, export: CudaExport) -> None:
        super().__init__(geometry, [])
        self._export = export

    def block(self, group: int, block: int) -> bytes:
        import torch

        torch.cuda.synchronize()
        driver, addresses = self._export._driver, self._export._addresses
        return b"".join(
            driver.read(
                addresses[region.buffer] + region.offset + block * region.stride_bytes, region.page_bytes
            )
            for region in self.geometry.groups[group].regions
        )


def of_engine(geometry: Geometry, export: HostExport | CudaExport) -> tuple[Pages, list[int]]:
    """The pages of this very process, and how many bytes each of its buffers has."""
    if isinstance(export, CudaExport):
        return GpuPages(geometry, export), [size for _, size in export._shared.ranges]
    views = [
        np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8)
        for start, size in export._buffers
    ]
    return Pages(geometry, views), [each.nbytes for each in views]


class Twin:
    """A second engine of the namespace of `worker`, whose buffers have `sizes` bytes."""

    def __init__(self, address: str, worker: Worker, sizes: list[int]) -> None:
        memory = [np.zeros(size, dtype=np.uint8) for size in sizes]
        self.pages = Pages(worker.geometry, memory)
        export = HostExport(tuple((each.ctypes.data, each.nbytes) for each in memory))
        self.chunk_size = 0
        channels = (
            Channel(address, self._register),
            Channel(address, lambda _: self.scheduler.join(TIMEOUT_S)),
        )
        self.worker = Worker(channels[0], "twin", worker.rank, worker.model, worker.geometry, export)
        self.scheduler = RawScheduler(channels[1], "twin")
        for channel in channels:
            channel.start(PATIENCE_S, PATIENCE_S)

    def _register(self, _channel: Channel) -> None:
        self.chunk_size = self.worker.register().chunk_size

    def load(self, prompt: list[int], resume_tokens: int) -> list[dict[int, int]]:
        """Load the prompt's pages for a resume at `resume_tokens`; per group, block by position."""
        lookahead = int(dict(self.worker.model.details).get("lookahead", "0"))
        keys = chain(prompt[: resume_tokens + lookahead], self.chunk_size, lookahead)
        groups = self.pages.geometry.groups
        asked = self.scheduler.lookup(
            Lookup("twin", tuple(keys), 0, resume_tokens, resume_tokens + 1), TIMEOUT_S
        )
        found = expect(self.scheduler.channel.wait(asked), Found)
        assert found.resume_tokens == resume_tokens, f"found {found.resume_tokens} of {resume_tokens} tokens"
        free = iter(range(1, self.pages.geometry.num_blocks))
        tables = [
            {position: next(free) for position in group.needed_blocks(resume_tokens)} for group in groups
        ]
        message = load_message("twin", found, keys[-1], 0, groups, tables)
        self.worker.channel.call(message, TIMEOUT_S)
        return tables

    def close(self) -> None:
        self.scheduler.channel.close()
        self.worker.channel.close()
