"""Compressed records: equal to the bit, whatever comes back, and only where it pays."""

import asyncio
import itertools
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness.tiers import InMemory
from tier_rig import KIB, OTHERS, Memory, each_cipher, label, opened, sealed

from lmcache_server.options.tiers import compressed_body, compression_choice, record_format, text
from lmcache_server.options.tiers.base import TierError
from lmcache_server.options.tiers.compressed_body import METHODS, SEGMENT_BYTES, compress, expand
from lmcache_server.options.tiers.compression_choice import ELEMENTS, Compressor, pays
from lmcache_server.options.tiers.record_format import (
    MAX_SPARE_BYTES,
    DamagedRecordError,
    Record,
    RecordCipher,
)
from lmcache_server.options.tiers.tier_worker import Rates, TierWorker
from lmcache_server.transfer.digest import digest

SIZES = (1, 4095, 300 * KIB, SEGMENT_BYTES, 2 * SEGMENT_BYTES + 4098)


def values(num_bytes: int, seed: int = 1) -> bytes:
    """As bfloat16 that a model computes: signs and fractions at random, and few exponents."""
    floats = np.random.default_rng(seed).standard_normal(num_bytes // 2 + 1).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()[:num_bytes]


def noise(num_bytes: int) -> bytes:
    return np.random.default_rng(2).bytes(num_bytes)


@each_cipher
@pytest.mark.parametrize("method", METHODS)
def test_a_record_comes_back_whatever_the_runs_and_any_changed_bit_is_found(
    method: str, cipher: RecordCipher | None
) -> None:
    content = values(2 * SEGMENT_BYTES + 4098)
    for element in ELEMENTS:
        whole = sealed(content, cipher, method, element)
        assert len(whole) % 4096 == 0
        if len(whole) >= label(len(content)).record_bytes:
            assert (method, element) == ("lz4", 1)
            break
        last = whole
        for runs in ((), (64 * KIB,), (SEGMENT_BYTES, 4096), (4096,) * 9, (SEGMENT_BYTES - 4096,)):
            assert opened(whole, label(len(content)), cipher, *runs) == content, (element, runs)
    draw, whole = np.random.default_rng(3), last
    places = {0, 1, 2, 4, 8, 16, 24, 36, 37, 38, 39, 40, 44, 48, len(whole) - 1, len(whole) - 17}
    unnoticed = 0
    for place in places | set(draw.integers(0, len(whole), 60).tolist()):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(draw.integers(8))
        try:
            # Blosc has flags without a meaning, and behind the body there is nothing.
            assert opened(bytes(changed), label(len(content)), cipher) == content
        except DamagedRecordError:
            continue
        unnoticed += 1
    assert unnoticed < (5 if cipher is None else 1)
    for other in OTHERS:
        with pytest.raises(DamagedRecordError):
            opened(whole, label(len(content), **other), cipher)


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("make", [values, noise, bytes])
def test_a_body_gives_back_what_was_compressed(num_bytes: int, make: Callable[[int], bytes]) -> None:
    content = make(num_bytes)
    for method, element in itertools.product(METHODS, ELEMENTS):
        body = memoryview(b"".join(compress([memoryview(content)], method, element)))
        back = bytearray(num_bytes)
        expand(body, [memoryview(back)[: num_bytes // 2], memoryview(back)[num_bytes // 2 :]])
        assert back == content, (method, element)


@each_cipher
def test_the_memory_of_the_last_record_is_used_again_and_nothing_of_that_is_left(
    cipher: RecordCipher | None,
) -> None:
    spare, small = record_format._spare, values(60_001, seed=2)
    spare.__dict__.clear()
    fresh = sealed(small, cipher, "zstd")
    for content in (values(3 * SEGMENT_BYTES, seed=3), values(2 * SEGMENT_BYTES, seed=4)):
        assert opened(sealed(content, cipher, "zstd"), label(len(content)), cipher) == content
        kept = spare.body
        again = sealed(small, cipher, "zstd")
        assert spare.body is kept
        assert opened(again, label(len(small)), cipher) == small
        if cipher is None:
            assert fresh == again, "the bytes between body and trailer are zeros"
    huge = values(2 * MAX_SPARE_BYTES)
    assert opened(sealed(huge, cipher, "zstd"), label(len(huge)), cipher) == huge
    assert len(getattr(spare, "body", b"")) <= MAX_SPARE_BYTES


@each_cipher
def test_a_record_that_is_cut_is_damaged(cipher: RecordCipher | None) -> None:
    content = values(300 * KIB)
    whole, plain = sealed(content, cipher, "zstd"), sealed(content, cipher)
    for cut in (4096, len(whole) - 4096, len(whole) - 1, 20, 1):
        for each in (whole, plain):
            with pytest.raises(DamagedRecordError):
                opened(each[:cut], label(len(content)), cipher)
    with pytest.raises(DamagedRecordError):
        opened(whole + bytes(label(len(content)).record_bytes - len(whole)), label(len(content)), cipher)


BOMB = struct.pack("<BBBBIII", 2, 1, 0x93, 2, 0x7FFFFFFF, 512 * KIB, 0x7FFFFFFF)
LIES: dict[str, Callable[[bytearray], object]] = {
    "no method": lambda body: body.__setitem__(0, 0),
    "an unknown method": lambda body: body.__setitem__(0, 9),
    "another method": lambda body: body.__setitem__(0, METHODS["lz4"][0]),
    "another element": lambda body: body.__setitem__(1, 4),
    "no element": lambda body: body.__setitem__(1, 0),
    "a large element": lambda body: body.__setitem__(1, 255),
    "what has no meaning": lambda body: body.__setitem__(2, 1),
    "no segments": lambda body: struct.pack_into("<I", body, 4, 0),
    "all segments in the world": lambda body: struct.pack_into("<I", body, 4, 0xFFFFFFFF),
    "a larger body": lambda body: struct.pack_into("<Q", body, 8, len(body) + 1),
    "another body": lambda body: struct.pack_into("<Q", body, 8, 40),
    "less payload": lambda body: struct.pack_into("<Q", body, 16, 300 * KIB - 1),
    "more payload": lambda body: struct.pack_into("<Q", body, 16, 1 << 40),
    "a larger segment": lambda body: struct.pack_into("<I", body, 24, 0xFFFFFFFF),
    "an empty segment": lambda body: struct.pack_into("<I", body, 24, 0),
    "a segment of 2 GiB": lambda body: body.__setitem__(slice(28, 44), BOMB),
    "a segment that expands to more": lambda body: struct.pack_into("<I", body, 32, 300 * KIB + 1),
    "a segment that expands to less": lambda body: struct.pack_into("<I", body, 32, 300 * KIB - 1),
    "blocks of nothing": lambda body: struct.pack_into("<I", body, 36, 0),
    "blocks of 4 GiB": lambda body: struct.pack_into("<I", body, 36, 0xFFFFFFFF),
    "blocks of a byte": lambda body: struct.pack_into("<I", body, 36, 1),
    "a segment that says it is longer": lambda body: struct.pack_into("<I", body, 40, 1 << 30),
    "blocks far away": lambda body: struct.pack_into("<I", body, 44, 0x7FFFFFF0),
    "blocks before the start": lambda body: struct.pack_into("<i", body, 44, -16),
    "a stream of 2 GiB": lambda body: struct.pack_into("<i", body, 48, 0x7FFFFFFF),
    "a stream of less than nothing": lambda body: struct.pack_into("<i", body, 48, -1),
    "copied and not compressed": lambda body: body.__setitem__(30, body[30] | 2),
    "bytes from anywhere": lambda body: body.__setitem__(slice(44, None), noise(len(body) - 44)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_body_that_lies_is_refused(lie: str) -> None:
    """And nothing outside of the frames changes, and no more memory is taken than the object has."""
    content = values(300 * KIB)
    body = bytearray(b"".join(compress([memoryview(content)], "zstd", 2)))
    LIES[lie](body)
    memory = Memory(len(content), 64 * KIB)
    with pytest.raises(ValueError):
        expand(memoryview(bytes(body)), Record(label(len(content)), memory.runs).payload)
    assert memory.content[: 64 * KIB] in (bytes(64 * KIB), content[: 64 * KIB])


def test_a_group_that_does_not_shrink_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def counting(views: list[memoryview], method: str, element: int) -> list[memoryview]:
        asked.append((sum(map(len, views)), element))
        return compress(views, method, element)

    monkeypatch.setattr(compression_choice, "compress", counting)
    made, size = Compressor("zstd"), 3 * SEGMENT_BYTES
    still, floats = memoryview(noise(size)), memoryview(values(size))
    doubles = memoryview(np.frombuffer(values(size // 2), np.uint16).astype(np.uint32).tobytes())
    for _ in range(3):
        assert not made.body(label(size, bit=0), [still])
    assert asked == [(SEGMENT_BYTES, element) for element in ELEMENTS]
    for bit, content, element in ((1, floats, 2), (2, doubles, 4)):
        asked.clear()
        bodies = [made.body(label(size, bit=bit), [content]) for _ in range(3)]
        assert all(sum(map(len, body)) < 0.9 * size for body in bodies)
        assert asked == [*((SEGMENT_BYTES, each) for each in ELEMENTS), *[(size, element)] * 3]
    asked.clear()
    assert not made.body(label(size, bit=1), [still])
    assert not made.body(label(size, bit=1), [floats]), "it has stopped shrinking"
    assert asked == [(size, 2)]
    assert not Compressor("zstd").body(label(100), [floats[:100]]), "a record has whole pages"


def test_auto_compares_what_a_read_takes() -> None:
    # 1 GB at 200 MB/s takes 5 s. Of that, two thirds and the expansion: 3.35 s and 1 s, or 2.5 s.
    assert pays(0.67, 200e6, 1e9)
    assert not pays(0.67, 200e6, 0.4e9)
    assert not pays(0.67, 2e9, 1e9)
    assert not pays(0.9, 200e6, 100e9), "a tenth of the time, or it is not worth it"
    assert not pays(0.95, 1e6, 100e9)
    assert not pays(0.5, 0, 1e9)
    assert not pays(0.5, 1e9, 0), "nobody knows how fast it is"


def test_auto_begins_with_what_writes_took_and_then_goes_by_reads() -> None:
    made, size, what = Compressor("auto"), SEGMENT_BYTES, label(SEGMENT_BYTES)
    content = [memoryview(values(size))]
    assert not made.body(what, content), "the first tells how fast the tier is"
    made.was_written(size, size / 20e6)
    assert made.body(what, content)
    for _ in range(200):
        made.was_read(what, what.record_bytes, size / 50e9, 1.0)
    assert not made.body(what, content)
    for _ in range(200):
        made.was_read(what, what.record_bytes, size / 20e6, 1.0)
    assert made.body(what, content)
    for _ in range(200):
        made.was_read(what, size // 2, size / 2 / 20e6, size / 10e6)
    assert not made.body(what, content)
    made._again_s = 0.0
    assert made.body(what, content), "the machine was busy; it is tried again"
    assert not Compressor("off").body(what, content)


@each_cipher
def test_whoever_reads_gets_the_same_bytes_and_limits_count_what_is_moved(
    loop: asyncio.AbstractEventLoop, cipher: RecordCipher | None
) -> None:
    tier, done, size = InMemory(), loop.run_until_complete, 3 * SEGMENT_BYTES
    memory = Memory(size, 64 * KIB, SEGMENT_BYTES).fill(values(size))
    workers = {
        setting: TierWorker("tier", lambda: tier, loop, Rates(read_mb_s=1e3), cipher, compress=setting)
        for setting in ("off", "zstd", "lz4")
    }
    for bit, writer in enumerate(workers.values()):
        assert done(writer.write(label(size, bit=bit), memory.runs)) == "written"
    sizes = dict(zip(workers, map(len, tier.records.values()), strict=True))
    assert sizes["zstd"] < 0.75 * size
    assert sizes["zstd"] < sizes["lz4"] < 0.9 * size < size < sizes["off"]
    for (setting, reader), bit in itertools.product(workers.items(), range(3)):
        back = Memory(size, 4096)
        assert done(reader.read(label(size, bit=bit), back.runs)) == digest(back.runs)
        assert back.content == memory.content, (setting, bit)
    for setting, worker in workers.items():
        assert worker.compressor.stored_bytes == {"read": sum(sizes.values()), "write": sizes[setting]}
        assert worker.read_delay_s(10**9) < 0.96
        worker.close(5.0)


def test_without_the_package_a_compressed_record_is_an_error_that_says_what_to_do_and_stays(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, done, size = InMemory(), loop.run_until_complete, 300 * KIB
    writer = TierWorker("tier", lambda: tier, loop, Rates(), compress="zstd")
    memory = Memory(size).fill(values(size))
    assert done(writer.write(label(size), memory.runs)) == "written"
    compressed_body._blosc.cache_clear()
    monkeypatch.setitem(sys.modules, "blosc", None)
    with pytest.raises(TierError, match=r"are compressed: run pip install '.\[compress\]'"):
        done(writer.read(label(size), memory.runs))
    monkeypatch.undo()
    assert done(writer.read(label(size), memory.runs)) == digest(memory.runs)
    writer.close(5.0)


def test_the_status_says_how_much_smaller_records_are() -> None:
    tier: dict[str, Any] = {
        "url": "u", "failing": "", "used_bytes": None, "waiting_objects": 0, "read_bytes": 0,
        "read_objects": dict.fromkeys(("read", "gone", "damaged", "failed"), 0),
        "written_objects": dict.fromkeys(("written", "full", "evicted", "dropped", "failed"), 3),
        "written_bytes": 30 << 20, "stored_bytes": 20 << 20,
    }  # fmt: skip
    larger = {**tier, "stored_bytes": 31 << 20}
    lines = text.lines({"tiers": [tier, larger], "tier_hit_tokens": 0})
    assert "wrote 3, 30.0 MiB as 20.0 MiB (0.67); 0 wait" in lines[1]
    assert "30.0 MiB; 0 wait" in lines[2]
