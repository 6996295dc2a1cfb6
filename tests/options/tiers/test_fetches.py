"""What is fetched from a tier, and when. A tier whose speed is unknown is tried by one fetch at a time, and a
hung fetch is not the last; a tier that seemed slow is soon tried again."""

import asyncio
import ctypes
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from tier_rig import GROUP, HANGS, LAYOUT, Rig, Store, key, with_rig

from lmcache_client.contract.geometry import RECURRENT, Geometry, GroupSpec, Region
from lmcache_client.contract.messages import Lookup
from lmcache_server.core.cache import Layout, Reservation
from lmcache_server.core.packed import NO_OBJECTS, StoredObject
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.options.tiers import fetch_choice as choice_module
from lmcache_server.options.tiers import fetches as fetches_module
from lmcache_server.options.tiers import tier_states as tiers_module
from lmcache_server.options.tiers.fetch_choice import SLOW_OLD_S
from lmcache_server.options.tiers.record_format import Label, RecordCipher
from lmcache_server.options.tiers.tier_states import TierState
from lmcache_server.options.tiers.tier_worker import Rates, TierWorker
from lmcache_server.transfer.digest import digest

SHARDS: Any = {0: SimpleNamespace(geometry=Geometry((GROUP,), 10))}
FRAMES = 16


async def write(rig: Rig, *keys: bytes, bit: int = 0) -> None:
    """The tier has these chunks, of a namespace that is not known yet."""
    for each in keys:
        label = Label(LAYOUT.namespace, each, bit, 1, FRAME_BYTES)
        payload = rig.tiers.payload(((0, 1),), FRAME_BYTES)
        assert await rig.tier.worker.write(label, payload) == "written"


async def known(rig: Rig, *keys: bytes, bytes_per_s: int = 0) -> None:
    """The tier has these chunks, and has been seen to be so fast."""
    await write(rig, *keys)
    rig.known[LAYOUT.namespace] = {}
    if bytes_per_s:
        rig.tier.speed.add(bytes_per_s, 1.0, rig.system.now_s())


def has(rig: Rig, each: bytes) -> bool:
    return rig.cache.ready(LAYOUT, [each]) == [1]


async def fetched(rig: Rig, each: bytes) -> bool:
    """Whether a lookup has waited for the chunk, which takes an engine 16 ms."""
    await rig.fetches.fetch(LAYOUT, SHARDS, Lookup("", (each,), 0, 16, 17, 1000), 0)
    return has(rig, each)


def fetching(rig: Rig, keys: Sequence[bytes]) -> "asyncio.Task[int]":
    tokens = 16 * len(keys)
    message = Lookup("", tuple(keys), 0, tokens, tokens + 1, 1)
    return asyncio.create_task(rig.fetches.fetch(LAYOUT, SHARDS, message, 0))


async def reserved(rig: Rig, frames: int) -> None:
    """Waits until so many frames are reserved, and sees that they stay so."""
    while rig.cache.reserved_frames < frames:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert rig.cache.reserved_frames == frames


@with_rig(FRAMES)
async def test_one_read_that_hangs_does_not_end_all_fetches(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(rig, HANGS, key(2))
    assert not await fetched(rig, key(2)), "the engine that asked has ended meanwhile"
    await rig.all_ended()
    assert rig.cache.num_chunks == 0
    rig.known[LAYOUT.namespace] = {}
    assert not await fetched(rig, HANGS)
    assert await asyncio.to_thread(rig.store.hangs.wait, 60)
    monkeypatch.setattr(choice_module, "OLD_S", 1000.0)
    assert not await fetched(rig, key(2)), "the tier is being tried"
    monkeypatch.setattr(choice_module, "OLD_S", 0.2)
    while not await fetched(rig, key(2)):
        await asyncio.sleep(0.02)
    assert rig.cache.reserved_frames == 1, "what the read that hangs may still write to"
    rig.store.opened.set()
    await rig.all_ended()
    assert rig.cache.reserved_frames == 0


@with_rig(FRAMES, waits="read")
async def test_a_lookup_waits_no_longer_than_its_patience_and_what_comes_later_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the engine does not say how fast it computes, so that nobody knows what waiting saves."""
    monkeypatch.setattr(fetches_module, "fetch_patience_s", lambda _num_tokens: 0.1)
    await known(rig, key(2))
    await rig.fetches.fetch(LAYOUT, SHARDS, Lookup("", (key(2),), 0, 16, 17), 0)
    assert not has(rig, key(2))
    rig.store.opened.set()
    await rig.all_ended()
    assert has(rig, key(2)), "for the next request"


@with_rig(FRAMES)
async def test_the_record_of_a_damaged_page_is_not_read_while_the_tier_cannot_remove_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.known[LAYOUT.namespace] = {}
    rig.keep(2, 3)
    await rig.spills.flush()
    chunk = rig.cache.chunk(LAYOUT.namespace, key(2))
    assert chunk is not None

    def fails(_names: Sequence[str]) -> None:
        raise OSError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "remove", fails)
        rig.spills.forget(chunk)
        rig.cache.clear()
        while rig.tier.removing:
            await asyncio.sleep(0.01)
        assert len(rig.store.records) == 2
        for number in (2, 3):
            await fetching(rig, [key(number)])
            await rig.all_ended()
            assert has(rig, key(number)) is (number == 3)
    rig.spills.tick()
    while rig.tier.removing:
        await asyncio.sleep(0.01)
    assert (len(rig.store.records), rig.tier.damaged) == (1, set())
    rig.keep(2)
    await rig.spills.flush()
    rig.cache.clear()
    await fetching(rig, [key(2)])
    await rig.all_ended()
    assert has(rig, key(2)), "the next one's record is read"


@with_rig(FRAMES)
async def test_a_tier_that_seemed_slow_is_tried_again_by_a_fetch_that_nobody_waits_for(rig: Rig) -> None:
    """Its only measure may be of a moment in which the machine was busy."""
    await known(rig, key(2), bytes_per_s=10**3)
    assert not await fetched(rig, key(2))
    await rig.all_ended()
    assert not has(rig, key(2)), "it has just been seen to be slow"
    speed = rig.tier.speed
    speed.bytes_per_s = 0.0
    speed.add(10**3, 1.0, rig.system.now_s() - SLOW_OLD_S - 1)
    assert not await fetched(rig, key(2)), "nobody waits"
    await rig.all_ended()
    assert has(rig, key(2))
    assert speed.bytes_per_s > 2e3, "this fetch has told how fast it is now"


@with_rig(FRAMES, waits="read")
async def test_lookups_that_plan_at_the_same_time_fetch_a_quarter_of_l1_together(rig: Rig) -> None:
    """Their questions may be answered in one turn of a busy loop."""
    chains = [[key(number) for number in range(first, first + 4)] for first in (10, 20, 30)]
    await known(rig, *(each for chain in chains for each in chain), bytes_per_s=10**9)
    tasks = [fetching(rig, chain) for chain in chains]
    await asyncio.sleep(0)
    while rig.store.asked < len(tasks):
        time.sleep(0.01)  # the loop is busy while the tier answers
    await reserved(rig, FRAMES // 4)
    rig.store.opened.set()
    await asyncio.gather(*tasks)
    await rig.all_ended()


async def brings_what_can_be_resumed_within_three_frames(rig: Rig) -> None:
    """All of the chain would be too much: then its beginning, with the state that it ends with."""
    state = GroupSpec(RECURRENT, 16, 0, "", (Region(0, 0, FRAME_BYTES, FRAME_BYTES),))
    layout = Layout(LAYOUT.namespace, 16, (GROUP, state), ((0,), (0,)))
    shards: Any = {0: SimpleNamespace(geometry=Geometry(layout.groups, 10))}
    chain = [key(number) for number in range(10, 13)]
    await write(rig, *chain, bit=1)
    await known(rig, *chain, bytes_per_s=10**9)
    lookup = Lookup("", tuple(chain), 0, 48, 49, 1, tenant=b"t" * 16)
    await rig.fetches.fetch(layout, shards, lookup, 0)
    await rig.all_ended()
    assert rig.cache.lookup(layout, chain, 0, 48, 1, rig.system.now_s()).resume_tokens == 16


test_within_the_quota_of_its_salt = with_rig(FRAMES, quota_frames=3)(
    brings_what_can_be_resumed_within_three_frames
)
test_within_a_quarter_of_l1 = with_rig(4 * 3)(brings_what_can_be_resumed_within_three_frames)


@with_rig(FRAMES, waits="read")
async def test_a_fetch_that_waits_for_anothers_objects_is_not_taken_for_a_slow_tier(rig: Rig) -> None:
    """It brings one object itself, and ends when the other's have come."""
    chain = [key(number) for number in range(10, 14)]
    await known(rig, *chain, bytes_per_s=10**9)
    first = fetching(rig, chain[:3])
    await reserved(rig, 3)
    second = fetching(rig, chain)
    await reserved(rig, 4)  # what already comes does not count twice
    began_s = rig.system.now_s()
    rig.store.opened.set()
    await asyncio.gather(first, second)
    # Four objects in the time that has passed, not one.
    assert rig.tier.read_bytes == 4 * FRAME_BYTES
    least = 4 * FRAME_BYTES / (rig.system.now_s() - began_s + 0.2)
    assert rig.tier.speed.bytes_per_s > least / 2


@with_rig(FRAMES, cold=True)
async def test_what_a_tier_has_given_is_not_offered_to_it_again(rig: Rig) -> None:
    """Such a tier is offered all of L1 at a clean stop."""
    await known(rig, key(2))
    await fetching(rig, [key(2)])
    await rig.all_ended()
    assert has(rig, key(2))
    asked = rig.store.asked
    await rig.spills.flush()
    assert rig.store.asked == asked


@with_rig(1)
async def test_a_try_of_a_tier_that_was_left_alone_hangs_and_is_not_the_last(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@with_rig(FRAMES)
async def test_damage_that_one_tier_finds_at_a_write_takes_the_record_of_another_with_it(rig: Rig) -> None:
    """The other tier's record may be of the damaged bytes."""
    other = Store()
    worker = TierWorker("other", lambda: other, asyncio.get_running_loop(), Rates())
    rig.known[LAYOUT.namespace] = {}
    room = rig.cache.reserve(LAYOUT, key(1), 0, 0, 1, FRAME_BYTES)
    assert isinstance(room, Reservation)
    rig.cache.commit(room)
    rig.spills.stored(LAYOUT, [room])
    await rig.spills.flush()
    assert len(rig.store.records) == 1
    chunk = rig.cache.chunk(LAYOUT.namespace, key(1))
    assert chunk is not None
    chunk.packed = NO_OBJECTS.with_object(0, StoredObject(1, FRAME_BYTES, room.runs, b"another digest"))
    rig.tiers.all.append(TierState(1, "other", False, worker))  # type: ignore[attr-defined]
    rig.spills.stored(LAYOUT, [room])
    await rig.spills.flush()
    await rig.all_ended()
    assert (rig.store.records, other.records) == ({}, {})
    assert rig.metrics.value("lmcache_verify_failures_total") == 1
    worker.close(1.0)


CIPHERS = (None, RecordCipher(AESGCM(b"1" * 32), "one"))


@pytest.mark.parametrize("cipher", CIPHERS, ids=["plain", "encrypted"])
@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
@with_rig(FRAMES)
async def test_the_digest_of_an_object_goes_into_its_record_and_back(
    rig: Rig, caplog: pytest.LogCaptureFixture, cipher: RecordCipher | None, damaged: bool
) -> None:
    """With --checksums. What has changed in L1 is not written: a record would vouch for it."""
    rig.tier.worker.close(1.0)
    rig.tier.worker = TierWorker("tier", lambda: rig.store, asyncio.get_running_loop(), Rates(), cipher)
    rig.known[LAYOUT.namespace], rig.fetches._keeps_digests = {}, True
    room = rig.cache.reserve(LAYOUT, key(1), 0, 0, 1, FRAME_BYTES)
    assert isinstance(room, Reservation)
    payload = rig.tiers.payload(room.runs, FRAME_BYTES)
    ctypes.memset(payload[0][0], 7, FRAME_BYTES)
    rig.cache.commit(room, stored := digest(payload))
    if damaged:
        ctypes.memset(payload[0][0] + 5, 6, 1)
    rig.spills.stored(LAYOUT, [room])
    await rig.spills.flush()
    await rig.all_ended()
    assert bool(rig.store.records) != damaged
    if damaged:
        assert rig.cache.num_chunks == 0, "nobody loads it"
        assert rig.metrics.value("lmcache_verify_failures_total") == 1
        assert "is damaged and forgotten" in caplog.text
        return
    rig.cache.clear()
    ctypes.memset(payload[0][0], 0, FRAME_BYTES)
    rig.tier.speed.add(1 << 30, 1.0, rig.system.now_s())
    await fetched(rig, key(1))  # it may be late
    await rig.all_ended()
    chunk = rig.cache.chunk(LAYOUT.namespace, key(1))
    assert chunk is not None
    found = chunk.get(0)
    assert found is not None
    assert found.digest == stored == digest(rig.tiers.payload(found.runs, FRAME_BYTES))
