"""What every tier's adapter must do, as tests; and memory for records."""

import contextlib
import mmap
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from harness.stores import Store
from harness.waiting import wait_until
from lmcache_server.options.tiers.base import Tier, TierError
from lmcache_server.options.tiers.pieces import first, fits, spread

PAGE_BYTES = 4096
Pieces = list[memoryview]
ALLOWED = ["0", "..", "../..", "/", "//a", "a//b", "./a", "-", "_.-/0f", "a/", ".", "f" * 200, "/" * 200]

FORBIDDEN = ["", "f" * 201, "a b", "A", "g", "a\n", "a\0", "é", "*", "a\\"]


def memory(*num_pages: int, seed: int | None = None) -> Pieces:
    """Page-aligned pieces of so many pages, one apart from the next: zeros, or random bytes of a seed."""
    whole = memoryview(mmap.mmap(-1, (sum(num_pages) + len(num_pages)) * PAGE_BYTES))
    pieces, start = [], 0
    for pages in num_pages:
        pieces.append(whole[start : start + pages * PAGE_BYTES])
        start += (pages + 1) * PAGE_BYTES
    if seed is not None:
        choose = random.Random(seed)
        for piece in pieces:
            piece[:] = choose.randbytes(piece.nbytes)
    return pieces


def same(left: Sequence[memoryview], right: Sequence[memoryview]) -> bool:
    return b"".join(left) == b"".join(right)


def kept(tier: Tier, name: str, pieces: Pieces) -> bool:
    """Whether the tier has a record of exactly these bytes."""
    into = memory(*(piece.nbytes // PAGE_BYTES for piece in pieces))
    return tier.read(name, into) == sum(map(len, pieces)) and same(into, pieces)


def fill(tier: Tier, names: Sequence[str], num_pages: int = 1) -> None:
    """Write a record of so many pages under each name. Its number is the seed of its bytes."""
    for number, name in enumerate(names):
        assert tier.write(name, memory(num_pages, seed=number)), name


def all_kept(tier: Tier, names: Sequence[str], num_pages: int = 1) -> bool:
    """Whether all that `fill` wrote under these names is there."""
    return all(kept(tier, name, memory(num_pages, seed=number)) for number, name in enumerate(names))


def fails(call: Callable[[], object]) -> str:
    """The text of the TierError. Nothing keeps the error: with its traceback, pytest.raises makes a circle
    of references around memoryviews, and to collect those can crash CPython 3.11 (memory_clear)."""
    try:
        call()
    except TierError as error:
        text = str(error)
    else:
        raise AssertionError("no TierError")
    assert "\n" not in text
    return text


def working(call: Callable[[], object]) -> object:
    try:
        return call()
    except TierError:
        return None


def all_fail_in_time(calls: Sequence[Callable[[], object]], deadline_s: float) -> list[str]:
    """What `fails` says of calls at the same time. They get 5 s more, because the machine may be busy; the
    patience of the clients themselves is 10 s and much more."""
    texts: dict[int, str] = {}

    def run(number: int) -> None:
        with contextlib.suppress(AssertionError):
            texts[number] = fails(calls[number])

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    over = lambda: not any(thread.is_alive() for thread in threads)  # noqa: E731
    wait_until(over, deadline_s + 5, "every call is over")
    assert len(texts) == len(calls), f"only {sorted(texts)} failed with one clear error"
    return [texts[number] for number in range(len(calls))]


def fails_meanwhile(tier: Tier, store: Store, how: str, sentence: str, deadline_s: float) -> None:
    """A store that hangs or is killed fails each call at its deadline, with this sentence. When it is back,
    it is used again."""
    wait_until(lambda: working(lambda: tier.write("a", memory(2, seed=1))), 60)
    with store.failing(how):
        calls = [
            lambda: tier.read("a", memory(2)),
            lambda: tier.read("a", memory(1, 1)),
            lambda: tier.write("b", memory(256)),
            lambda: tier.present([f"{number}" for number in range(512)]),
            lambda: tier.remove(["a"]),
            lambda: tier.clear("a"),
        ]
        assert all(sentence in text for text in all_fail_in_time(calls, deadline_s))
    wait_until(lambda: working(lambda: tier.write("c", memory(3, seed=3))), 60)
    assert kept(tier, "c", memory(3, seed=3))


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run this for each number at the same time; raises what one of them raises."""
    with ThreadPoolExecutor(count) as pool:
        for ended in [pool.submit(work, number) for number in range(count)]:
            ended.result()


class InMemory:
    """A tier in a dict. `before` is called first in each read and write."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.before: Callable[[], object] = lambda: None
        self.closed = False

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        return [name in self.records for name in names]

    def read(self, name: str, pieces: Sequence[memoryview]) -> int:
        self.before()
        record = self.records.get(name, b"")
        if not fits(len(record), pieces):
            return 0
        spread(memoryview(record), first(pieces, len(record)))
        return len(record)

    def write(self, name: str, pieces: Sequence[memoryview]) -> bool:
        self.before()
        assert all(len(piece) % PAGE_BYTES == 0 for piece in pieces)
        self.records[name] = b"".join(pieces)
        return True

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.records.pop(name, None)

    def clear(self, prefix: str) -> None:
        self.remove([name for name in self.records if name.startswith(prefix)])

    def close(self) -> None:
        self.closed = True


class TierContract:
    """A subclass in a test file runs these with that file's fixture `tier`."""

    def test_a_record_comes_back_byte_for_byte(self, tier: Tier) -> None:
        for shape in [(1,), (1024,), (1, 1, 1), (16,) * 5, (3, 1, 500), (1,) * 1500]:
            written, name = memory(*shape, seed=len(shape)), f"aa/{len(shape)}.{sum(shape)}"
            assert tier.write(name, written), shape
            assert kept(tier, name, written), shape
            whole = memory(sum(shape))
            assert tier.read(name, whole) == sum(shape) * PAGE_BYTES, "other pieces of the same size in all"
            assert same(whole, written), shape

    def test_a_larger_record_is_none_and_a_smaller_one_is_where_the_pieces_begin(self, tier: Tier) -> None:
        assert tier.write("aa/512e", written := memory(2, 2, seed=1))
        for shape in [(1,), (3,), (1, 2)]:
            assert not tier.read("aa/512e", memory(*shape)), shape
        for shape in [(5,), (2, 2, 1), (1, 1, 1, 5), (3, 6), (1000,)]:
            assert tier.read("aa/512e", into := memory(*shape)) == 4 * PAGE_BYTES, shape
            assert b"".join(into).startswith(b"".join(written)), shape
        assert kept(tier, "aa/512e", written)

    def test_what_was_never_written_is_none(self, tier: Tier) -> None:
        assert tier.present([]) == []
        assert not any(tier.present(["ab/cd", "ab", "0"]))
        assert not tier.read("ab/cd", memory(1))
        tier.remove(["ab/cd", "ab"])
        tier.remove([])
        tier.clear("ab/")

    def test_a_second_write_replaces_the_first(self, tier: Tier) -> None:
        for seed, shape in enumerate([(4,), (4,), (2, 1), (9,)]):
            assert tier.write("aa/2", memory(*shape, seed=seed))
            assert kept(tier, "aa/2", memory(*shape, seed=seed))
        assert not tier.read("aa/2", memory(8))

    def test_a_removed_record_is_none(self, tier: Tier) -> None:
        names = [f"aa/{number:03x}" for number in range(300)]
        fill(tier, names[:37])
        assert list(tier.present(names)) == [True] * 37 + [False] * 263, "of a chain"
        tier.remove(names[1:50])
        assert list(tier.present(names)) == [True] + [False] * 299
        assert not tier.read(names[1], memory(1))
        assert all_kept(tier, names[:1])

    def test_clear_forgets_names_with_the_prefix_and_no_others(self, tier: Tier) -> None:
        inside = ["ab.-_/1", "ab.-_/2/3", "ab.-_/f" + "0" * 190]
        outside = ["ab.-0/1", "ab/1", "0ab.-_/1", "a", "abc-_/1"]
        fill(tier, outside)
        fill(tier, inside)
        tier.clear("ab.-_/")
        assert [tier.read(name, memory(1)) for name in inside] == [False] * 3
        assert all_kept(tier, outside)
        tier.clear("")
        assert not any(tier.read(name, memory(1)) for name in outside)

    def test_names_of_the_allowed_characters_work_and_no_other_reaches_the_store(self, tier: Tier) -> None:
        neighbours = {"0": "00", "a/": "a", "..": "...", "/": "-", "-": "_"}
        for name in ALLOWED:
            written = memory(1, 2, seed=len(name))
            assert tier.write(name, written), name
            assert kept(tier, name, written), name
            if other := neighbours.get(name):
                assert not tier.read(other, memory(1, 2)), name
            assert list(tier.present([name])) == [True], name
            tier.remove([name])
            assert not tier.read(name, memory(1, 2)), name
        for name in FORBIDDEN:
            for call in (tier.read, tier.write):
                assert "cannot name a record" in fails(partial(call, name, memory(1)))

    def test_threads_get_their_own_records(self, tier: Tier) -> None:
        def work(thread: int) -> None:
            for turn in range(12):
                shape = (1 + turn, 2) if turn % 2 else (3 + turn,)
                name, written = f"{thread}/{turn}", memory(*shape, seed=thread * 100 + turn)
                assert tier.write(name, written)
                assert kept(tier, name, written)
                tier.write("5a/5e", memory(2, 2, seed=thread))
                into = memory(4)
                mixed = tier.read("5a/5e", into) and not any(same(into, memory(4, seed=n)) for n in range(4))
                assert not mixed

        in_threads(4, work)
