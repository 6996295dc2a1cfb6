"""What every tier's adapter must do, as tests; and memory for records."""

import contextlib
import mmap
import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from lmcache_server.tiers.base import Tier, TierError

PAGE_BYTES = 4096
Pieces = list[memoryview]
NAMES = ["0", "..", "../..", "/", "//a", "a//b", "./a", "-", "_.-/0f", "a/", ".", "f" * 200, "/" * 200]


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
    return tier.read(name, into) and same(into, pieces)


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


def all_fail_in_time(calls: Sequence[Callable[[], object]], deadline_s: float) -> list[str]:
    """What `fails` says of calls at the same time. Generous, because the machine may be busy; the patience
    of the clients themselves is 10 s and much more."""
    texts: dict[int, str] = {}

    def run(number: int) -> None:
        with contextlib.suppress(AssertionError):
            texts[number] = fails(calls[number])

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    started_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s + 5)
    assert time.monotonic() - started_s < deadline_s + 5
    assert len(texts) == len(calls), f"only {sorted(texts)} failed with one clear error"
    return [texts[number] for number in range(len(calls))]


class TierContract:
    """A subclass in a test file runs these with that file's fixture `tier`."""

    @pytest.mark.parametrize(
        "shape", [(1,), (1024,), (1, 1, 1), (16,) * 5, (3, 1, 500), (1,) * 1500], ids=len
    )
    def test_a_record_comes_back_byte_for_byte(self, tier: Tier, shape: tuple[int, ...]) -> None:
        written, name = memory(*shape, seed=len(shape)), f"aa/{len(shape)}.{sum(shape)}"
        assert tier.write(name, written)
        assert kept(tier, name, written)
        whole = memory(sum(shape))
        assert tier.read(name, whole), "other pieces of the same size in all"
        assert same(whole, written)

    def test_a_record_of_another_size_is_none(self, tier: Tier) -> None:
        assert tier.write("aa/512e", memory(2, 2, seed=1))
        for shape in [(1,), (3,), (5,), (2, 2, 1), (1000,)]:
            assert not tier.read("aa/512e", memory(*shape)), shape
        assert kept(tier, "aa/512e", memory(2, 2, seed=1))

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
        assert not tier.read("aa/2", memory(4))

    def test_a_removed_record_is_none(self, tier: Tier) -> None:
        names = [f"aa/{number}" for number in range(200)]
        for number, name in enumerate(names[:3]):
            assert tier.write(name, memory(1, seed=number))
        assert tier.present(names)[:2] == [True, True]
        tier.remove(names[1:])
        assert list(tier.present(names)) == [True] + [False] * 199
        assert not tier.read(names[1], memory(1))
        assert kept(tier, names[0], memory(1, seed=0))

    def test_presence_of_a_chain_has_no_false_positive_after_its_end(self, tier: Tier) -> None:
        names = [f"cc/{number:03x}" for number in range(300)]
        for name in names[:37]:
            assert tier.write(name, memory(1))
        assert list(tier.present(names)) == [True] * 37 + [False] * 263

    def test_clear_forgets_names_with_the_prefix_and_no_others(self, tier: Tier) -> None:
        inside = ["ab.-_/1", "ab.-_/2/3", "ab.-_/f" + "0" * 190]
        outside = ["ab.-0/1", "ab/1", "0ab.-_/1", "a", "abc-_/1"]
        for number, name in enumerate(inside + outside):
            assert tier.write(name, memory(1, seed=number))
        tier.clear("ab.-_/")
        assert [tier.read(name, memory(1)) for name in inside] == [False] * 3
        assert all(kept(tier, name, memory(1, seed=3 + number)) for number, name in enumerate(outside))
        tier.clear("")
        assert not any(tier.read(name, memory(1)) for name in outside)

    @pytest.mark.parametrize(
        "name",
        ["0", "..", "../..", "/", "//a", "a//b", "./a", "-", "_.-/0f", "a/", ".", "f" * 200, "/" * 200],
    )
    def test_every_name_of_the_allowed_characters_works(self, tier: Tier, name: str) -> None:
        neighbours = {"0": "00", "a/": "a", "..": "...", "/": "-", "-": "_"}
        written = memory(1, 2, seed=len(name))
        assert tier.write(name, written)
        assert kept(tier, name, written)
        if other := neighbours.get(name):
            assert not tier.read(other, memory(1, 2))
        assert list(tier.present([name])) == [True]
        tier.remove([name])
        assert not tier.read(name, memory(1, 2))

    @pytest.mark.parametrize("name", ["", "f" * 201, "a b", "A", "g", "a\n", "a\0", "é", "*", "a\\"])
    def test_no_other_name_reaches_the_store(self, tier: Tier, name: str) -> None:
        for call in (lambda: tier.read(name, memory(1)), lambda: tier.write(name, memory(1))):
            assert "cannot name a record" in fails(call)

    def test_threads_get_their_own_records(self, tier: Tier) -> None:
        wrong: list[object] = []

        def work(thread: int) -> None:
            try:
                for turn in range(12):
                    shape = (1 + turn, 2) if turn % 2 else (3 + turn,)
                    name, written = f"{thread}/{turn}", memory(*shape, seed=thread * 100 + turn)
                    if not (tier.write(name, written) and kept(tier, name, written)):
                        wrong.append(name)
                    tier.write("5a/5e", memory(2, 2, seed=thread))
                    into = memory(4)
                    if tier.read("5a/5e", into) and not any(same(into, memory(4, seed=n)) for n in range(4)):
                        wrong.append("mixed")
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
