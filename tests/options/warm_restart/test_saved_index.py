"""The index at rest: all of it comes back, or nothing does, whatever became of it."""

import math

import pytest

from lmcache_client.contract import codec
from lmcache_client.contract.geometry import GroupSpec, Region
from lmcache_client.contract.keys import ROOT_KEY, tenant_id
from lmcache_server.core.cache import Cache, Layout, Reservation
from lmcache_server.core.index import Chunk
from lmcache_server.core.named_limits import Limits
from lmcache_server.core.packed import StoredObject
from lmcache_server.host.units import GB_BYTES
from lmcache_server.options.warm_restart.snapshot import SnapshotError, decode, rebuild, take

FRAME_BYTES = 100
TOTAL_FRAMES = 60
GROUPS = (GroupSpec("full", 16, 0, "tag", (Region(0, 0, 64, 64),)), GroupSpec("recurrent", 16, 0, "", ()))
LAYOUTS = tuple(Layout(bytes([name]) * 32, 16, GROUPS, ((0, 1), (0,))) for name in (1, 2))
KNOWN = {layout.namespace: {"model": "some/model", "world_size": 2} for layout in LAYOUTS}


def filled(now_s=50.0):
    """A cache with chunks of two namespaces, used at different times; the last is not complete."""
    cache = Cache(FRAME_BYTES, TOTAL_FRAMES)
    for nth in range(9):
        layout = LAYOUTS[nth % 2]
        for of, shard in ((0, 0), (0, 1), (1, 0)) if nth < 8 else ((0, 1),):
            cache.expire(now_s - 10 + nth)
            reservation = cache.reserve(layout, bytes([nth]) * 32, of, shard, 1, 150 + nth)
            assert isinstance(reservation, Reservation)
            cache.commit(reservation)
    return cache


def index_of_all(cache, now_s, known):
    return codec.pack(take(cache, known, {}, now_s, 0.0))


def restored(index, now_s=7.0, unix_s=0.0, cache=None):
    cache = cache or Cache(FRAME_BYTES)
    rebuild(decode(index, TOTAL_FRAMES), cache, now_s, unix_s)
    cache.check_integrity()
    return cache


def sizes(cache):
    return cache.total_frames, cache.free_frames, cache.used_frames, cache.stored_bytes, cache.num_chunks


def content(cache, now_s):
    return [
        (chunk.namespace, chunk.key, chunk.ready, chunk.packed, round(now_s - chunk.last_used_s, 6))
        for chunk in cache.order
    ]


def test_everything_comes_back_ages_included():
    cache = filled()
    index = index_of_all(cache, 50.0, KNOWN)
    again = restored(index)
    assert content(again, 7.0) == content(cache, 50.0)
    assert len(content(again, 7.0)) == 9
    assert sizes(again) == sizes(cache)
    assert rebuild(decode(index, TOTAL_FRAMES), Cache(FRAME_BYTES), 7.0, 0.0) == KNOWN
    assert index_of_all(again, 7.0, KNOWN) == index
    empty = Cache(FRAME_BYTES, 3)
    assert sizes(restored(index_of_all(empty, 0.0, {}))) == sizes(empty)


def test_what_is_in_use_is_not_taken():
    cache = filled()
    layout = LAYOUTS[0]
    hit = cache.lookup(layout, [bytes(32)], 0, 16, 1, 50.0)
    assert hit.lease_id
    writing = cache.reserve(layout, b"w" * 32, 0, 0, 1, 10)
    assert isinstance(writing, Reservation)
    again = restored(index_of_all(cache, 50.0, {}))
    assert again.num_chunks == 8
    assert not again._index.chunks(layout.namespace).keys() & {bytes(32), b"w" * 32}


def packed(*objects):
    chunk = Chunk(b"", b"")
    for bit, stored in enumerate(objects):
        chunk.add(bit, stored, 0)
    return bytes(chunk.packed)


def row(**changes):
    first, second = StoredObject(1, 150, ((0, 2),), b""), StoredObject(1, 250, ((4, 1), (2, 2)), b"")
    values = {
        "number": 0, "key": b"k" * 32, "age_s": 1.5, "stored_age_s": 2.5, "ready": b"\x03", "tenant": b"",
        "objects": packed(first, second),
    }  # fmt: skip
    return list((values | changes).values())


def one(*runs, num_bytes=150):
    return {"ready": b"\x01", "objects": packed(StoredObject(1, num_bytes, runs, b""))}


def index_of(total_frames=10, namespaces=(b"n" * 32,), described=("null",), rows=(), saved=None):
    return codec.pack([0.0, total_frames, namespaces, described, rows, {} if saved is None else saved])


ROWS = [row(), row(key=b"l" * 32, **one((5, 2)))]
DAMAGED = [
    # Chunks of one key, and objects of the same frames.
    *(index_of(rows=[row(), row(**other)]) for other in ({}, {"key": b"l" * 32})),
    # Frames that are not there, too few, too many, none, taken twice, and no frames at all.
    *(
        index_of(rows=[row(**other)])
        for other in (
            one((9, 2)),
            *(one((0, 2), num_bytes=num_bytes) for num_bytes in (201, 100, 0)),
            one(num_bytes=0),
            one((0, 1), (0, 1)),
            one((0.0, 2)),
            one((0, True), num_bytes=50),
            one((-1, 2)),
            one((0, 1, 1)),
            one(0, 2),
        )
    ),
    # Numbers and ages that nothing has, and texts for bytes.
    *(index_of(rows=[row(ready=ready)]) for ready in (b"\x07", b"\x01", b"", 3)),
    *(index_of(rows=[row(number=number)]) for number in (1, -1, "0")),
    *(index_of(rows=[row(age_s=age_s)]) for age_s in (-1.0, math.nan, math.inf)),
    *(index_of(rows=[row(stored_age_s=age_s)]) for age_s in (-1.0, math.nan, math.inf)),
    *(index_of(rows=[row(**{name: "k" * 32})]) for name in ("key", "tenant")),
    # Objects that are none.
    *(
        index_of(rows=[row(ready=b"\x01", objects=packed(stored))])
        for stored in (
            StoredObject(1, 150, ((0, 2),), "sums"),
            StoredObject(1, 150, ((0, 2),), bytes(15)),
            (1, 150, ((0, 2),)),
        )
    ),
    *(
        index_of(rows=[row(objects=objects)])
        for objects in (codec.pack(["text", "text"]), row()[-1] + b"\0", b"\xc1", [], 7)
    ),
    index_of(rows=[row(ready=b"", objects=packed())]),
    *(index_of(rows=rows) for rows in ([row()[:-1]], [7], [None], 7)),
    # What no option saves.
    *(index_of(rows=ROWS, saved=saved) for saved in (7, [], {"an option": "text"}, {7: b"bytes"})),
    # An index of another shape.
    *(index_of(total_frames=frames) for frames in (TOTAL_FRAMES + 1, -1, 1.0)),
    *(index_of(namespaces=7), index_of(namespaces=([],), described=('{"model": "some/model"}',))),
    *(index_of(described=described) for described in ((), ("no JSON",), (7,))),
    *(codec.pack(content) for content in (7, [1, 2, 3], {}, [0.0, 10, (), (), ()])),
    *(b"", b"\xc1", index_of() + b"\0"),
]


def test_the_rows_that_are_damaged_below_are_good():
    cache = restored(index_of(rows=[row()]))
    assert (cache.used_frames, cache.stored_bytes) == (5, 400)
    restored(index_of(rows=ROWS))
    saved = {"an option": b"its own"}
    assert decode(index_of(rows=ROWS, saved=saved), TOTAL_FRAMES).saved == saved


@pytest.mark.parametrize("index", DAMAGED, ids=range(len(DAMAGED)))
def test_what_does_not_fit_together_restores_nothing(index):
    cache = Cache(FRAME_BYTES)
    with pytest.raises(SnapshotError):
        restored(index, cache=cache)
    cache.check_integrity()
    assert (cache.num_chunks, cache.total_frames) == (0, 0)


PLAIN = Layout(b"plain", 16, (GroupSpec("full", 16, 0, "", ()),), ((0,),))
TENANT = tenant_id("a")


def of_quota(total_frames, frames):
    from lmcache_server.options.quotas.tenants import Tenants

    cache = Cache(FRAME_BYTES, total_frames)
    cache.order.tenant_policy = Tenants(Limits(FRAME_BYTES * frames / GB_BYTES, {}), FRAME_BYTES)
    return cache


def store_chain(cache, name, length):
    keys = [bytes([name, index]) * 16 for index in range(length)]
    for key, parent in zip(keys, [ROOT_KEY, *keys], strict=False):
        room = cache.reserve(PLAIN, key, 0, 0, 1, FRAME_BYTES, parent, tenant=TENANT)
        assert isinstance(room, Reservation)
        cache.commit(room)
    cache.check_integrity()


def held_chunks(cache, name):
    keys = [bytes([name, index]) * 16 for index in range(4)]
    return sum(map(bool, cache.ready(PLAIN, keys)))


def test_a_smaller_quota_after_a_restart_is_reached_step_by_step():
    """A tenant far above its quota does not lose everything in one store, during which others would wait."""
    before, cache = of_quota(100, 50), of_quota(0, 4)
    for name in range(10):
        store_chain(before, name, 4)
    rebuild(take(before, {}, {}, 0.0, 0.0), cache, 0.0, 0.0)
    for name, left in enumerate((39, 38, 37), 20):
        store_chain(cache, name, 1)
        assert next(iter(cache.order.tenant_policy)).frames == left
    for name in range(30, 80):
        store_chain(cache, name, 1)
    assert next(iter(cache.order.tenant_policy)).frames == 4
    assert [held_chunks(cache, name) for name in (79, 78, 77, 76, 75)] == [1, 1, 1, 1, 0]
