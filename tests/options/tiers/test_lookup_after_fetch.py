"""A lookup that waits for a tier keeps nothing when its answer is refused."""

from typing import Any

import pytest
from desk import Desk, identity, is_refused

from lmcache_client.contract import messages
from lmcache_client.contract.messages import Lookup, Message
from lmcache_server.core.cache import Reservation
from lmcache_server.core.layout import Layout
from lmcache_server.options.tiers.server import Server

KEYS = (b"a" * 32, b"b" * 32)


def looked_up(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, layout: Layout | None, fetch: Any
) -> Message | None:
    """What client 1 hears of these keys, for which `fetch` asks the tiers."""
    assert layout is not None
    (tiers,) = (each for each in desk.target.router.options if isinstance(each, Server))
    monkeypatch.setattr(tiers, "may_fetch", lambda _layout: True)
    monkeypatch.setattr(tiers, "fetch", fetch)
    limit = 2 * layout.chunk_size
    return desk.ask(1, Lookup("request", KEYS, 0, limit, limit + 1))


def test_a_refused_lookup_holds_no_lease(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease on what L1 has lasts while the tiers are asked. Meanwhile the engine may register again."""
    desk.join(1)
    target, registry = desk.target, desk.target.router.registry
    (session,), layout = registry.sessions.values(), registry.layout("engine 1")
    assert layout is not None
    for group, ranks in enumerate(layout.holders):
        for rank in ranks:
            blocks = len(layout.groups[group].stored_blocks(0, layout.chunk_size))
            room = target.cache.reserve(layout, KEYS[0], group, rank, blocks, 1)
            assert isinstance(room, Reservation)
            target.cache.commit(room)
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
        seen.append((router.registry.layout("engine 1"), sorted(shards)))
        return 0

    layout, receive = router.registry.layout("engine 1"), router.receive

    def receive_and_lose(who: bytes, frame: bytes) -> None:
        receive(who, frame)
        router.disconnected(identity(1))

    monkeypatch.setattr(router, "receive", receive_and_lose)
    looked_up(desk, monkeypatch, layout, fetch)
    assert seen == [(None, [0])]
