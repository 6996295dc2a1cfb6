"""A router that applies the events of an engine holds only what a lookup would find, and soon all of it.

The connector's events and the server's router are real; between them, replies are late or lost. Prompts share
prefixes and evict each other from a small L1.
"""

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from desk import Desk, store
from fuzz.messages import CHUNK_SIZE, geometry
from vllm import SamplingParams
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.request import Request

from lmcache_client.connector.option import Engine
from lmcache_client.connector.request import Tracked
from lmcache_client.connector.settings import Settings
from lmcache_client.contract import messages
from lmcache_client.contract.control import Inspect, Inspected
from lmcache_client.contract.geometry import FULL
from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.messages import Clear, Found, Lookup, Message, Release, Store
from lmcache_client.engine import chunk_object
from lmcache_client.options.kv_events import POLL_S, Events
from lmcache_client.server_channel import Pending
from lmcache_client.servers import Servers
from lmcache_client.transport import SYSTEM
from lmcache_server.options.kv_events import server as kv_events
from lmcache_server.transfer.base import CopyError

BLOCK = 16
SCHEDULER, STRANGER = 9, 20
STEPS = 100
PAGES = 39


class Wire:
    """The channel of the scheduler side: it delivers questions in their order, when it likes to."""

    def __init__(self, desk: Desk, choose: random.Random) -> None:
        self.system = SimpleNamespace(now_s=lambda: self.now_s)
        self.now_s = 0.0
        self.ready, self.generation = True, 1
        self.is_prompt = False
        self.questions: list[tuple[Pending, Message]] = []
        self.asked = 0
        self._desk, self._choose = desk, choose

    def submit(self, message: Message, timeout_s: float, _on_late: Any = None) -> Pending:
        self.asked += 1
        self.questions.append((Pending(self.now_s + timeout_s), message))
        return self.questions[-1][0]

    def poll(self) -> None:
        while self.questions and (self.is_prompt or self._choose.random() < 0.6):
            pending, message = self.questions.pop(0)
            if not self.is_prompt and self._choose.random() < 0.1:
                pending._fail("too late")
                if self._choose.random() < 0.5:
                    continue
            reply = self._desk.ask(SCHEDULER, message)
            assert reply is not None
            pending._finish(reply)

    def restart(self) -> None:
        """The connection is lost and comes back; the server has another session for this client."""
        for pending, _ in self.questions:
            pending._fail("lost")
        self.questions.clear()
        self.generation += 1


class Router:
    """Holds the blocks that it is told of, and accepts no event that makes no sense."""

    def __init__(self, group_id: int) -> None:
        self.group_id = group_id
        self.held: dict[Any, tuple[int, ...]] = {}

    def apply(self, told: Sequence[KVCacheEvent]) -> None:
        for event in told:
            assert isinstance(event, (BlockStored, BlockRemoved))
            assert event.medium == MEDIUM_CPU
            assert event.group_idx == self.group_id
            if isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.held[block]
                continue
            assert event.parent_block_hash is None or event.parent_block_hash in self.held
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            for index, block in enumerate(event.block_hashes):
                assert block not in self.held, "nothing is told twice"
                self.held[block] = tuple(event.token_ids[index * BLOCK : (index + 1) * BLOCK])


def told(tracked: Tracked) -> list[Any]:
    """The request's block hashes as events have them."""
    return [maybe_convert_block_hash(each) for each in tracked.request.block_hashes]


class World:
    """An engine of `ranks` workers, its events, a router, and another engine that needs room."""

    def __init__(self, desk: Desk, seed: int, kind: int, ranks: int, lookahead: int = 0) -> None:
        self.choose = random.Random(seed)
        self.desk, self.ranks, self.groups = desk, ranks, geometry(kind).groups
        self.lookahead = lookahead
        tag = ModelTag("model", (("a", "b"),), ranks, 1)
        for rank in range(ranks):
            assert isinstance(desk.hello(rank), messages.Welcome)
            desk.ask(rank, messages.Register("engine", rank, tag, geometry(kind), desk.memory_of(rank)))
            assert isinstance(desk.ask(rank, messages.Prove()), messages.Registered)
        self.join()
        kinds = [each.kind for each in self.groups]
        first = next((index for index, each in enumerate(self.groups) if each.kind == FULL), 0)
        # vLLM has another group before these in every second world.
        ids = range(seed % 2, seed % 2 + len(kinds))
        self.wire, self.router = Wire(desk, self.choose), Router(ids[first])
        client = Servers([self.wire], "engine")  # type: ignore[list-item]
        self.events = Events(Engine(Settings(), self.groups, ids, client, True, SYSTEM), kinds)
        self.pool = SimpleNamespace(hash_block_size=BLOCK, reset_prefix_cache=lambda: True)
        self.events.bind(self.pool)  # type: ignore[arg-type]
        self.prompts = list(self._prompts())

    def join(self) -> None:
        assert isinstance(self.desk.hello(SCHEDULER), messages.Welcome)
        assert isinstance(self.desk.ask(SCHEDULER, messages.Join("engine")), messages.Joined)

    def _prompts(self) -> Iterator[Tracked]:
        """Seven prompts; most part from one before them."""
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK, sha256)
        lines: list[list[int]] = [[]]
        for number in range(7):
            fork = self.choose.choice(lines)
            kept = fork[: CHUNK_SIZE * self.choose.randrange(1 + len(fork) // CHUNK_SIZE)]
            own = CHUNK_SIZE * self.choose.randrange(1, 4) + 1
            lines.append([*kept, *(1 + (number * 7919 + at) % 30_000 for at in range(own))])
            request = Request(f"r{number}", lines[-1], SamplingParams(), None, block_hasher=hasher)
            tracked = Tracked(request, lookahead=self.lookahead, generation=1, chunk_size=CHUNK_SIZE)
            tracked.keys_of(tracked.chunks(len(lines[-1])))
            yield tracked

    def step(self) -> None:
        """One thing happens, and a few steps of the engine."""
        tracked = self.choose.choice(self.prompts)
        acts = (self.store, self.look_up, self.strange, self.clear, self.lose, self.reset)
        self.choose.choices(acts, (18, 12, 4, 2, 2, 1))[0](tracked)
        for _ in range(self.choose.randrange(3)):
            self.wire.now_s += self.choose.random()
            self.router.apply(self.events.take_events())

    def store(self, tracked: Tracked) -> None:
        """The request has been computed up to some chunk; not every rank may succeed."""
        end, objects = self.choose.randrange(1, 1 + len(tracked.keys)), []
        for chunk in range(end):
            for index, group in enumerate(self.groups):
                count = len(group.stored_blocks(chunk, CHUNK_SIZE))
                if group.kind == FULL or chunk == end - 1:
                    ids = tuple(1 + at % PAGES for at in range(count))
                    objects.append(chunk_object(tracked.keys, chunk, index, ids))
        for rank in range(self.ranks):
            self.desk.ask(rank, Store(tuple(objects)))
            fails = self.choose.random() < 0.05
            self.desk.end_copies(CopyError("no") if fails else None)
            if self.choose.random() < 0.3:
                self.router.apply(self.events.take_events())
        self.events.settled([tracked] * len(objects), 0.0)

    def look_up(self, tracked: Tracked) -> None:
        keys = tuple(tracked.keys)
        limit = len(keys) * CHUNK_SIZE
        found = self.desk.ask(SCHEDULER, Lookup("r", keys, 0, limit, limit + 1))
        assert isinstance(found, Found)
        leases = (found.lease_id,) if found.lease_id else ()
        self.desk.ask(SCHEDULER, Release(leases, keys, "r"))
        self.events.changed(tracked)

    def strange(self, _tracked: Tracked) -> None:
        """Another engine stores so much that L1 has no room for most of this one's chunks."""
        self.desk.join(STRANGER, f"model {self.choose.random()}")
        count = self.choose.randrange(4, 24)
        self.desk.ask(STRANGER, store(*(self.choose.getrandbits(200) for _ in range(count))))
        self.desk.end_copies()
        self.desk.leave(STRANGER)

    def clear(self, _tracked: Tracked) -> None:
        self.desk.ask(0, Clear(everything=True))

    def lose(self, _tracked: Tracked) -> None:
        self.desk.leave(SCHEDULER)
        self.join()
        self.wire.restart()

    def reset(self, _tracked: Tracked) -> None:
        """vLLM forgets its own cache, and says so to routers before the connector says anything else."""
        self.pool.reset_prefix_cache()
        self.router.held.clear()

    def settle(self) -> None:
        """The engine goes on for a while, and nothing is late any more."""
        self.wire.is_prompt = True
        for seconds in (POLL_S, POLL_S, POLL_S, 0.0):
            self.wire.now_s += seconds
            self.router.apply(self.events.take_events())
        self.wire.is_prompt = False

    def findable(self) -> set[Any]:
        """The blocks of all prompts that lookups would find now."""
        found: set[Any] = set()
        for tracked in self.prompts:
            limit = len(tracked.keys) * CHUNK_SIZE
            reply = self.desk.ask(SCHEDULER, Inspect("engine", tuple(tracked.keys), limit))
            assert isinstance(reply, Inspected)
            found.update(told(tracked)[: reply.resume_tokens // BLOCK])
        return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("kind", "ranks", "lookahead"), [(0, 1, 0), (0, 2, 0), (1, 1, 0), (0, 1, 1)])
def test_a_router_holds_what_lookups_would_find(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, seed: int, kind: int, ranks: int, lookahead: int
) -> None:
    """With a lookahead, prompts that part at the end of a chunk have two keys for the same blocks."""
    monkeypatch.setattr(kv_events, "MAX_GONE", 6)
    world = World(desk, seed, kind, ranks, lookahead)
    most = 0
    for _ in range(STEPS):
        world.step()
        if world.choose.random() < 0.5:
            world.settle()
            assert world.router.held.keys() <= world.findable()
            most = max(most, len(world.router.held))
    assert most > 0, "the router never heard of anything"
    for tracked in world.prompts:
        world.look_up(tracked)
    world.settle()
    assert world.router.held.keys() == world.findable()
    for tracked in world.prompts:
        for index, block in enumerate(told(tracked)):
            if block in world.router.held:
                own = tracked.request.all_token_ids[index * BLOCK : (index + 1) * BLOCK]
                assert world.router.held[block] == tuple(own)


def test_what_is_stored_last_is_told_without_being_asked_for(desk: Desk) -> None:
    """An idle engine has told everything of a chain that nobody has looked up."""
    world = World(desk, 1, 0, 1)
    tracked = max(world.prompts, key=lambda each: len(each.keys))
    world.choose.randrange = lambda first, end=8: end - 1  # type: ignore[method-assign,assignment]
    world.choose.random = lambda: 0.5  # type: ignore[method-assign]
    world.store(tracked)
    world.settle()
    assert not world.events.has_work()
    assert world.router.held.keys() == world.findable() != set()


def test_an_engine_without_kv_events_asks_and_keeps_nothing(desk: Desk) -> None:
    world = World(desk, 2, 0, 1)
    world.events._is_on = False
    for tracked in world.prompts:
        world.store(tracked)
        world.look_up(tracked)
        assert not world.events.take_events()
    assert not world.events.has_work()
    assert not world.wire.asked
