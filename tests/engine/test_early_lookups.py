"""The scheduler side of the connector and a real server: requests are looked up when they arrive.

No vLLM runs here. The requests and the block pool are vLLM's own.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness.rawclient import RawEngine, group, start_all
from harness.served import step_output, stopped
from harness.server import LMCacheServer, server_of_a_file
from harness.waiting import PATIENCE_S, wait_until
from vllm import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from lmcache_client.connector.early_lookups import EARLY_LOOKUPS, FRESH_S
from lmcache_client.connector.lookups import FRESH_LOOKUP_S, LOOKUP_WAIT_S
from lmcache_client.connector.offers import Offers
from lmcache_client.connector.request import Asking
from lmcache_client.connector.scheduler import SchedulerSide
from lmcache_client.connector.settings import Settings
from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_client.contract.messages import BAD_REQUEST, MAX_EARLY_CHUNKS, Lookup
from lmcache_client.engine import chunk_object
from lmcache_client.options.handover import Handover
from lmcache_client.server_channel import RefusedError

CHUNK = 16
CHUNKS = 4
TOKENS = CHUNKS * CHUNK + 1
"""Of a prompt. All but the last one can be loaded."""


class Engine:
    """The scheduler side, called as vLLM calls it, of an engine whose worker stores what a test says."""

    def __init__(self, server: LMCacheServer) -> None:
        self.server = server
        self.worker = RawEngine(server.address, [group()])
        start_all([self.worker.worker])
        self.side = SchedulerSide(
            Settings(port=server.port, lookup_timeout_s=600.0),
            "engine",
            Offers((GroupSpec(FULL, CHUNK, 0, "", ()),)),
            1,
            loads=True,
            stores=True,
            wanted={"handover": True, "hints": True},
        )
        self.pool = BlockPool(64, enable_caching=False, hash_block_size=CHUNK)
        self.side.bind(self.pool)
        self.side.start()
        wait_until(lambda: self.side.channel.ready, what="the scheduler has joined")
        self.now_s = 1000.0
        """Of a clock that only the tests set forward."""
        self.side._now_s = self.side.lookups._now_s = lambda: self.now_s
        for option in self.side.options:
            if isinstance(option, Handover):
                option._now_s = self.side._now_s
        self._requests = 0

    def close(self) -> None:
        self.side.channel.close(0.0)
        self.worker.close()

    def arrives(self, seed: int, **transfer: object) -> Request:
        self._requests += 1
        prompt = list(range(seed * TOKENS, (seed + 1) * TOKENS))
        params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": transfer})
        request = Request(f"request {self._requests}", prompt, params, None)
        self.side.new_request(request)
        return request

    def wait_for_answers(self) -> None:
        states = [tracked.state for tracked in self.side.lookups.requests.values()]
        lookups = [state.lookup for state in states if isinstance(state, Asking)]

        def all_done() -> bool:
            self.side.channel.poll()
            return all(lookup.advance() for lookup in lookups)

        wait_until(all_done, PATIENCE_S)

    def offered(self, request: Request, computed: int = 0) -> int:
        """What vLLM is offered beyond its own tokens, asked in as many steps as it takes."""
        offers: list[int] = []

        def is_offered() -> bool:
            tokens, _ = self.side.matched_tokens(request, computed)
            offers.extend([] if tokens is None else [tokens])
            return bool(offers)

        wait_until(is_offered, PATIENCE_S)
        return offers[0]

    def admit(self, request: Request, external: int) -> None:
        """The request has blocks, and a step follows."""
        tables = ([block.block_id for block in self.pool.get_new_blocks(CHUNKS)],)
        blocks: Any = SimpleNamespace(get_block_ids=lambda: tables)
        self.side.allocated(request, blocks, external)
        self.step()

    def step(self) -> None:
        self.side.step(step_output({"another": 1}, new=[("another", 0)]))

    def end(self, *requests: Request) -> None:
        for request in requests:
            self.side.finished(request)

    def store(self, seed: int, first: int = 0) -> None:
        """Stores the prompt's chunks from number `first` on, without a lookup."""
        request = self.arrives(seed)
        keys = self.side.lookups.requests[request.request_id].keys_of(CHUNKS)
        self.end(request)
        self.worker.store([chunk_object(keys, chunk, 0, (chunk + 1,)) for chunk in range(first, CHUNKS)])

    def tokens(self) -> tuple[int, int, int]:
        """What the server has counted: tokens that the engine held, hits and misses."""
        return (self.server.tokens("computed"), self.server.tokens("hit"), self.server.tokens("miss"))

    def wait_until_counted(self, before: tuple[int, ...], *more: int) -> None:
        wait_until(lambda: [a - b for a, b in zip(self.tokens(), before, strict=True)] == [*more], PATIENCE_S)

    def lookups(self) -> int:
        return int(self.server.metrics()['lmcache_requests_total{op="lookup",outcome="ok"}'])


server = server_of_a_file(l1_size_gb=0.05, chunk_size=CHUNK)


@pytest.fixture
def engine(server: LMCacheServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", server.runtime_dir)
    server.clear()
    engine = Engine(server)
    yield engine
    engine.close()
    server.wait_at_rest(timeout_s=PATIENCE_S)


def test_requests_that_arrive_together_have_their_answers_when_vllm_asks(engine: Engine) -> None:
    for seed in range(4):
        engine.store(seed)
    requests = [engine.arrives(seed) for seed in range(8)]
    engine.wait_for_answers()
    with stopped(engine.server.pid):
        answers = [engine.side.matched_tokens(request, 0) for request in requests]
    assert answers == [(CHUNKS * CHUNK, True)] * 4 + [(0, False)] * 4
    engine.end(*requests)


def test_the_server_counts_what_is_loaded_beyond_the_engines_own_tokens(engine: Engine) -> None:
    engine.store(1)
    before = engine.tokens()
    hit, miss, gone = engine.arrives(1), engine.arrives(2), engine.arrives(1)
    engine.wait_for_answers()
    assert engine.offered(hit, 2 * CHUNK) == 2 * CHUNK
    assert engine.offered(miss, CHUNK) == 0
    assert engine.tokens() == before, "counted before anybody knew whether the answer is used"
    engine.admit(hit, 2 * CHUNK)
    engine.wait_until_counted(before, 3 * CHUNK, 2 * CHUNK, 3 * CHUNK)
    engine.end(hit, miss, gone)
    engine.step()
    engine.server.wait_until(lambda counts: not counts["leases"])
    # A request that vLLM never asked about is not counted.
    engine.wait_until_counted(before, 3 * CHUNK, 2 * CHUNK, 3 * CHUNK)

    # Chunks that only the engine has do not hide what the server has behind them.
    engine.store(3, first=1)
    before = engine.tokens()
    request = engine.arrives(3)
    engine.wait_for_answers()
    assert engine.offered(request, CHUNK) == 3 * CHUNK
    engine.admit(request, 3 * CHUNK)
    engine.wait_until_counted(before, CHUNK, 3 * CHUNK, 0)
    engine.end(request)


def test_an_engine_that_has_a_prompt_itself_holds_no_lease_for_it(engine: Engine) -> None:
    engine.store(1)
    before = engine.tokens()
    request = engine.arrives(1)
    engine.wait_for_answers()
    engine.server.wait_until(lambda counts: counts["leases"] == 1)
    assert engine.offered(request, CHUNKS * CHUNK) == 0
    engine.server.wait_until(lambda counts: counts["leases"] == 0)
    engine.end(request)
    # It ended a moment ago, so its next turn is not looked up early.
    looked_up = engine.lookups()
    engine.end(engine.arrives(1))
    engine.step()
    assert engine.lookups() == looked_up
    assert engine.tokens() == before


def test_an_engine_that_loses_tokens_while_it_waits_for_the_answer_asks_again(engine: Engine) -> None:
    """The lease of the first answer does not cover what it has lost."""
    engine.store(1)
    earlier = engine.arrives(1)
    engine.wait_for_answers()
    assert engine.offered(earlier, CHUNKS * CHUNK) == 0
    engine.end(earlier)
    request, looked_up = engine.arrives(1), engine.lookups()
    with stopped(engine.server.pid):
        assert engine.side.matched_tokens(request, 2 * CHUNK) == (None, False)
    assert engine.offered(request, 0) == CHUNKS * CHUNK
    assert engine.lookups() == looked_up + 2
    engine.end(request)


def test_an_early_answer_is_not_used_when_it_is_old_or_of_before_a_reset(engine: Engine) -> None:
    old = engine.arrives(1)
    engine.wait_for_answers()
    engine.store(1)
    engine.now_s += FRESH_S + 0.1
    assert engine.offered(old) == CHUNKS * CHUNK
    reset = engine.arrives(1)
    engine.wait_for_answers()
    engine.side.reset()
    assert engine.offered(reset) == 0
    engine.end(old, reset)


def test_requests_that_queue_are_looked_up_when_it_is_their_turn(engine: Engine) -> None:
    before = engine.lookups()
    first = [engine.arrives(seed) for seed in range(EARLY_LOOKUPS + 5)]
    engine.wait_for_answers()
    assert engine.lookups() == before + EARLY_LOOKUPS, "so many early and no more"
    engine.step()
    # vLLM has asked about none of them, so a further one would queue, too.
    second = engine.arrives(100)
    engine.wait_for_answers()
    assert engine.lookups() == before + EARLY_LOOKUPS
    assert {engine.offered(request) for request in (*first, second)} == {0}
    assert engine.lookups() == before + len(first) + 1
    engine.step()
    third = engine.arrives(101)
    engine.wait_for_answers()
    assert engine.lookups() == before + len(first) + 2
    engine.end(*first, second, third)


def test_no_step_waits_twice_for_a_server_or_at_all_for_a_tier(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    poll = engine.side.channel.poll

    def watched(pending: Any = None, wait_s: float = 0.0) -> None:
        waits.append(wait_s)
        poll(pending, wait_s)

    def asked(*requests: Request) -> list[float]:
        """How long the scheduler side is ready to wait at its channel, request by request, in one step."""
        waits.clear()
        assert {engine.side.matched_tokens(request, 0) for request in requests} == {(None, False)}
        answer = [*waits]
        engine.step()
        return answer

    with stopped(engine.server.pid):
        requests = [engine.arrives(seed) for seed in range(8)]
        monkeypatch.setattr(engine.side.channel, "poll", watched)
        for _ in range(2):
            assert [wait_s for wait_s in asked(*requests) if wait_s] == [LOOKUP_WAIT_S]
        # These lookups seem to wait for a tier now, and hold up neither the step nor the next lookup.
        monkeypatch.setattr(engine.side.lookups, "_fetches", True)
        engine.now_s += FRESH_LOOKUP_S + 0.001
        requests.append(engine.arrives(8))
        assert asked(*requests) == [0.0] * 8 + [LOOKUP_WAIT_S]
    assert [engine.offered(request) for request in requests] == [0] * 9
    engine.end(*requests)


def test_an_early_lookup_has_few_keys(engine: Engine) -> None:
    chunks = MAX_EARLY_CHUNKS + 1
    keys = tuple(number.to_bytes(32, "big") for number in range(chunks))
    question = Lookup("r", keys, 0, chunks * CHUNK, chunks * CHUNK + 1, early=True)
    with pytest.raises(RefusedError, match="too many keys") as refused:
        engine.side.client.channels[0].call(question, PATIENCE_S)
    assert refused.value.code == BAD_REQUEST


def test_a_request_that_waits_is_counted_once(engine: Engine) -> None:
    before, looked_up = engine.tokens(), engine.lookups()
    request = engine.arrives(1, **{"lmcache.wait_tokens": 10**6})
    for _ in range(4):
        engine.wait_for_answers()
        assert engine.side.matched_tokens(request, 0) == (None, False)
        answered = engine.lookups()
        assert engine.side.matched_tokens(request, 0) == (None, False)
        assert engine.lookups() == answered, "it asks again too soon"
        engine.now_s += 2.0
        assert engine.side.matched_tokens(request, 0) == (None, False)
    assert engine.lookups() > looked_up + 3
    # The last answer may have come too late for that call. Its pause begins when the request hears of it.
    engine.wait_for_answers()
    assert engine.side.matched_tokens(request, 0) == (None, False)
    engine.store(1)
    engine.now_s += 2.0
    assert engine.offered(request) == CHUNKS * CHUNK
    assert engine.tokens() == before
    engine.admit(request, CHUNKS * CHUNK)
    engine.wait_until_counted(before, 0, CHUNKS * CHUNK, 0)
    engine.end(request)


def test_a_miss_that_waits_for_blocks_is_not_asked_again_in_every_step(engine: Engine) -> None:
    """vLLM asks about the first request in its queue in each step, and then has no room for it."""
    engine.store(1, first=2)
    before = engine.tokens()
    request = engine.arrives(1)
    engine.wait_for_answers()
    looked_up = engine.lookups()
    for _ in range(5):
        assert engine.offered(request, CHUNK) == 0
        engine.step()
    engine.wait_until_counted(before, CHUNK, 0, 3 * CHUNK)
    assert engine.lookups() == looked_up
    engine.server.wait_until(lambda counts: counts["leases"] == 0)
    # If vLLM has evicted what it had, there may be a hit after all.
    assert engine.offered(request, 0) == 0
    assert engine.lookups() == looked_up + 1
    engine.store(1)
    engine.now_s += FRESH_S + 0.1
    assert engine.offered(request) == CHUNKS * CHUNK
    engine.admit(request, CHUNKS * CHUNK)
    engine.end(request)


def test_a_wait_in_vain_shortens_the_next_ones(engine: Engine) -> None:
    engine.store(9)

    def waited_s(seed: int) -> float:
        """How long a request waits that is told of more than its prompt has."""
        request = engine.arrives(seed, **{"lmcache.wait_tokens": 10**6})
        began_s = engine.now_s
        while engine.side.matched_tokens(request, 0)[0] is None:
            engine.wait_for_answers()
            engine.now_s += 0.05
        engine.end(request)
        return engine.now_s - began_s

    assert waited_s(1) == pytest.approx(10.0, abs=0.3)
    assert waited_s(2) == pytest.approx(1.0, abs=0.3)
    assert waited_s(9) < 0.3, "the server has all of it"
    assert waited_s(3) == pytest.approx(10.0, abs=0.3)
    engine.now_s += 31.0
    assert waited_s(4) == pytest.approx(10.0, abs=0.3)


def test_only_one_of_several_connectors_answers_and_waits(engine: Engine) -> None:
    hint = {"lmcache.wait_tokens": 10**6}
    request = engine.arrives(1, **hint)
    engine.side.new_request(request)
    assert engine.offered(request) == 0, "the first one has taken the hint"
    nixl = engine.arrives(2, do_remote_prefill=True, **hint)
    assert engine.offered(nixl) == 0
    prefill = engine.arrives(3, do_remote_decode=True)
    assert engine.side.finished(prefill) == {"lmcache.wait_tokens": 0}, "nothing was stored"
    assert engine.side.finished(prefill) is None
    for params in ({}, {"do_remote_decode": 1}, {"do_remote_decode": False}):
        assert engine.side.finished(engine.arrives(4, **params)) is None
    engine.end(request, nixl)


def test_a_store_that_a_reset_overtakes_is_no_request_s_any_more(engine: Engine) -> None:
    """Otherwise it would be announced under keys that no lookup asks for."""
    engine.arrives(1)
    (tracked,) = engine.side.lookups.requests.values()
    job_id = engine.side.held.hold([1, 2], [tracked])
    engine.side.reset()
    settled = engine.side.held.settled(job_id, 1)
    assert settled is not None
    assert (settled.blocks, settled.requests) == ([1, 2], ())
