"""What L1 cannot hold or has lost comes back from a tier, byte for byte."""

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.exercise import exercise, new_engine, restored, wait_until_found
from harness.rawclient import RawEngine, chain
from harness.server import LMCacheServer
from harness.waiting import wait_until
from msgspec import structs

from lmcache_client.contract.messages import Found
from lmcache_client.engine import expect

PROMPTS = 8
"""Each takes 22 MiB of L1."""


def tier_of(server: LMCacheServer, number: int = 0) -> Any:
    return server.status()["tiers"][number]


def wait_until_written(server: LMCacheServer, number: int = 0) -> None:
    wait_until(lambda: tier_of(server, number)["waiting_objects"] == 0)


def the_coldest_is_written(server: LMCacheServer) -> bool:
    """The coldest quarter of L1 is kept written, in whole chunks."""
    l1, gone = server.status()["l1"], server.metrics()["lmcache_evicted_bytes_total"]
    return bool(tier_of(server)["written_bytes"] >= gone + min(l1["total_bytes"] // 4, l1["stored_bytes"]))


def records(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]


@pytest.fixture
def engines() -> Iterator[Any]:
    """A function that makes an engine at a server's address."""
    made: list[RawEngine] = []

    def make(server: LMCacheServer, name: str) -> RawEngine:
        made.append(new_engine(server.address, name))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def assert_at_rest(server: LMCacheServer) -> None:
    wait_until(lambda: server.status()["l1"]["reserved_bytes"] == 0)


@pytest.mark.parametrize("write", ["commit", "cold"])
def test_a_restarted_server_serves_what_the_one_before_it_had(
    write: str, tmp_path: Path, engines: Any
) -> None:
    url = f"dir://{tmp_path}/tier?size_gb=1&write={write}"
    with LMCacheServer(l1_size_gb=0.2, tier=url) as server:
        first = engines(server, "first")
        assert exercise(first, 1) == 0
        server.terminate()
        server.start()
        second = engines(server, "second")
        assert restored(second, 1) == 3 * second.chunk_size
        tier = tier_of(server)
        assert tier["read_objects"].pop("read") > 0
        assert not any(tier["read_objects"].values())
        assert_at_rest(server)


@pytest.mark.parametrize("write", ["commit", "cold"])
def test_what_l1_evicts_comes_back(write: str, tmp_path: Path, engines: Any) -> None:
    """More prompts than L1 holds: each comes back when its turn comes again."""
    url = f"dir://{tmp_path}/tier?size_gb=1&write={write}"
    with LMCacheServer(l1_size_gb=0.1, tier=url) as server:
        engine = engines(server, "engine")
        for number in range(PROMPTS):
            assert exercise(engine, number) == 0
            wait_until_written(server)
            if write == "cold":
                wait_until(lambda: the_coldest_is_written(server))
        server.wait_until(lambda _l1: server.metrics()["lmcache_evicted_chunks_total"] > 0)
        for number in range(PROMPTS):
            assert restored(engine, number) > 0, f"prompt {number} was lost"
            wait_until_written(server)
        assert tier_of(server)["read_objects"]["read"] > 0
        assert_at_rest(server)


def test_a_second_server_serves_what_the_first_has_stored(tmp_path: Path, engines: Any) -> None:
    url = f"dir://{tmp_path}/tier?size_gb=1&shared=1"
    with LMCacheServer(l1_size_gb=0.2, tier=url) as one, LMCacheServer(l1_size_gb=0.2, tier=url) as two:
        assert exercise(engines(one, "one"), 1) == 0
        wait_until_written(one)
        other = engines(two, "two")
        assert restored(other, 1) == 3 * other.chunk_size


def test_no_damaged_record_is_served(tmp_path: Path, engines: Any) -> None:
    """Each byte region of a record: the first page, the middle, the payload's end, the end block, the
    trailer; and a record cut short, made longer, or in another's place."""
    directory, draw = tmp_path / "tier", random.Random(1)
    url = f"dir://{directory}?size_gb=1"
    with LMCacheServer(l1_size_gb=0.2, tier=url) as server:
        ways = [
            "first",
            "middle",
            "payload end",
            "end block",
            "trailer",
            "digest",
            "cut",
            "longer",
            "swapped",
        ]
        for number, way in enumerate(ways):
            assert exercise(engines(server, f"store {way}"), number) == 0
            server.terminate()
            files = records(directory)
            damage(files, way, draw)
            server.start()
            engine = engines(server, f"load {way}")
            assert exercise(engine, number) == 0, way
            objects = tier_of(server)["read_objects"]
            assert objects["damaged"] + objects["gone"] > 0, way
            assert_at_rest(server)
            result = server.cli("clear")
            assert result.returncode == 0, result.stderr
            assert not records(directory), "a clear reaches the tier"


def damage(files: list[Path], way: str, draw: random.Random) -> None:
    if way == "swapped":
        same = [path for path in files if path.stat().st_size == files[0].stat().st_size]
        contents = [path.read_bytes() for path in same]
        for path, content in zip(same, contents[1:] + contents[:1], strict=True):
            path.write_bytes(content)
        return
    for path in files:
        content = bytearray(path.read_bytes())
        size = len(content)
        if way in ("cut", "longer"):
            path.write_bytes(content[:-4096] if way == "cut" else content + bytes(4096))
            continue
        start, stop = {
            "first": (0, 4096),
            "middle": (size // 3, size // 2),
            "payload end": (size - 8192, size - 4096),
            "end block": (size - 4096, size - 128),
            "trailer": (size - 104, size - 16),
            "digest": (size - 16, size),
        }[way]
        content[draw.randrange(start, stop)] ^= 1 << draw.randrange(8)
        path.write_bytes(content)


@pytest.mark.parametrize("shared", [0, 1])
def test_what_somebody_put_in_place_of_records_costs_only_their_prompt(
    shared: int, tmp_path: Path, engines: Any
) -> None:
    """A FIFO that nobody writes to would hold a thread for ever, and errors in a row would close the tier."""
    directory = tmp_path / "tier"
    with LMCacheServer(l1_size_gb=0.2, tier=f"dir://{directory}?size_gb=1&shared={shared}") as server:
        for number in (1, 2):
            assert exercise(engines(server, f"before {number}"), number) == 0
            wait_until_written(server)
            if number == 1:
                bad = records(directory)
        server.kill()
        for path, make in zip(bad, itertools.cycle((os.mkfifo, os.mkdir, _link)), strict=False):
            path.unlink()
            make(path)
        server.start()
        assert restored(engines(server, "of the other"), 2) > 0
        engine = engines(server, "of these")
        wait_until(lambda: exercise(engine, 1) > 0, what="the prompt was stored again")
        wait_until_written(server)
        assert not tier_of(server)["failing"]
        server.restart()
        for number in (1, 2):
            assert restored(engines(server, f"after {number}"), number) > 0
        assert server.terminate() == 0


def _link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def test_a_killed_server_leaves_no_half_record(tmp_path: Path, engines: Any) -> None:
    url = f"dir://{tmp_path}/tier?size_gb=1&write=commit"
    with LMCacheServer(l1_size_gb=0.2, tier=url) as server:
        for number in range(6):
            engine = engines(server, f"engine {number}")
            for prompt in range(3):
                exercise(engine, prompt)
            server.restart()
        engine = engines(server, "last")
        for prompt in range(3):
            exercise(engine, prompt)
        assert tier_of(server)["read_objects"]["damaged"] == 0
        assert_at_rest(server)


def test_a_directory_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(RuntimeError, match="cannot use the directory"),
        LMCacheServer(tier=f"dir://{tmp_path}/file?size_gb=1"),
    ):
        pass


def test_servers_with_other_keys_leave_each_other_s_records_where_they_are(
    tmp_path: Path, engines: Any
) -> None:
    """A restart with the same key serves them, one with another key or none does not see them."""
    keys = {name: tmp_path / name for name in ("right", "wrong")}
    for name, path in keys.items():
        path.touch(0o600)
        path.write_bytes(name[:1].encode() * 32)
    plain = f"dir://{tmp_path}/tier?size_gb=1&write=commit"
    urls = {name: f"{plain}&key_file={path}" for name, path in keys.items()} | {"none": plain}
    with LMCacheServer(l1_size_gb=0.2, tier=urls["right"]) as server:
        assert exercise(engines(server, "first"), 1) == 0
        wait_until_written(server)
        right = {path: path.read_bytes() for path in records(tmp_path / "tier")}
        assert right
        for turn, (name, tokens) in enumerate([("right", 768), ("wrong", 0), ("none", 0), ("right", 768)]):
            server.terminate()
            server.flags["tier"] = urls[name]
            server.start()
            engine = engines(server, f"{turn} with key {name}")
            assert (restored if tokens else exercise)(engine, 1) == tokens
            read = tier_of(server)["read_objects"]
            assert bool(read.pop("read")) == bool(tokens)
            assert not any(read.values()), "nobody takes another's records for damaged"
            assert_at_rest(server)
        assert {path: path.read_bytes() for path in right} == right


@pytest.mark.parametrize(
    ("content", "said"), [(None, "No such file or directory"), (b"6b" * 31, "must have 32 bytes")]
)
def test_a_key_file_that_is_none_ends_the_start(content: bytes | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "key").touch(0o600)
        (tmp_path / "key").write_bytes(content)
    server = LMCacheServer(tier=f"dir://{tmp_path}/tier?size_gb=1&key_file={tmp_path}/key")
    with pytest.raises(RuntimeError, match="cannot read key_file"), server:
        pass
    errors = [line for line in server.log.read_text().splitlines() if "lmcache: " in line]
    assert len(errors) == 1
    assert said in errors[0]
    assert "Traceback" not in server.log.read_text()


def test_nothing_of_a_self_test_or_a_bench_goes_to_a_tier(tmp_path: Path) -> None:
    for write in ("commit", "cold"):
        url = f"dir://{tmp_path}/{write}?size_gb=1&write={write}"
        with LMCacheServer(l1_size_gb=0.3, tier=url) as server:
            bench = server.cli("bench", "--seconds", "3")
            assert bench.returncode == 0, bench.stderr
            assert server.get("/selftest")
            server.terminate()
            stored = [
                path for path in (tmp_path / write).rglob("*") if path.is_file() and path.stat().st_size
            ]
            assert {path.parent for path in stored} <= {tmp_path / write}, "no record lies in a subdirectory"


def resume_tokens(engine: RawEngine, number: int, prefill_tokens_s: int, num_tokens: int = 0) -> int:
    """What a lookup of a prompt of `exercise` finds, of an engine that computes so fast."""
    tokens = 3 * engine.chunk_size
    asked = engine.lookup_message(
        chain(range(number * 100_000, number * 100_000 + tokens), engine.chunk_size)
    )
    changed = {"prefill_tokens_s": prefill_tokens_s, "num_tokens": num_tokens or asked.num_tokens}
    found = engine._scheduler.lookup(structs.replace(asked, **changed), 60)
    return int(expect(engine.scheduler.wait(found), Found).resume_tokens)


def fetches(server: LMCacheServer) -> dict[str, float]:
    metrics = server.metrics()
    return {
        outcome: metrics[f'lmcache_tier_fetches_total{{outcome="{outcome}"}}']
        for outcome in ("ended", "late", "slow")
    }


def test_while_the_speed_of_a_tier_is_unknown_requests_wait_for_a_part_of_what_they_save(
    tmp_path: Path, engines: Any
) -> None:
    with LMCacheServer(l1_size_gb=0.2, tier=f"dir://{tmp_path}/tier?size_gb=1&write=commit") as server:
        assert exercise(engines(server, "first"), 0) == 0
        wait_until_written(server)
        server.restart()
        second = engines(server, "second")
        assert resume_tokens(second, 0, 10**12) == 0
        assert fetches(server) == {"ended": 1, "late": 0, "slow": 1}
        wait_until(lambda: resume_tokens(second, 0, 10**12) == 3 * second.chunk_size)


def test_a_read_that_waits_for_its_limit_delays_no_other_lookup(tmp_path: Path, engines: Any) -> None:
    """The limit also tells how long a fetch will take. Reads of 22 MiB take more than a minute here."""
    url = f"dir://{tmp_path}/tier?size_gb=1&write=commit&read_mb_s=0.3"
    with LMCacheServer(l1_size_gb=0.2, tier=url) as server:
        assert exercise(engines(server, "first"), 0) == 0
        wait_until_written(server)
        server.restart()
        second = engines(server, "second")
        assert resume_tokens(second, 0, prefill_tokens_s=100, num_tokens=200_000) == 0
        assert fetches(server) == {"ended": 1, "late": 0, "slow": 1}
        assert resume_tokens(second, 9, prefill_tokens_s=0, num_tokens=200_000) == 0
        assert fetches(server) == {"ended": 2, "late": 0, "slow": 1}


def test_a_fetch_that_takes_longer_than_computing_is_not_waited_for(tmp_path: Path, engines: Any) -> None:
    url = f"dir://{tmp_path}/tier?size_gb=1&write=commit"
    with LMCacheServer(l1_size_gb=0.2, tier=url) as server:
        first = engines(server, "first")
        for number in range(2):
            assert exercise(first, number) == 0
        wait_until_written(server)
        server.restart()
        second = engines(server, "second")
        assert exercise(second, 0) == 3 * second.chunk_size, "no speed is known yet"
        read = tier_of(server)["read_objects"]["read"]
        assert resume_tokens(second, 1, 10**12) == 0
        assert fetches(server) == {"ended": 2, "late": 0, "slow": 1}
        assert tier_of(server)["read_objects"]["read"] == read
        (namespace,) = server.status()["namespaces"]
        assert namespace["missed"]["tier_late"] == 3 * second.chunk_size
        keys = chain(range(100_000, 100_000 + 3 * second.chunk_size), second.chunk_size)
        asked = structs.replace(second.lookup_message(keys), prefill_tokens_s=10**12, why=True)
        found = expect(second.scheduler.wait(second._scheduler.lookup(asked, 60)), Found)
        assert found.missed == (("tier_late", 3 * second.chunk_size),)
        assert resume_tokens(second, 1, 1) == 3 * second.chunk_size
        assert exercise(second, 1) == 3 * second.chunk_size, "and its bytes are right"


def test_fetches_that_fill_l1_evict_nothing_that_is_not_written(tmp_path: Path, engines: Any) -> None:
    """The tier takes only what is cold. L1 holds five of ten prompts."""
    with LMCacheServer(l1_size_gb=0.115, tier=f"dir://{tmp_path}/tier?size_gb=1&write=cold") as server:
        engine = engines(server, "engine")
        rests = lambda: not tier_of(server)["waiting_objects"]  # noqa: E731
        for number in range(10):
            assert exercise(engine, number) == 0
            wait_until(rests, 60)
        whole = 3 * engine.chunk_size
        for number in (*range(10), *range(10)):
            wait_until_found(engine, number)
            wait_until(rests, 60)
        for number in range(10):
            assert restored(engine, number) == whole, "and the bytes are right"
            wait_until(rests, 60)
        assert tier_of(server)["read_objects"]["read"] > 0
        assert tier_of(server)["written_objects"]["evicted"] == 0
