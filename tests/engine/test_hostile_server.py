"""The connector's own code against a server that lies, and against a GPU that fails.

The requests and the block pool are vLLM's own.

Whatever is answered, and whether anything is: no call of vLLM's into the connector raises or waits, every
request is served, and once the server is honest again the engine uses it and holds no block.
"""

import functools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from harness.hostile import BENT, CHUNK_SIZE, EXAMPLES, LIES, REFUSALS, WRONG, HostileServer, honest
from harness.served import step_output
from harness.waiting import PATIENCE_S, wait_until
from vllm import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from lmcache_client import server_channel
from lmcache_client.connector import worker as worker_side
from lmcache_client.connector.held_blocks import HeldBlocks
from lmcache_client.connector.metadata import StoreJob, WorkerReport
from lmcache_client.connector.offers import Offers
from lmcache_client.connector.scheduler import SchedulerSide
from lmcache_client.connector.settings import Settings
from lmcache_client.connector.worker import WorkerSide
from lmcache_client.contract.codec import packed
from lmcache_client.contract.geometry import FULL, RECURRENT, Geometry, GroupSpec, Region
from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.messages import (
    Clear,
    Hello,
    Join,
    Load,
    Lookup,
    Ping,
    Prove,
    Register,
    Release,
    Store,
    StoreObject,
)
from lmcache_client.memory.after_compute import Fence
from lmcache_client.memory.cuda import CudaExport, _Shared
from lmcache_client.memory.host import HostExport
from lmcache_client.server_channel import Channel
from lmcache_kernels.driver import CudaError

BLOCKS = 2048
PROMPT_TOKENS = 2 * CHUNK_SIZE + 8
LONGEST_WAIT_S = 0.05
"""In seconds, what a call of vLLM's may wait for a reply: a server that is well answers sooner."""
Value = TypeVar("Value")


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    of_the_channel = {"KEEPER_INTERVAL": 0.01, "GREET_TIMEOUT": 0.2, "PING_AFTER": 0.02, "PING_TIMEOUT": 0.1}
    for name, value in {**of_the_channel, "RETRY_REFUSED": 0.05, "OVERDUE": 0.1}.items():
        monkeypatch.setattr(server_channel, f"{name}_S", value)
    monkeypatch.setattr(worker_side, "STORE_TIMEOUT_S", 0.1)
    for place, value in {"engine.REGISTER_S": 0.2, "engine.JOIN_S": 0.2, "servers.RELEASE_S": 0.1}.items():
        monkeypatch.setattr(f"lmcache_client.{place}", value)


@pytest.fixture(autouse=True)
def waits_s(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """How long the engine's thread offered to wait for replies: no call of vLLM's waits for long."""
    waits, poll, wait, engine = list[float](), Channel.poll, Channel.wait, threading.current_thread()

    def briefly(self: Channel, pending: Any = None, wait_s: float = 0.0) -> None:
        if threading.current_thread() is engine:
            waits.append(wait_s)
        poll(self, pending, wait_s)

    def until_it_comes(self: Channel, pending: Any) -> Any:
        assert not Steps.calling or threading.current_thread() is not engine
        return wait(self, pending)

    monkeypatch.setattr(Channel, "poll", briefly)
    monkeypatch.setattr(Channel, "wait", until_it_comes)
    yield waits
    assert max(waits, default=0.0) <= LONGEST_WAIT_S


def call(function: Callable[..., Value], *arguments: Any) -> Value:
    Steps.calling += 1
    try:
        return function(*arguments)
    finally:
        Steps.calling -= 1


class Steps:
    """Both sides of a connector, called as vLLM calls them. One group is attention, one is recurrent."""

    calling = 0
    """Of vLLM's calls into the connector, how many have not returned."""

    def __init__(self) -> None:
        regions = [(Region(0, start, 64, 64),) for start in (0, 64 * BLOCKS)]
        kinds = (FULL, RECURRENT)
        groups = tuple(
            GroupSpec(kind, CHUNK_SIZE, 0, "", at) for kind, at in zip(kinds, regions, strict=True)
        )
        self.memory = np.zeros(2 * 64 * BLOCKS, dtype=np.uint8)
        self.pool = BlockPool(BLOCKS, enable_caching=False, hash_block_size=CHUNK_SIZE)
        own = Settings(lookup_timeout_s=0.1, load_timeout_s=0.1)
        export = HostExport(((int(self.memory.ctypes.data), self.memory.nbytes),))
        self.worker = WorkerSide(own, "e", 0, ModelTag("m", (), 1, 1), Geometry(groups, BLOCKS), export)
        bare = tuple(GroupSpec(group.kind, group.block_size, 0, "", ()) for group in groups)
        self.scheduler = SchedulerSide(own, "e", Offers(bare), 1, loads=True, stores=True)
        self.scheduler.bind(self.pool)
        self.requests = 0

    def __enter__(self) -> "Steps":
        self.worker.start()
        self.scheduler.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.scheduler, self.worker):
            each.channel.close(0.0)

    @property
    def ready(self) -> bool:
        return self.scheduler.channel.ready and self.worker.channel.ready

    def reconnect(self) -> None:
        for each in (self.scheduler.client.channels[0], self.worker.channel):
            with each._lock:
                each._break("the test says so")

    def request(self) -> tuple[int, bool]:
        """Serve one request; returns how many tokens were offered, and whether they were loaded."""
        self.requests += 1
        name = f"request {self.requests}"
        params = SamplingParams(max_tokens=1)
        request = Request(name, list(range(self.requests, self.requests + PROMPT_TOKENS)), params, None)
        self.scheduler.new_request(request)

        def offered() -> tuple[int, bool] | None:
            tokens, later = call(self.scheduler.matched_tokens, request, 0)
            if tokens is None:
                self.step({}, (), {})
            return None if tokens is None else (tokens, later)

        tokens, _ = wait_until(offered, PATIENCE_S, "the engine stops asking", 0)
        assert tokens in (0, CHUNK_SIZE, 2 * CHUNK_SIZE)
        tables = tuple([block.block_id for block in self.pool.get_new_blocks(3)] for _ in range(2))
        blocks = SimpleNamespace(get_block_ids=lambda: tables)
        call(self.scheduler.allocated, request, blocks, tokens)
        loaded = bool(tokens) and self._load(name)
        computed = tokens if loaded else 0
        states = {} if computed == 2 * CHUNK_SIZE else {name: [(1, tables[1][1], 2 * CHUNK_SIZE)]}
        self.step({name: PROMPT_TOKENS - computed}, ((name, computed),), states, {name: tables}.get)
        call(self.scheduler.finished, request)
        self.pool.free_blocks(self.pool.blocks[i] for table in tables for i in table)
        return tokens, loaded

    def _load(self, name: str) -> bool:
        failed: set[str] = set()

        def has_ended() -> bool:
            loaded, lost = self.step({}, (), {})
            failed.update(lost)
            return name in loaded

        wait_until(has_ended, PATIENCE_S, "the load has ended", 0)
        return name not in failed

    def step(
        self, scheduled: dict[str, int], computed: Any, states: Any, tables: Any = {}.get
    ) -> tuple[set[str], set[str]]:
        output = step_output(scheduled, new=computed, states=states, tables=tables)
        metadata = call(self.scheduler.step, output)
        call(self.worker.submit, metadata.loads)
        call(self.worker.submit, metadata.stores)
        results = call(self.worker.collect, metadata.idle)
        report: Any = SimpleNamespace(
            finished_recving=results.loaded,
            failed_recving=results.failed,
            kv_connector_worker_meta=WorkerReport(results.settled),
        )
        call(self.scheduler.worker_output, report)
        return results.loaded, results.failed

    def is_served(self) -> bool:
        return self.ready and self.request() == (2 * CHUNK_SIZE, True)

    def is_whole(self) -> bool:
        self.step({}, (), {})
        return self.pool.get_num_free_blocks() == BLOCKS - 1


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileServer]:
    with tempfile.TemporaryDirectory(prefix="lmc-") as directory:
        monkeypatch.setenv("LMCACHE_RUNTIME_DIR", directory)
        with HostileServer(Path(directory), num_groups=2) as server:
            yield server


@pytest.fixture
def steps(hostile: HostileServer) -> Iterator[Steps]:
    with Steps() as connector:
        wait_until(connector.is_served, PATIENCE_S, "the engine is served")
        yield connector


TRUE_ENOUGH = ("Found", "Done", "twice", "two parts")
"""With these, the question is answered."""
RIGHT = {kind: type(honest(each)) for each in EXAMPLES if (kind := type(each))}
ALWAYS = [type(each).__name__ for each in EXAMPLES] + [*BENT] + [f"refused as {code!r}" for code in REFUSALS]


def lies_about(kind: type[Any]) -> dict[str, Any]:
    word = RIGHT[kind].__name__.lower()
    names = [*ALWAYS, *(name for name in WRONG if name.startswith((word, "held", "not joined", "a process")))]
    return {name: LIES[name] for name in names}


WHEN_IT_CONNECTS = (Hello, Register, Prove, Join)
WHILE_IT_RUNS = (Lookup, Load, Store, Release, Ping, Clear)


def is_told(hostile: HostileServer, steps: Steps, kind: type[Any], name: str, asked: int) -> bool:
    """Serves a request; whether the lie was told. On a busy machine, a lookup may be too late for a load."""
    if kind is not Ping:
        tokens, loaded = steps.request()
        if name not in TRUE_ENOUGH:
            assert kind is not Lookup or not tokens or name.startswith(("found", "held")), name
            assert kind is not Load or not loaded, name
    return hostile.asked.get(kind, 0) > asked


@pytest.mark.parametrize("kind", [*WHILE_IT_RUNS, *WHEN_IT_CONNECTS], ids=lambda kind: kind.__name__)
def test_no_reply_harms_an_engine(hostile: HostileServer, steps: Steps, kind: type[Any]) -> None:
    for name, lie in lies_about(kind).items():
        asked = hostile.asked.get(kind, 0)
        hostile.lies = {kind: lie}
        if kind in WHEN_IT_CONNECTS:
            steps.reconnect()
        if kind is Clear:
            steps.scheduler.reset()
        told = functools.partial(is_told, hostile, steps, kind, name, asked)
        wait_until(told, PATIENCE_S, f"the lie is told: {name}")
        if kind in WHEN_IT_CONNECTS:
            steps.request()
        hostile.lies.clear()
        wait_until(steps.is_served, PATIENCE_S, f"the engine is served again after: {name}")
    wait_until(steps.is_whole, PATIENCE_S, "no block is held any more")


def test_a_server_that_has_cleared_is_not_asked_again(hostile: HostileServer, steps: Steps) -> None:
    """Each Clear forgets what all engines of the namespace have stored since."""
    steps.scheduler.reset()
    wait_until(lambda: hostile.asked.get(Clear, 0), PATIENCE_S, "it is asked")
    wait_until(steps.is_served, PATIENCE_S)
    joined = hostile.asked[Join]
    steps.reconnect()
    wait_until(lambda: hostile.asked[Join] > joined, PATIENCE_S, "the engine joins again")
    wait_until(steps.is_served, PATIENCE_S)
    assert hostile.asked[Clear] == 1


def test_a_server_that_settles_no_store_has_at_most_half_of_the_blocks() -> None:
    """Each store holds its blocks until all workers have settled it. Beyond the half, stores are dropped."""
    pool, held = (
        BlockPool(10, enable_caching=False, hash_block_size=CHUNK_SIZE),
        HeldBlocks(2, time.monotonic),
    )
    held.bind(pool)

    def stored(count: int) -> StoreJob | None:
        """The job of a store, of a request that ends at once."""
        blocks = pool.get_new_blocks(count)
        ids = tuple(block.block_id for block in blocks)
        job = held.store_job(Store((StoreObject(bytes(32), bytes(32), 0, 0, packed(ids)),)))
        pool.free_blocks(blocks)
        return job

    first, all_blocks = stored(3), pool.get_num_free_blocks() + 3
    assert stored(3) is None
    assert stored(2) is not None
    assert stored(1) is None
    assert pool.get_num_free_blocks() == all_blocks - 5
    assert first is not None
    assert held.settled(first.job_id, 1) is None
    assert pool.get_num_free_blocks() == all_blocks - 5, "the other worker has not settled it"
    assert held.settled(first.job_id, 1) is not None
    assert pool.get_num_free_blocks() == all_blocks - 2
    assert stored(3) is not None


# The thread that waits for the GPU dies. It, the connector and the channel are real here. CUDA is not,
# for this machine may have no GPU. What a real driver does when an event fails was not run.


class Events:
    """Events of a driver that have passed at once, except that `record` or `wait_for` fail on demand."""

    def __init__(self) -> None:
        self.broken = ""

    def enter(self, context: int) -> None:
        pass

    def create_event(self) -> int:
        return 1

    def create_stream(self) -> int:
        return 2

    def destroy_stream(self, stream: int) -> None:
        assert stream == 2

    def record(self, event: int, stream: int) -> None:
        self._fail("record")

    def wait_for(self, event: int) -> None:
        self._fail("wait_for")

    def _fail(self, name: str) -> None:
        if self.broken == name:
            raise CudaError(name, 700, "an illegal memory access")


class FencedExport(HostExport):
    """Host memory, behind the fence of a GPU's memory."""

    def __init__(self, inner: HostExport, events: Events) -> None:
        super().__init__(inner._buffers)
        self._fence = Fence(events, 0, lambda: 0)  # type: ignore[arg-type]
        self._shared = _Shared(events, (), False)  # type: ignore[arg-type]
        self._stream, self._driver = events.create_stream(), events

    failure = CudaExport.failure  # type: ignore[assignment]
    after_compute = CudaExport.after_compute  # type: ignore[assignment]
    close = CudaExport.close  # type: ignore[assignment]


@pytest.mark.parametrize("where", ["record", "wait_for"])
def test_a_fence_that_dies_fails_loads_and_drops_stores(
    hostile: HostileServer, steps: Steps, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    events = Events()
    inner = steps.worker.client.export
    assert isinstance(inner, HostExport)
    steps.worker.client.export = FencedExport(inner, events)
    wait_until(steps.is_served, PATIENCE_S, "its loads succeed as long as the fence works")
    wait_until(steps.is_whole, PATIENCE_S, "its stores have ended, too")
    events.broken = where
    asked = hostile.asked[Load], hostile.asked.get(Store, 0)
    for _ in range(3):
        # A lookup that is late, on a busy machine, offers nothing.
        _, loaded = wait_until(lambda: found if (found := steps.request())[0] else None)
        assert not loaded
    assert (hostile.asked[Load], hostile.asked.get(Store, 0)) == asked, "nothing was sent"
    wait_until(steps.is_whole, PATIENCE_S, "no block is held any more")
    said = f"waiting for the GPU failed: {where}: an illegal memory access (CUDA error 700): this worker"
    assert caplog.text.count(said) == 1
    steps.worker.close()
