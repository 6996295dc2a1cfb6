"""What L1 cannot hold or has lost comes back from a tier, byte for byte."""

import contextlib
import functools
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.exercise import exercise, is_served, keys_of, new_engine, restored, served, wait_until_found
from harness.rawclient import RawEngine
from harness.server import LMCacheServer, refusal
from harness.waiting import wait_until
from msgspec import structs

from lmcache_client.contract.messages import Found
from lmcache_client.engine import expect

PROMPTS = 6
"""Each takes 22 MiB of L1."""


def wait_until_idle(server: LMCacheServer) -> None:
    wait_until(lambda: server.tier()["waiting_objects"] == 0)


def wait_until_frames_are_given_back(server: LMCacheServer) -> None:
    server.wait_until(lambda l1: l1["reserved_bytes"] == 0)


def the_coldest_is_written(server: LMCacheServer) -> bool:
    """The coldest quarter of L1 is kept written, in whole chunks."""
    l1, gone = server.status()["l1"], server.metrics()["lmcache_evicted_bytes_total"]
    return bool(server.tier()["written_bytes"] >= gone + min(l1["total_bytes"] // 4, l1["stored_bytes"]))


def records(directory: Path) -> list[Path]:
    found = []
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the server may be removing it
            found += [path] if path.is_file() and path.stat().st_size > 1 << 20 else []
    return found


@pytest.mark.parametrize("write", ["commit", "cold"])
def test_what_l1_evicts_and_what_a_server_had_before_its_end_come_back(write: str, tmp_path: Path) -> None:
    """More prompts than L1 holds: each comes back when its turn comes again, and from the next server."""
    with LMCacheServer(l1_size_gb=0.1, tier=f"dir://{tmp_path}/tier?size_gb=1&write={write}") as server:
        engine = new_engine(server.address, "engine")
        for number in range(PROMPTS):
            assert exercise(engine, number) == 0
            wait_until_idle(server)
            if write == "cold":
                wait_until(lambda: the_coldest_is_written(server))
        server.wait_until(lambda _l1: server.metrics()["lmcache_evicted_chunks_total"] > 0)
        for number in range(PROMPTS):
            assert restored(engine, number) > 0, f"prompt {number} was lost"
            wait_until_idle(server)
        assert server.tier()["read_objects"]["read"] > 0
        wait_until_frames_are_given_back(server)
        engine.close()
        assert server.terminate() == 0
        server.start()
        second = new_engine(server.address, "second")
        assert restored(second, PROMPTS - 1) == 3 * second.chunk_size
        metrics = server.metrics()
        if not metrics['lmcache_tier_fetches_total{outcome="late"}']:
            assert metrics["lmcache_tier_hit_tokens_total"] == 3 * second.chunk_size
        objects = server.tier()["read_objects"]
        assert objects.pop("read") > 0
        assert not any(objects.values())
        wait_until_frames_are_given_back(server)


def test_a_second_server_serves_what_the_first_has_stored_and_encrypted(tmp_path: Path) -> None:
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_bytes(os.urandom(32))
    url = f"dir://{tmp_path}/tier?size_gb=1&shared=1"
    flags = {"l1_size_gb": 0.1, "tier": f"{url}&key_file={tmp_path}/key"}
    with LMCacheServer(**flags) as one, LMCacheServer(**flags) as two:
        assert served(one, "one", 1) == 0
        wait_until_idle(one)
        assert is_served(two, "two", 1)
        two.terminate()
        two.flags["tier"] = url
        two.start()
        assert served(two, "without the key", 1) == 0
        assert not any(two.tier()["read_objects"].values()), "it takes another's records for no damaged ones"


def test_no_damaged_record_is_served(tmp_path: Path) -> None:
    """Changed, cut short, made longer, or in another's place."""
    directory, draw = tmp_path / "tier", random.Random(1)
    with LMCacheServer(l1_size_gb=0.1, tier=f"dir://{directory}?size_gb=1") as server:
        for number, way in enumerate(("changed", "cut", "longer", "swapped")):
            assert served(server, f"store {way}", number) == 0
            server.terminate()
            damage(records(directory), way, draw)
            server.start()
            assert served(server, f"load {way}", number) == 0, way
            wait_until_frames_are_given_back(server)
            objects = server.tier()["read_objects"]
            assert objects["damaged"] + objects["gone"] > 0, way
            wait_until_idle(server)
            server.clear()
            wait_until(lambda: not records(directory), what="a clear reaches the tier")


def damage(files: list[Path], way: str, draw: random.Random) -> None:
    contents = [path.read_bytes() for path in files]
    for number, (path, content) in enumerate(zip(files, contents, strict=True)):
        if way == "swapped":
            # The next one of the same size.
            others = [
                each for each in contents[number + 1 :] + contents[:number] if len(each) == len(content)
            ]
            path.write_bytes(others[0] if others else content)
        elif way == "changed":
            changed = bytearray(content)
            changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(changed)
        else:
            path.write_bytes(content[:-4096] if way == "cut" else content + bytes(4096))


def test_what_somebody_put_in_place_of_records_costs_only_their_prompt(tmp_path: Path) -> None:
    """A FIFO that nobody writes to would hold a thread for ever, and errors in a row would close the tier."""
    directory = tmp_path / "tier"
    with LMCacheServer(l1_size_gb=0.2, tier=f"dir://{directory}?size_gb=1&shared=1") as server:
        for number in (1, 2):
            assert served(server, f"before {number}", number) == 0
            wait_until_idle(server)
            if number == 1:
                bad = records(directory)
        server.kill()
        links = functools.partial(os.symlink, "/dev/zero")
        for path, make in zip(bad, itertools.cycle((os.mkfifo, os.mkdir, links)), strict=False):
            path.unlink()
            make(path)
        server.start()
        assert restored(new_engine(server.address, "of the other"), 2) > 0
        engine = new_engine(server.address, "of these")
        wait_until(lambda: exercise(engine, 1) > 0, what="the prompt was stored again")
        wait_until_idle(server)
        assert not server.tier()["failing"]
        server.restart()
        for number in (1, 2):
            assert restored(new_engine(server.address, f"after {number}"), number) > 0
        assert server.terminate() == 0


def test_a_tier_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_bytes(b"6b" * 31)
    for url, *parts in (
        (f"dir://{tmp_path}/file?size_gb=1", "cannot use the directory"),
        (f"dir://{tmp_path}/tier?size_gb=1&key_file={tmp_path}/none", "cannot read key_file", "there is no"),
        (f"dir://{tmp_path}/tier?size_gb=1&key_file={tmp_path}/key", "cannot read key_file", "have 32 bytes"),
    ):
        said = refusal(l1_size_gb=0.01, tier=url)
        assert said.startswith("lmcache: ")
        assert all(part in said for part in parts)


def test_nothing_of_a_self_test_or_a_bench_goes_to_a_tier(tmp_path: Path) -> None:
    tiers = tuple(f"dir://{tmp_path}/{write}?size_gb=1&write={write}" for write in ("commit", "cold"))
    with LMCacheServer(l1_size_gb=0.2, tier=tiers) as server:
        bench = server.cli("bench", "--seconds", "1", "--layers", "2", "--page-kb", "16")
        assert bench.returncode == 0, bench.stderr
        assert server.get("/selftest")
        server.terminate()
    assert not [path for path in tmp_path.glob("*/*/*") if path.is_file()], "no record lies in a subdirectory"


def resume_tokens(engine: RawEngine, number: int, prefill_tokens_s: int, num_tokens: int = 0) -> int:
    """What a lookup of a prompt of `exercise` finds, of an engine that computes so fast."""
    asked = engine.lookup_message(keys_of(engine, number))
    changed = {"prefill_tokens_s": prefill_tokens_s, "num_tokens": num_tokens or asked.num_tokens}
    found = engine._scheduler.lookup(structs.replace(asked, **changed), 60)
    return int(expect(engine.scheduler.wait(found), Found).resume_tokens)


def fetches(server: LMCacheServer) -> list[float]:
    metrics = server.metrics()
    name = 'lmcache_tier_fetches_total{outcome="%s"}'
    return [metrics[name % outcome] for outcome in ("ended", "late", "slow")]


@contextlib.contextmanager
def restarted(tmp_path: Path, prompts: int, more: str = "") -> Iterator[tuple[LMCacheServer, RawEngine]]:
    """A server whose tier has so many prompts, which it has not read yet, and an engine."""
    url = f"dir://{tmp_path}/tier?size_gb=1&write=commit{more}"
    with LMCacheServer(l1_size_gb=0.1, tier=url) as server:
        for number in range(prompts):
            assert served(server, f"first {number}", number) == 0
        wait_until_idle(server)
        server.restart()
        yield server, new_engine(server.address, "second")


def test_a_read_that_waits_for_its_limit_delays_no_other_lookup(tmp_path: Path) -> None:
    """The limit also tells how long a fetch will take. Reads of 22 MiB take more than a minute here."""
    with restarted(tmp_path, 1, "&read_mb_s=0.3") as (server, engine):
        assert resume_tokens(engine, 0, prefill_tokens_s=100, num_tokens=200_000) == 0
        assert fetches(server) == [1, 0, 1]
        assert resume_tokens(engine, 9, prefill_tokens_s=0, num_tokens=200_000) == 0
        assert fetches(server) == [2, 0, 1]


def test_a_fetch_that_takes_longer_than_computing_is_not_waited_for(tmp_path: Path) -> None:
    """While the speed of a tier is unknown, requests wait for a part of what they save."""
    with restarted(tmp_path, 2) as (server, engine):
        tokens = 3 * engine.chunk_size
        assert resume_tokens(engine, 0, 10**12) == 0
        assert fetches(server) == [1, 0, 1]
        wait_until(lambda: resume_tokens(engine, 0, 10**12) == tokens)
        assert exercise(engine, 0) == tokens
        late = lambda: server.status()["namespaces"][0]["missed"]["tier_late"]  # noqa: E731
        before, too_late, read = fetches(server), late(), server.tier()["read_objects"]["read"]
        assert resume_tokens(engine, 1, 10**12) == 0
        assert fetches(server) == [before[0] + 1, 0, before[2] + 1]
        assert (server.tier()["read_objects"]["read"], late() - too_late) == (read, tokens)
        asked = engine.lookup_message(keys_of(engine, 1))
        asked = structs.replace(asked, prefill_tokens_s=10**12, why=True)
        found = expect(engine.scheduler.wait(engine._scheduler.lookup(asked, 60)), Found)
        assert found.missed == (("tier_late", tokens),)
        wait_until(lambda: resume_tokens(engine, 1, 1) == tokens, what="all of it is in L1")
        assert exercise(engine, 1) == tokens, "and its bytes are right"


def test_fetches_that_fill_l1_evict_nothing_that_is_not_written(tmp_path: Path) -> None:
    """The tier takes only what is cold. L1 holds five of ten prompts."""
    with LMCacheServer(l1_size_gb=0.115, tier=f"dir://{tmp_path}/tier?size_gb=1&write=cold") as server:
        engine = new_engine(server.address, "engine")
        for number in range(10):
            assert exercise(engine, number) == 0
            wait_until_idle(server)
        whole = 3 * engine.chunk_size
        for number in (*range(10), *range(10)):
            wait_until_found(engine, number)
            wait_until_idle(server)
        for number in range(10):
            assert restored(engine, number) == whole, "and the bytes are right"
            wait_until_idle(server)
        assert server.tier()["read_objects"]["read"] > 0
        assert server.tier()["written_objects"]["evicted"] == 0
