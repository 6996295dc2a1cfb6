"""A server with a tier in a real Mooncake Store, whose client is in a process that may die or hang."""

import contextlib
import ctypes
import functools
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import stores
from harness.exercise import exercise, new_engine, served
from harness.server import LMCacheServer
from harness.stores import Store
from harness.waiting import wait_until

from lmcache_server.l1.area import Area, shared_memory
from lmcache_server.options.tiers import urls
from lmcache_server.options.tiers.base import TierError
from lmcache_server.options.tiers.isolated import Isolated

KILLS = 10
MIB = 1 << 20
NAME = f"{'a' * 64}/{'b' * 64}."


@pytest.fixture
def mooncake(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Store, Store]]:
    with stores.mooncake(tmp_path, **getattr(request, "param", {})) as both:
        yield both


def url(master: Store, more: str = "") -> str:
    return f"mooncake://127.0.0.1:{master.port}{more}"


@contextlib.contextmanager
def opened(text: str) -> Iterator[tuple[Isolated, memoryview]]:
    """The tier by itself, and what it takes for L1."""
    descriptor, mapping = shared_memory("l1", 64 * MIB)
    l1 = memoryview(mapping)
    tier = urls.open_tier(
        urls.parse(text), Area(descriptor, 0, ctypes.addressof(ctypes.c_char.from_buffer(l1)), 64 * MIB)
    )
    assert isinstance(tier, Isolated)
    with contextlib.closing(tier):
        yield tier, l1
    os.close(descriptor)


def helper(pid: int) -> int:
    """The process of the client of this one, 0 if there is none."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                if b"lmcache_server.options.tiers.helper" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    return 0


def is_ready(pid: int) -> bool:
    try:
        return "lmcache-l1" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return True


def restarts(server: LMCacheServer) -> float:
    return server.metrics()['lmcache_tier_helper_restarts_total{tier="1"}']


def test_records_come_back_from_l1_and_from_elsewhere_and_others_do_not(
    mooncake: tuple[Store, Store],
) -> None:
    with opened(url(mooncake[0])) as (tier, l1):
        l1[: 8 * MIB] = os.urandom(8 * MIB)
        end, back = (memoryview(bytearray(4096)) for _ in range(2))
        end[:] = os.urandom(4096)
        # In runs of frames, in single frames, and with nothing in L1, as what is encrypted.
        cases = {
            "0": [l1[: 4 * MIB], l1[6 * MIB : 7 * MIB], end],
            "1": [l1[:65536], l1[MIB : MIB + 65536], end],
            "2": [memoryview(bytearray(os.urandom(3 * MIB)))],
        }
        for number, pieces in cases.items():
            read = [memoryview(bytearray(piece.nbytes)) for piece in pieces]
            if number != "2":
                read = [*(l1[32 * MIB + each * 8 * MIB :][: p.nbytes] for each, p in enumerate(pieces)), back]
                read.pop(-2)
            assert not tier.read(NAME + number, read)
            assert tier.write(NAME + number, pieces)
            assert tier.read(NAME + number, read)
            assert list(map(bytes, read)) == list(map(bytes, pieces))
        assert list(tier.present([NAME + "0", NAME + "3", NAME + "2"])) == [True, False, True]
        assert not tier.read(NAME + "0", [l1[: 4 * MIB]]), "it is longer"
        assert not tier.read(NAME + "1", [l1[: 4 * MIB]]), "it is shorter"
        tier.remove([NAME + "0", NAME + "3"])
        assert list(tier.present([NAME + "0", NAME + "1"])) == [False, True]
        tier.clear("b")
        assert tier.present([NAME + "1"])[0]
        tier.clear("a")
        assert not any(tier.present([NAME + "1", NAME + "2"]))


@pytest.mark.parametrize("mooncake", [{"client_ttl": "2"}], indirect=True)
def test_memory_that_this_server_gives_outlives_the_client_and_comes_back(
    mooncake: tuple[Store, Store],
) -> None:
    mooncake[1].kill()  # the other memory
    with opened(url(mooncake[0], "?segment_gb=0.1")) as (tier, l1):
        l1[:MIB] = os.urandom(MIB)

        def is_kept() -> bool:
            # Until the master has noticed that the other memory is gone, it still chooses that at times.
            with contextlib.suppress(TierError):
                return tier.write(NAME + "0", [l1[:MIB]]) and tier.read(NAME + "0", [l1[MIB : 2 * MIB]])
            tier.remove([NAME + "0"])
            return False

        wait_until(is_kept)
        assert tier._process is not None
        assert tier._holder is not None
        os.kill(tier._process.process.pid, signal.SIGKILL)
        assert tier.read(NAME + "0", [l1[MIB : 2 * MIB]])
        assert l1[:MIB] == l1[MIB : 2 * MIB]
        old = tier._holder.process.pid
        os.kill(old, signal.SIGKILL)

        def is_back() -> bool:
            tier.present([NAME])
            return tier._holder is not None and tier._holder.process.pid != old

        wait_until(is_back)
        assert tier.restarts >= 2


def test_a_client_that_cannot_be_opened_leaves_no_other_behind(mooncake: tuple[Store, Store]) -> None:
    """The server opens it again and again, and each time that also begins with the memory that it gives."""
    text = url(mooncake[0], "?segment_gb=0.1")
    with open("/dev/null", "r+b", buffering=0) as no_memory, pytest.raises(TierError, match="No such device"):
        urls.open_tier(urls.parse(text), Area(no_memory.fileno(), 0, 0, MIB))
    assert not helper(os.getpid())


@pytest.mark.parametrize("mooncake", [{"default_kv_lease_ttl": "1"}], indirect=True)
def test_a_lease_that_runs_out_is_a_failed_call_or_the_right_bytes(mooncake: tuple[Store, Store]) -> None:
    with opened(url(mooncake[0])) as (tier, l1):
        l1[: 16 * MIB] = os.urandom(16 * MIB)
        assert tier.write(NAME + "0", [l1[: 16 * MIB]])

        def reads_in_vain() -> None:
            for _ in range(100):
                assert tier.read(NAME + "0", [l1[16 * MIB : 32 * MIB]])
                assert l1[: 16 * MIB] == l1[16 * MIB : 32 * MIB]

        with pytest.raises(TierError, match="default_kv_lease_ttl"):
            reads_in_vain()


def test_a_holder_that_hangs_costs_a_bounded_time_and_no_frame(mooncake: tuple[Store, Store]) -> None:
    master, holder = mooncake
    with LMCacheServer(l1_size_gb=0.2, tier=url(master)) as server:
        assert served(server, "first", 1) == 0
        server.wait_until_written()
        server.restart()
        engine = new_engine(server.address, "during")
        with holder.failing("hangs"):
            for number in (1, 2, 3):  # the master says that it has the first
                exercise(engine, number)
            wait_until(lambda: restarts(server) > 0, 60)
        engine.close()
        server.wait_at_rest(timeout_s=60)
        wait_until(lambda: not server.tier()["failing"], 90)
        written = server.tier()["written_objects"]["written"]
        numbers = itertools.count(10)

        def writes_again() -> bool:
            assert served(server, "after", next(numbers)) == 0
            return bool(server.tier()["written_objects"]["written"] > written)

        wait_until(writes_again)


def test_a_helper_that_is_killed_again_and_again_costs_no_frame(tmp_path: Path) -> None:
    with (
        stores.mooncake(tmp_path, 512 * MIB) as (master, _),
        LMCacheServer(l1_size_gb=0.1, tier=url(master)) as server,
    ):
        pid, ended = server.pid, threading.Event()
        loaded: list[int] = []

        def work(name: int) -> None:
            engine = new_engine(server.address, f"{name}")
            for number in itertools.cycle(range(name * 100, name * 100 + 6)):
                try:
                    loaded.append(exercise(engine, number))
                except SystemExit as wrong_byte:
                    raise AssertionError(f"prompt {number}") from wrong_byte
                if ended.is_set():
                    break
            engine.close()

        pool = ThreadPoolExecutor(2)
        workers = [pool.submit(work, number) for number in (1, 2)]
        last = 0
        chance = random.Random(0)
        try:
            for number in itertools.count():
                if number >= KILLS and any(loaded) and server.tier()["read_objects"]["read"]:
                    break
                assert not any(worker.done() for worker in workers), "a client has ended by itself"
                last = wait_until(lambda: found if (found := helper(server.pid)) != last else 0, 60)  # noqa: B023
                wait_until(functools.partial(is_ready, last), 60)
                time.sleep(chance.choice((0.0, 0.05, 0.1)))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(last, signal.SIGKILL)
        finally:
            ended.set()
            for worker in workers:
                worker.result()
        assert server.pid == pid
        server.wait_at_rest(timeout_s=60)
        assert restarts(server) >= KILLS // 2
