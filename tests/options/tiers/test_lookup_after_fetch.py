"""A lookup that waited for a tier: what of its hit is the tier's, and what stays when it is refused."""

from typing import Any

import pytest
from desk import Desk, identity, is_refused

from lmcache_client.contract import messages
from lmcache_client.contract.messages import Found, Lookup, Message
from lmcache_server.core.cache import Reservation
from lmcache_server.core.layout import Layout
from lmcache_server.options.tiers.server import Server
from lmcache_server.service.requests_of_tests import VERIFY

KEYS = (b"a" * 32, b"b" * 32)
SPEED = 1000
"""Of the engine, in tokens per second."""


def looked_up(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
    layout: Layout | None,
    fetch: Any,
    early: bool = False,
    request: str = "request",
) -> Message | None:
    """What client 1 hears of these keys, for which `fetch` asks the tiers."""
    assert layout is not None
    (tiers,) = (each for each in desk.target.router.options if isinstance(each, Server))
    monkeypatch.setattr(tiers, "may_fetch", lambda _layout: True)
    monkeypatch.setattr(tiers, "fetch", fetch)
    limit = 2 * layout.chunk_size
    return desk.ask(1, Lookup(request, KEYS, 0, limit, limit + 1, SPEED, early))


def bring(desk: Desk, layout: Layout, number: int) -> None:
    """Puts a chunk into L1."""
    cache, parent = desk.target.cache, KEYS[number - 1] if number else b""
    for group, ranks in enumerate(layout.holders):
        for rank in ranks:
            blocks = len(layout.groups[group].stored_blocks(number, layout.chunk_size))
            room = cache.reserve(layout, KEYS[number], group, rank, blocks, 1, parent)
            assert isinstance(room, Reservation)
            cache.commit(room)


@pytest.mark.parametrize("computed", [None, 0, 1, 2])
def test_tokens_that_tiers_brought_are_counted_apart_from_those_of_l1(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, computed: int | None
) -> None:
    """L1 has the first chunk, and a tier brings the second. With `computed`, the engine asks early, and then
    accepts and holds so many chunks itself."""
    desk.join(1)
    layout, value = desk.target.router.sessions.layout("engine 1"), desk.target.metrics.value
    assert layout is not None
    size = layout.chunk_size
    bring(desk, layout, 0)

    async def fetch(*_arguments: Any) -> int:
        bring(desk, layout, 1)
        return 2 * size

    def counted() -> tuple[float, float, float]:
        """In chunks: hits, those of them that tiers brought, and how long the latter take to compute."""
        hits = value("lmcache_tokens_total", outcome="hit"), value("lmcache_tier_hit_tokens_total")
        return hits[0] / size, hits[1] / size, value("lmcache_tier_saved_seconds_total") * SPEED / size

    found = looked_up(desk, monkeypatch, layout, fetch, early=computed is not None)
    assert isinstance(found, Found)
    assert (found.l1_tokens, found.resume_tokens) == (size, 2 * size)
    if computed is not None:
        assert counted() == (0, 0, 0)
        desk.ask(1, messages.Accept((("request", computed * size),)))
        fetched = min(2 - computed, 1)
        assert counted() == (2 - computed, fetched, fetched)
        return
    assert counted() == (2, 1, 1)
    looked_up(desk, monkeypatch, layout, fetch)
    assert counted() == (4, 1, 1), "now L1 has all"


def test_what_tiers_brought_for_a_test_is_not_counted(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.join(1)
    layout = desk.target.router.sessions.layout("engine 1")
    assert layout is not None

    async def fetch(*_arguments: Any) -> int:
        bring(desk, layout, 0)
        return layout.chunk_size

    found = looked_up(desk, monkeypatch, layout, fetch, request=f"{VERIFY}1")
    assert isinstance(found, Found)
    assert (found.l1_tokens, found.resume_tokens) == (0, layout.chunk_size)
    assert not desk.target.metrics.value("lmcache_tier_hit_tokens_total")


def test_a_refused_lookup_holds_no_lease(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease on what L1 has lasts while the tiers are asked. Meanwhile the engine may register again."""
    desk.join(1)
    target, sessions = desk.target, desk.target.router.sessions
    (session,), layout = sessions.by_identity.values(), sessions.layout("engine 1")
    assert layout is not None
    bring(desk, layout, 0)
    leases = []

    async def fetch(*_arguments: Any) -> int:
        leases.append(target.cache.num_leases)
        session.joined_namespace = b""
        return 0

    answer = looked_up(desk, monkeypatch, layout, fetch)
    assert is_refused(answer, messages.NOT_REGISTERED)
    assert (leases, target.cache.num_leases) == ([1], 0)


def test_an_engine_that_ends_at_once_is_fetched_for_by_the_shards_it_had(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch sizes objects by the engine's shards, and begins a turn of the loop after its lookup came."""
    desk.join(1)
    router, seen = desk.target.router, []

    async def fetch(_layout: Any, shards: Any, *_arguments: Any) -> int:
        seen.append((router.sessions.layout("engine 1"), sorted(shards)))
        return 0

    layout, receive = router.sessions.layout("engine 1"), router.receive

    def receive_and_lose(who: bytes, frame: bytes) -> None:
        receive(who, frame)
        router.disconnected(identity(1))

    monkeypatch.setattr(router, "receive", receive_and_lose)
    looked_up(desk, monkeypatch, layout, fetch)
    assert seen == [(None, [0])]
