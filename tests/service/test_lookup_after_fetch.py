"""A lookup that waits for a tier keeps nothing when its answer is refused."""

from typing import Any

import pytest
from desk import Desk

from lmcache_client.contract import messages
from lmcache_client.contract.messages import Lookup, Refused
from lmcache_server.core.cache import Reservation


def test_a_refused_lookup_holds_no_lease(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease on what L1 has lasts while the tiers are asked. Meanwhile the engine may register again."""
    desk.join(1)
    target, registry = desk.target, desk.target.router.registry
    (session,), layout = registry.sessions.values(), registry.layout("engine 1")
    assert layout is not None
    keys, size = (b"a" * 32, b"b" * 32), layout.chunk_size
    for group, ranks in enumerate(layout.holders):
        for rank in ranks:
            blocks = len(layout.groups[group].stored_blocks(0, size))
            room = target.cache.reserve(layout, keys[0], group, rank, blocks, 1)
            assert isinstance(room, Reservation)
            target.cache.commit(room)
    leases = []

    async def fetch(*_arguments: Any) -> None:
        leases.append(target.cache.num_leases)
        session.joined_namespace = b""

    fetches = target.router.lookups._fetches
    monkeypatch.setattr(fetches, "usable", lambda _layout: [None])
    monkeypatch.setattr(fetches, "fetch", fetch)
    answer = desk.ask(1, Lookup("request", keys, 0, 2 * size, 2 * size + 1))
    assert isinstance(answer, Refused)
    assert answer.code == messages.NOT_REGISTERED
    assert (leases, target.cache.num_leases) == ([1], 0)


def test_an_engine_that_ends_at_once_is_fetched_for_by_the_shards_it_had(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch sizes objects by the engine's shards, and begins a turn of the loop after its lookup came."""
    desk.join(1)
    router, seen = desk.target.router, []
    layout = router.registry.layout("engine 1")
    assert layout is not None

    async def fetch(_layout: Any, shards: Any, *_arguments: Any) -> int:
        seen.append((router.registry.layout("engine 1"), sorted(shards)))
        return 0

    monkeypatch.setattr(router.lookups._fetches, "usable", lambda _layout: [None])
    monkeypatch.setattr(router.lookups._fetches, "fetch", fetch)
    receive, identity = router.receive, (1).to_bytes(4, "big")

    def receive_and_lose(who: bytes, frame: bytes) -> None:
        receive(who, frame)
        router.disconnected(identity)

    monkeypatch.setattr(router, "receive", receive_and_lose)
    size = layout.chunk_size
    desk.ask(1, Lookup("request", (b"a" * 32, b"b" * 32), 0, 2 * size, 2 * size + 1))
    assert seen == [(None, [0])]
