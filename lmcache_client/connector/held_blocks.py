"""The blocks of vLLM's pool that the server may still read or write. vLLM must not use them meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_client.connector.log import trace
from lmcache_client.connector.metadata import StoreJob
from lmcache_client.connector.request import Tracked
from lmcache_client.contract.codec import unpacked
from lmcache_client.contract.messages import Store

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

HELD_SHARE = 0.5
DRAIN_S = 10.0
"""How long an idle engine keeps stepping for jobs that are not settled."""


@dataclass
class Job:
    """Blocks held for a copy until `workers` more workers have reported it settled. `requests` are those of
    the objects of a store."""

    blocks: list[int]
    workers: int
    started_s: float
    requests: Sequence[Tracked]


class HeldBlocks:
    """The blocks that each job holds until all `world_size` workers have reported it settled."""

    def __init__(self, world_size: int, now_s: Callable[[], float]) -> None:
        self._world_size = world_size
        self._now_s = now_s
        self._pool: BlockPool
        """vLLM's, from `bind` on."""
        self._jobs: dict[int, Job] = {}
        self._next_job = 1

    def bind(self, pool: "BlockPool") -> None:
        self._pool, reset = pool, pool.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            # vLLM refuses to reset its cache, or fails, while any block is in use. Blocks that only a copy
            # holds are used by no request, so vLLM may count them as free.
            held = [pool.blocks[i] for job in self._jobs.values() for i in job.blocks]
            pool.free_blocks(held)
            try:
                return bool(reset())
            finally:
                pool.touch(held)

        pool.reset_prefix_cache = reset_prefix_cache

    def hold(self, block_ids: list[int], requests: Sequence[Tracked] = ()) -> int:
        """Holds blocks for a new job; returns its number."""
        job_id = self._next_job
        self._next_job += 1
        self._pool.touch([self._pool.blocks[i] for i in block_ids])
        self._jobs[job_id] = Job(block_ids, self._world_size, self._now_s(), requests)
        return job_id

    def forget_requests(self) -> None:
        """What is being stored is of no use to its requests any more."""
        for job in self._jobs.values():
            job.requests = ()

    def store_job(self, store: Store, requests: Sequence[Tracked] = ()) -> StoreJob | None:
        """A job for the store that holds its blocks; None if too many are held already: a server that is
        slower than the engine must not take the engine's blocks."""
        number, request_ids = len(store.objects), ", ".join(store.request_ids)
        block_ids = [block for stored in store.objects for block in unpacked(stored.block_ids)]
        held = sum(len(job.blocks) for job in self._jobs.values())
        if held and held + len(block_ids) > HELD_SHARE * self._pool.num_gpu_blocks:
            trace(request_ids, "%d objects are not stored because too many blocks are held", number)
            return None
        job_id = self.hold(block_ids, requests)
        trace(request_ids, "storing %d objects, job %d", number, job_id)
        return StoreJob(job_id, store)

    def settled(self, job_id: int, workers: int) -> Job | None:
        """Another `workers` workers report this job settled. After the last of all workers its blocks are
        free, and the result is the job."""
        job = self._jobs[job_id]
        job.workers -= workers
        assert job.workers >= 0
        if job.workers == 0:
            del self._jobs[job_id]
            # The tail is freed first, as vLLM does, so that suffixes are evicted before their prefixes.
            self._pool.free_blocks(self._pool.blocks[i] for i in reversed(job.blocks))
        return None if job.workers else job

    def has_work(self) -> bool:
        """Whether an idle engine must keep stepping to free held blocks. The time is limited, so that a
        server that hangs does not make an idle engine spin."""
        oldest_s = min((job.started_s for job in self._jobs.values()), default=0.0)
        return bool(self._jobs) and self._now_s() - oldest_s < DRAIN_S
