"""What is written to a tier: how much at a time, what is left out, what a clear forgets."""

import asyncio
import threading

import pytest
from tier_rig import LAYOUT, Rig, key, option, with_rig

from lmcache_server.options.tiers import server, urls
from lmcache_server.options.tiers import spills as spills_module
from lmcache_server.options.tiers import tier_worker as worker_module
from lmcache_server.options.tiers.base import TierError
from lmcache_server.options.tiers.spills import SLICE_CHUNKS, SPILL_SHARE

FRAMES = 40
CHUNKS = 4 * 2000
TENANT, QUOTA = b"t" * 16, 8


async def one_writes(rig: Rig) -> None:
    assert await asyncio.to_thread(rig.store.writing.acquire, True, 60)


async def rest(rig: Rig) -> None:
    rig.store.opened.set()
    await rig.spills.flush()
    await rig.all_ended()


def written(rig: Rig, outcome: str = "written") -> int:
    labels = {"tier": "1", "direction": "write", "outcome": outcome}
    return int(rig.metrics.value("lmcache_tier_objects_total", **labels))


@with_rig(FRAMES, waits="write")
async def test_what_is_being_written_takes_a_twentieth_of_l1(rig: Rig) -> None:
    rig.keep(*range(10))
    await one_writes(rig)
    share = FRAMES // SPILL_SHARE
    assert len(rig.tier.writing) == rig.spills._spilling_frames == share + 1, "the last one began below it"
    await rest(rig)
    assert written(rig) == 10
    assert rig.spills._spilling_frames == 0


@with_rig(FRAMES)
async def test_a_write_that_hangs_holds_up_no_other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it holds all frames that may be written at once."""
    monkeypatch.setattr(spills_module, "SPILL_SHARE", FRAMES + 1)
    monkeypatch.setattr(worker_module, "STUCK_S", 1.0)
    hangs, write = iter([True]), rig.store.write
    monkeypatch.setattr(
        rig.store, "write", lambda *call: (next(hangs, False) and rig.store.opened.wait(), write(*call))[1]
    )
    rig.keep(*range(10))
    while written(rig) < 9:
        rig.spills.tick()
        await rig.system.wait([rig.system.future()], 0.01)
    assert len(rig.tier.writing) == rig.spills._spilling_frames == 1


@with_rig(FRAMES, waits="write")
async def test_what_finds_no_place_in_the_queue_is_dropped_and_nobody_waits(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spills_module, "MAX_BACKLOG", 4)
    rig.keep(*range(10))  # returns though nothing can be written
    assert written(rig, "dropped") == 6
    await rest(rig)
    assert written(rig) == len(rig.store.records) == 4
    rig.keep(20)
    await rest(rig)
    assert written(rig) == 5, "then there is room again"


@pytest.mark.parametrize("namespace", [None, LAYOUT.namespace])
@with_rig(FRAMES, waits="write")
async def test_a_write_in_flight_during_a_clear_leaves_no_record(rig: Rig, namespace: bytes | None) -> None:
    rig.keep(1, 2, 3, 4, 5, 6)
    await one_writes(rig)
    rig.cache.clear(namespace)  # as the router does, first
    assert await rig.spills.clear([namespace]) == []
    await rest(rig)
    assert written(rig) > 0
    assert not rig.store.records, "what was being written was removed"
    rig.keep(7)
    await rest(rig)
    assert len(rig.store.records) == 1, "what is stored after the clear stays"


@with_rig(FRAMES, waits="write")
async def test_a_write_in_flight_of_a_damaged_chunk_leaves_no_record(rig: Rig) -> None:
    rig.keep(1, 2)
    await one_writes(rig)
    chunk = rig.cache.chunk(LAYOUT.namespace, key(1))
    assert chunk is not None
    rig.spills.forget(chunk)
    rig.cache.forget(chunk)
    await rest(rig)
    assert written(rig) == 2
    (name,) = rig.store.records
    assert name.endswith("2.0"), "the other chunk's record stays"


@with_rig(FRAMES)
async def test_a_chunk_that_is_found_damaged_before_its_write_begins_leaves_no_record(rig: Rig) -> None:
    rig.keep(1)
    chunk = rig.cache.chunk(LAYOUT.namespace, key(1))
    assert chunk is not None
    rig.spills.forget(chunk)
    rig.cache.forget(chunk)
    (name,) = rig.tier.damaged
    assert rig.tier.writing == [name]
    await rest(rig)
    assert not rig.store.records


@with_rig(FRAMES)
async def test_a_clean_stop_removes_what_could_not_be_removed_before(rig: Rig) -> None:
    rig.keep(1)
    await rest(rig)
    chunk = rig.cache.chunk(LAYOUT.namespace, key(1))
    assert chunk is not None
    remove, rig.store.remove = rig.store.remove, fails
    rig.spills.forget(chunk)
    rig.cache.forget(chunk)
    await rig.all_ended()
    assert len(rig.store.records) == 1
    rig.store.remove = remove
    await rig.spills.flush()
    assert not rig.store.records


def fails(_names: object) -> None:
    raise TierError("not now")


@with_rig(FRAMES)
async def test_an_answer_is_written_as_soon_as_a_later_prompt_has_read_it(rig: Rig) -> None:
    rig.keep(1, 2, 3, once=True)
    rig.keep(4)
    await rest(rig)
    assert len(rig.store.records) == 1, "a prompt"
    keys = [key(1), key(2)]
    hit = rig.cache.lookup(LAYOUT, keys, 0, 1 << 20, 1, 0.0)
    rig.cache.release(hit.lease_id, 1)
    rig.spills.tick()
    await rest(rig)
    assert {name[-3:] for name in rig.store.records} == {"1.0", "2.0", "4.0"}
    rig.cache.touch(LAYOUT.namespace, keys)
    rig.spills.tick()
    await rest(rig)
    assert written(rig) == 3, "and once only"


@with_rig(FRAMES, cold=True)
async def test_what_a_tier_had_no_room_for_is_offered_to_it_again_but_not_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spills_module, "FULL_S", 600.0)
    rig.store.has_room = False
    rig.keep(1)
    await rig.all_ended()
    assert (written(rig, "full"), len(rig.store.records)) == (1, 0)
    await rig.spills.flush()
    assert caplog.messages == ["1 objects were not written to their tier"]
    rig.store.has_room = True
    rig.spills.tick()
    rig.spills.made_room([])
    await rig.all_ended()
    assert (written(rig, "full"), len(rig.store.records)) == (2, 0), "each try costs the digest of a record"
    rig.tier.full_until_s = 0.0
    for _ in range(2):
        rig.spills.tick()
        await rig.all_ended()
        assert (written(rig), len(rig.store.records)) == (1, 1), "and once only"


@with_rig(FRAMES // 5)
async def test_a_clean_stop_writes_what_waits_behind_many_evicted_objects(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spills_module, "MAX_GONE", FRAMES // 10)
    rig.spills.pause()
    for number in range(2 * FRAMES // 5):
        rig.keep(number)
    await rig.spills.flush()
    assert (len(rig.store.records), len(rig.tier.backlog)) == (FRAMES // 5, 0)


@with_rig(FRAMES, cold=True)
async def test_a_clean_stop_writes_what_is_protected_too(rig: Rig) -> None:
    rig.keep(1, 2)
    chunk = rig.cache.chunk(LAYOUT.namespace, key(1))
    assert chunk is not None
    rig.cache.protect([chunk])
    await rig.spills.flush()
    assert {name[-3:] for name in rig.store.records} == {"1.0", "2.0"}


@pytest.mark.parametrize("seconds", [60.0, 0.0])
@with_rig(FRAMES, cold=True)
async def test_a_clean_stop_writes_more_than_fits_into_the_queue_or_says_how_much_is_left(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    monkeypatch.setattr(spills_module, "MAX_BACKLOG", 4)
    monkeypatch.setattr(spills_module, "FLUSH_S", seconds)
    rig.fill(*range(FRAMES))
    await asyncio.sleep(0.01)
    await rig.spills.flush()
    if seconds:
        assert len(rig.store.records) == FRAMES
        assert not caplog.messages
    else:
        assert caplog.messages == [f"{FRAMES} objects were not written to their tier"]


@pytest.mark.parametrize(("chunks", "is_written"), [(4, False), (QUOTA, True)])
@with_rig(100, cold=True, quota_frames=QUOTA, frame_bytes=1)
async def test_what_a_full_salt_evicts_next_is_written_before(
    rig: Rig, chunks: int, is_written: bool
) -> None:
    """Also to a tier that is written only with what L1 evicts next. Most of L1 is colder than the chunks of
    this salt, so they are not in the coldest quarter."""
    rig.tier.breaker.open(rig.system.now_s())  # so that all that is found waits
    rig.keep(*range(50))
    for number in range(chunks):
        rig.keep(100 + number, tenant=TENANT)
    waiting = {chunk for chunk, _ in rig.tier.backlog}
    own = [chunk for tenant in rig.cache.order.tenant_policy for chunk in tenant.line()]
    assert (own[0] in waiting) is is_written


@with_rig(CHUNKS, cold=True, frame_bytes=1)
async def test_a_large_index_is_not_looked_through_at_once(rig: Rig) -> None:
    """Once a second, 10,000 chunks stopped all lookups for up to 0.1 s."""
    rig.tier.breaker.open(rig.system.now_s())  # so that all that is found waits
    rig.fill(*range(CHUNKS))
    rig.spills.tick()
    await asyncio.sleep(0)
    assert 0 < len(rig.tier.backlog) <= SLICE_CHUNKS
    while len(rig.tier.backlog) < CHUNKS // 4:
        await asyncio.sleep(0)
    await rig.all_ended()
    assert len(rig.tier.backlog) == CHUNKS // 4


def test_tiers_are_opened_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, two stores that do not answer made the start wait twice."""
    both = threading.Barrier(2)
    monkeypatch.setattr(server, "OPEN_S", 60.0)
    monkeypatch.setattr(urls, "check_installed", lambda _: None)
    monkeypatch.setattr(urls, "open_tier", lambda *_: both.wait(60))

    async def opened() -> list[bool]:
        opening = option("valkey://one", "valkey://two")
        await opening.open()
        return [tier.breaker.is_open for tier in opening.tiers]

    assert asyncio.run(opened()) == [False, False]
