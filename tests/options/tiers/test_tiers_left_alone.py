"""Tiers that were left alone, and how the server finds out that they are well again."""

import asyncio
from collections.abc import Sequence

import pytest
from tier_rig import Rig, with_rig

from lmcache_server.options.tiers import tier_states as tiers_module


@with_rig(1)
async def test_a_try_that_hangs_is_not_the_last(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "STUCK_S", 0.05)
    calls = []

    def first_call_hangs(names: Sequence[str]) -> Sequence[bool]:
        calls.append(names)
        if len(calls) == 1:
            rig.store.opened.wait()
        return [False] * len(names)

    rig.store.present = first_call_hangs
    breaker = rig.tier.breaker
    breaker.open(rig.system.now_s())
    while breaker.is_open:
        breaker._retry_s = 0.0  # nobody waits for the next try
        rig.tiers.tick()
        await asyncio.sleep(0.02)
    assert len(calls) > 1
