"""Quotas: a tenant at its quota loses its own chunks, nobody else's. What counts, and what stays, is in
test_cache_model.py."""

import gc
import sys
import types
from typing import Any

import pytest
from harness.options import load

from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_client.contract.keys import ROOT_KEY, tenant_id
from lmcache_server.core.cache import Cache, Gone, Layout, NotReserved, Reservation
from lmcache_server.core.index import Chunk
from lmcache_server.core.named_limits import Limits
from lmcache_server.errors import StartError
from lmcache_server.host.units import GB_BYTES
from lmcache_server.options.quotas.flags import quotas_gb
from lmcache_server.options.quotas.tenants import Tenant, Tenants

A, B = tenant_id("a"), tenant_id("b")
FRAME_BYTES = 100
PLAIN = Layout(b"ns", 16, (GroupSpec(FULL, 16, 0, "", ()),), ((0,),))


def chain(count: int, name: int = 0) -> list[bytes]:
    return [bytes([name, index]) * 16 for index in range(count)]


def stored_chunks(cache: Cache, keys: list[bytes]) -> str:
    """Which of these chunks are present, as text."""
    return "".join(str(int(bool(bits))) for bits in cache.ready(PLAIN, keys))


def with_quota(frames: float, quota: float, **others: float) -> Cache:
    """`others` has other quotas, for tenants by name."""
    named = {tenant_id(salt).hex(): FRAME_BYTES * number / GB_BYTES for salt, number in others.items()}
    cache = Cache(FRAME_BYTES, int(frames))
    cache.order.tenant_policy = Tenants(Limits(FRAME_BYTES * quota / GB_BYTES, named), FRAME_BYTES)
    return cache


def lost_to_quota(cache: Cache) -> list[Chunk]:
    """Gets the chunks that are evicted because of a quota."""
    lost = list[Chunk]()
    cache.on_gone.append(lambda chunk, why: why is Gone.QUOTA and lost.append(chunk))
    return lost


def store(cache: Cache, keys: list[bytes], tenant: bytes = b"") -> NotReserved | None:
    """Stores a chain until an object is not reserved; returns why."""
    for key, parent in zip(keys, [ROOT_KEY, *keys], strict=False):
        got = cache.reserve(PLAIN, key, 0, 0, 1, FRAME_BYTES, parent, tenant=tenant)
        if not isinstance(got, Reservation):
            return got
        cache.commit(got)
    cache.check_integrity()
    return None


def held(cache: Cache, *names: int) -> list[str]:
    return [stored_chunks(cache, chain(4, name)) for name in names]


def test_one_salt_can_have_another_quota_and_without_a_salt_there_is_none() -> None:
    cache = with_quota(100, quota=2, a=4)
    lost = lost_to_quota(cache)
    store(cache, chain(2, 1), A)
    store(cache, chain(2, 2), A)
    store(cache, chain(2, 3), A)
    assert held(cache, 1, 2, 3) == ["0000", "1100", "1100"]
    assert (cache.evicted_chunks, len(lost), cache.evicted_ages_s) == (2, 2, [])
    assert store(cache, chain(3, 4), B) is NotReserved.QUOTA
    assert held(cache, 4) == ["1100"], "a chain longer than its quota keeps its head"
    assert store(cache, chain(9, 5)) is None
    assert {each.name for each in cache.order.tenant_policy} == {A, B}


@pytest.mark.parametrize("quota", [15, 20, 1000])
@pytest.mark.parametrize("step", [1, 4, 10])
def test_a_prompt_longer_than_its_quota_keeps_its_beginning_however_it_is_stored(quota, step):
    """An engine stores what each of its steps has computed, whatever became of the steps before."""
    cache, keys = with_quota(25, quota), chain(40, 1)
    for start in [*range(0, 40, step)] * 3:
        got = [
            cache.reserve(PLAIN, key, 0, 0, 1, FRAME_BYTES, parent, tenant=A)
            for key, parent in list(zip(keys, [ROOT_KEY, *keys], strict=False))[start : start + step]
        ]
        for each in (each for each in got if isinstance(each, Reservation)):
            cache.commit(each)
        cache.check_integrity()
    there = min(quota, 25)
    assert stored_chunks(cache, keys) == "1" * there + "0" * (40 - there)
    assert cache.evicted_chunks == 0


def steps_to_evict(others: int) -> int:
    """How many lines of Python it takes to evict the coldest chunk of a full tenant, behind so many others in
    the order of eviction."""
    cache, count = with_quota(others + 100, quota=4), 0
    lost = lost_to_quota(cache)

    def line(_frame: types.FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    for number in range(others):
        store_one(cache, number, B if number % 2 else b"")
    for number in range(4):
        store_one(cache, others + number, A)
    traced = sys.gettrace()
    sys.settrace(line)
    try:
        store_one(cache, others + 4, A)
    finally:
        sys.settrace(traced)
    assert len(lost) == max(others // 2 - 4, 0) + 1
    return count


def store_one(cache: Cache, number: int, tenant: bytes) -> None:
    got = cache.reserve(PLAIN, number.to_bytes(32, "big"), 0, 0, 1, FRAME_BYTES, ROOT_KEY, tenant=tenant)
    assert isinstance(got, Reservation)
    cache.commit(got)


def test_the_coldest_of_a_tenant_is_found_without_a_search() -> None:
    assert steps_to_evict(1000) <= steps_to_evict(10) + 20


def test_a_tenant_without_chunks_is_forgotten_and_no_garbage() -> None:
    cache = with_quota(100, quota=4)
    gc.collect()
    gc.disable()
    try:
        before = sum(type(each) in (Chunk, Tenant) for each in gc.get_objects())
        for number in range(200):
            store(cache, chain(2, number), tenant_id(str(number)))
            cache.forget(cache.chunk(PLAIN.namespace, chain(2, number)[1]))  # type: ignore[arg-type]
        assert 90 <= len(cache.order.tenant_policy) <= 100, "L1 has room for so many chunks"
        cache.clear()
        assert len(cache.order.tenant_policy) == 0
        assert sum(type(each) in (Chunk, Tenant) for each in gc.get_objects()) == before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("text", "quota"),
    [("", float("inf")), ("0.5", 0.5), ("4,ca978112=16", 16.0), ("4, CA978112CA1BBDCA = 2", 2.0),
     ("4,ca978113=16", 4.0), ("ca978112=1", 1.0)],
)  # fmt: skip
def test_the_quota_of_a_tenant(text: str, quota: float) -> None:
    """`printf %s a | sha256sum` begins with ca978112ca1bbdca."""
    assert quotas_gb(text).of(A) == quota


def test_what_is_no_quota_and_by_which_digest_of_its_salt_a_tenant_is_known() -> None:
    for text in ("0", "-1", "4 GB", "4,", "4,ca9781=2", "4,some-salt=2", "4,5", "inf"):
        with pytest.raises(ValueError):
            quotas_gb(text)
    assert tenant_id("a").hex() == "ca978112ca1bbdcafac231b39a23dc4d"
    assert tenant_id("") == tenant_id(None) == b""
    assert len(tenant_id("\udc80")) == 16


def test_a_wrong_quota_is_one_sentence() -> None:
    with pytest.raises(StartError) as refused:
        load("--quota-gb", "a b")
    told = "--quota-gb must be a number of GB such as 4, or 4,0b5d5f2cbd9c=16, not 'a b'"
    assert str(refused.value) == told
    assert load("--quota-gb", "1.5,0b5d5f2c=3").of_options == {"quota_gb": "1.5,0b5d5f2c=3"}
