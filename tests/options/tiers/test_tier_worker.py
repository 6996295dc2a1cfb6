"""Records, and the threads that call a tier."""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from harness.tiers import InMemory
from harness.waiting import PATIENCE_S, wait_until
from tier_rig import CIPHERS, KIB, OTHERS, Memory, each_cipher, label, opened, record_of, sealed

from lmcache_server.options.tiers import tier_worker as worker_module
from lmcache_server.options.tiers.base import TierError
from lmcache_server.options.tiers.record_format import (
    DamagedRecordError,
    RecordCipher,
    read_key,
)
from lmcache_server.options.tiers.tier_worker import Rates, TierWorker
from lmcache_server.transfer.digest import digest

SIZES = (1, 100, 4096, 4097, 65536, 65536 + 4000, 3 * 65536 - 1)


@each_cipher
@pytest.mark.parametrize("size", SIZES)
def test_a_record_comes_back_and_any_changed_byte_is_found(size: int, cipher: RecordCipher | None) -> None:
    content = bytes(number % 251 for number in range(size))
    whole, what = sealed(content, cipher), label(size)
    assert size < 100 or (content in whole) == (cipher is None)
    assert len(whole) % 4096 == 0
    assert opened(whole, what, cipher, 64 * KIB) == content
    for place in {0, size // 2, size - 1, len(whole) // 2, len(whole) - 17, len(whole) - 1}:
        changed = bytearray(whole)
        changed[place] ^= 4
        with pytest.raises(DamagedRecordError):
            opened(bytes(changed), what, cipher)
    if cipher is not None:
        with pytest.raises(DamagedRecordError):
            opened(whole, what, RecordCipher(AESGCM(b"2" * 32), "two"))
    for other in OTHERS:
        with pytest.raises(DamagedRecordError):
            opened(whole, label(size, **other), cipher)


def test_a_record_has_nothing_of_the_one_before_it() -> None:
    memory = Memory(4000).fill(b"secret, " * 500)
    record = record_of(label(4000), memory, None)
    record.seal()
    assert b"secret" in bytes(record.pieces[-1])
    record.release()
    following = record_of(label(1), one := Memory(1), None)
    assert following._end.obj is record._end.obj
    following.seal()
    assert b"secret" not in bytes(following.pieces[-1]), one


def private(path: Path, content: bytes) -> str:
    path.touch(0o600)
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o601])
def test_a_key_file_of_others_is_refused(mode: int, tmp_path: Path) -> None:
    path = private(tmp_path / "key", b"k" * 32)
    os.chmod(path, mode)
    with pytest.raises(ValueError, match="chmod 600"):
        read_key(path)
    os.chmod(path, 0o440)
    assert read_key(path).key_id


def test_a_key_file_has_a_key_of_32_bytes_as_such_or_in_hex(tmp_path: Path) -> None:
    for content in (b"k" * 32, b"6b" * 32, b"6B" * 32 + b"\n"):
        cipher = read_key(private(tmp_path / "key", content))
        text = cipher.aead.encrypt(b"n" * 12, b"text", b"")
        assert AESGCM(b"k" * 32).decrypt(b"n" * 12, text, b"") == b"text"
    for content in (b"", b"short", b"zz" * 32, b"6b" * 31):
        with pytest.raises(ValueError, match="must have 32 bytes"):
            read_key(private(tmp_path / "key", content))


class Clock:
    """Time that passes when somebody sleeps, and then calls `slept`."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(worker_module, "time", made := Clock())
    return made


def test_what_is_written_is_read_and_what_is_damaged_is_removed(loop: asyncio.AbstractEventLoop) -> None:
    tier, done = InMemory(), loop.run_until_complete
    worker = TierWorker("tier", lambda: tier, loop, Rates())
    memory, other = Memory(5000), Memory(5000)
    memory.fill(b"abcde" * 1000)
    assert done(worker.write(label(5000), memory.runs)) == "written"
    assert done(worker.write(label(5000), memory.runs)) == "present"
    assert done(worker.read(label(5000), other.runs)) == digest(memory.runs)
    assert other.content == memory.content
    assert done(worker.read(label(5000, bit=4), other.runs)) is None
    name = label(5000).name
    tier.records[name] = tier.records[name][:-1] + b"?"
    with pytest.raises(DamagedRecordError):
        done(worker.read(label(5000), other.runs))
    assert not tier.records
    worker.close(5.0)
    assert tier.closed
    with pytest.raises(TierError):
        done(worker.present(["a"]))


def test_a_tier_that_cannot_be_opened_is_opened_later(loop: asyncio.AbstractEventLoop) -> None:
    works: list[InMemory] = []

    def open_tier() -> InMemory:
        if not works:
            raise TierError("not yet")
        return works[0]

    worker, done = TierWorker("tier", open_tier, loop, Rates()), loop.run_until_complete
    with pytest.raises(TierError):
        done(worker.present(["a"]))
    works.append(InMemory())
    assert done(worker.present(["a"])) == [False]
    worker.close(5.0)


def test_a_panic_of_a_client_ends_its_call_and_not_the_thread(loop: asyncio.AbstractEventLoop) -> None:
    class Panic(BaseException):
        """As in clients that are written in Rust."""

    store: Any = InMemory()
    answers, panics = store.present, 2 * worker_module.ASKERS

    def present(names: Sequence[str]) -> Sequence[bool]:
        nonlocal panics
        if panics:
            panics -= 1
            raise Panic("no thread")
        found: Sequence[bool] = answers(names)
        return found

    store.present = present
    worker, done = TierWorker("tier", lambda: store, loop, Rates()), loop.run_until_complete
    while panics:
        with pytest.raises(TierError, match="no thread"):
            done(asyncio.wait_for(worker.present(["a"]), PATIENCE_S))
    assert done(worker.present(["a"])) == [False]
    worker.close(5.0)


def test_calls_that_hang_hold_only_their_threads(loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
    tier, released, begun = InMemory(), threading.Event(), []
    tier.before = lambda: (begun.append(True), released.wait())
    worker, memory = TierWorker("tier", lambda: tier, loop, Rates()), Memory(100)
    done = loop.run_until_complete
    writes = [worker.write(label(100, bit=bit), memory.runs) for bit in range(worker_module.WRITERS)]
    assert done(worker.present(["a"])) == [False], "reads have threads of their own"
    wait_until(lambda: len(begun) == worker_module.WRITERS)
    assert not worker.is_stuck()
    clock.now_s += worker_module.STUCK_S + 1
    assert worker.is_stuck()
    stuck = worker.write(label(100, bit=8), memory.runs)
    worker.fail_stuck()
    with pytest.raises(TierError):
        done(asyncio.wait_for(stuck, 60))
    assert done(worker.present(["a"])) == [False], "only what waits for the threads that hang has failed"
    waiting = worker.write(label(100, bit=9), memory.runs)
    began_s = clock.now_s
    worker.close(0.2)
    assert clock.now_s - began_s < 1, "nobody waits for a call that hangs"
    with pytest.raises(TierError):
        done(waiting)
    assert not tier.closed, "a call still uses it"
    released.set()
    assert done(asyncio.gather(*writes)) == ["written"] * len(writes)


def test_a_call_that_waits_for_its_limit_does_not_count_as_hanging(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(worker_module, "WRITERS", 1)
    worker, memory = TierWorker("tier", InMemory, loop, Rates(write_mb_s=0.05)), Memory(500_000)
    stuck: list[bool] = []

    def slept() -> None:
        stuck.append(worker.is_stuck())
        if len(stuck) == 80:
            worker.close(0.0)

    # It would take 9 s, in steps of 0.1 s; the server ends after 8 s.
    clock.slept = slept
    with pytest.raises(TierError):
        loop.run_until_complete(worker.write(label(500_000), memory.runs))
    assert 80 * worker_module.PAUSE_S > worker_module.STUCK_S
    assert len(stuck) >= 80
    assert not any(stuck)


def test_servers_with_other_keys_leave_each_other_s_records_alone(loop: asyncio.AbstractEventLoop) -> None:
    tier, memory, done = InMemory(), Memory(100), loop.run_until_complete
    workers = [TierWorker("tier", lambda: tier, loop, Rates(), cipher) for cipher in CIPHERS]
    assert done(workers[0].write(label(100), memory.runs)) == "written"
    assert done(workers[1].present([label(100).name])) == [False]
    assert done(workers[1].read(label(100), memory.runs)) is None
    assert done(workers[1].write(label(100), memory.runs)) == "written"
    assert done(workers[0].read(label(100), memory.runs)) == digest(memory.runs)
    assert len(tier.records) == 2


def test_what_may_be_written_in_a_day_is_spread_over_it(clock: Clock) -> None:
    """A quarter of an hour's share goes at once, and no more than that is ever saved up."""
    lane: Any = SimpleNamespace(closing=False, touch=lambda: None)
    daily = Rates(write_tb_day=0.0864).daily  # 1 MB each second
    quarter = 900 * 10**6
    daily.take(quarter, lane)
    assert clock.now_s == 1000
    daily.take(60 * 10**6, lane)
    assert clock.now_s == pytest.approx(1060)
    clock.now_s += 86400
    assert daily.delay_s(quarter) == 0
    assert daily.delay_s(quarter + 10 * 10**6) == pytest.approx(10)


def test_reads_have_a_limit_of_their_own_and_writes_have_two(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    memory, done = Memory(100_000), loop.run_until_complete
    rates = Rates(read_mb_s=0.1, write_mb_s=0.05, write_tb_day=0.0864 / 1000)
    for lane in ("READERS", "WRITERS"):
        monkeypatch.setattr(worker_module, lane, 1)
    worker = TierWorker("tier", InMemory, loop, rates)
    # 50 kB/s, of which the first second's goes at once; a day's share is 1 kB/s, with 900 kB at once.
    assert done(worker.write(label(100_000), memory.runs)) == "written"
    assert clock.now_s == pytest.approx(1001)
    for turn in range(5):
        began_s = clock.now_s
        assert done(worker.read(label(100_000), memory.runs)) == digest(memory.runs)
        assert clock.now_s - began_s == pytest.approx(1 if turn else 0)
    assert worker.read_delay_s(200_000) == pytest.approx(2)
    for bit in range(4, 12):
        assert done(worker.write(label(100_000, bit=bit), memory.runs)) == "written"
    began_s = clock.now_s
    assert done(worker.write(label(100_000, bit=12), memory.runs)) == "written"
    assert clock.now_s - began_s > 50, "the day's share of a quarter of an hour is used up"
    worker.close(5.0)


def test_a_clear_of_many_namespaces_leaves_threads_for_reads(
    loop: asyncio.AbstractEventLoop, clock: Clock
) -> None:
    """With a thread for each, a store whose listing takes long would seem to hang."""
    tier: Any = InMemory()
    goes_on, cleared = threading.Event(), []
    tier.clear = lambda prefix: (cleared.append(prefix), goes_on.wait(PATIENCE_S))
    prefixes = [f"{number}/" for number in range(2 * worker_module.READERS)]
    worker, done = TierWorker("tier", lambda: tier, loop, Rates()), loop.run_until_complete
    try:
        clearing = worker.clear(prefixes)
        wait_until(lambda: cleared)
        clock.now_s += worker_module.STUCK_S + 1
        assert not worker.is_stuck()
        read = worker.read(label(100), Memory(100).runs)
        assert done(asyncio.wait_for(read, 20)) is None
    finally:
        goes_on.set()
    done(clearing)
    assert cleared == prefixes
    worker.close(5.0)
