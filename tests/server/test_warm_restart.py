"""A warm restart: what a server stored is served by the next one, exactly, or nothing is."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import msgspec
import numpy as np
import pytest
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import wait_until
from numpy.typing import NDArray

from lmcache_client.channel import ChannelError
from lmcache_server.core.packed import PackedObjects
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.l1 import restart
from lmcache_server.l1.file import HEADER_BYTES, L1File

GB_BYTES = 1 << 30
GROUPS = (group(), group("sliding_window", 16, 40, layers=1))
CHUNKS = 4
CHUNK_FRAMES = 3
"""Of both groups together."""
NUM_BLOCKS = 1 + 3 * 2 * CHUNKS * 16


@pytest.fixture
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    on_disk = getattr(request, "param", "memory") == "disk"
    file = (tmp_path if on_disk else Path("/dev/shm")) / f"lmcache-test-{os.getpid()}.l1"
    yield file
    file.unlink(missing_ok=True)


@pytest.fixture
def running(path: Path) -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=0.05, l1_path=path) as server:
        yield server


def new_engine(server: LMCacheServer) -> RawEngine:
    return RawEngine(f"ipc://{server.runtime_dir}/{server.port}.sock", GROUPS, NUM_BLOCKS).start()


@pytest.fixture
def connect() -> Iterator[Callable[[LMCacheServer], RawEngine]]:
    engines: list[RawEngine] = []

    def start(server: LMCacheServer) -> RawEngine:
        engines.append(new_engine(server))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def reconnect(engine: RawEngine, server: LMCacheServer) -> None:
    """Wait until the engine has registered with this life of the server."""
    boot_id, channels = server.status()["boot_id"], (engine.worker, engine.scheduler)
    wait_until(
        lambda: all(each.ready and each.boot_id and each.boot_id.hex() == boot_id for each in channels),
        what="the engine has registered with this server",
    )


class Prompt:
    """One of three prompts of an engine, and the pages that were computed for it."""

    def __init__(self, engine: RawEngine, number: int = 0) -> None:
        self.engine = engine
        size = engine.chunk_size
        self.keys = chain([number] * (CHUNKS * size), size)
        blocks = CHUNKS * size // 16
        starts = (1 + 2 * number * blocks, 1 + (2 * number + 1) * blocks)
        self.tables = [list(range(start, start + blocks)) for start in starts]
        self.pages: list[list[NDArray[np.uint8]]] = []

    def fill(self) -> None:
        self.pages = [
            [self.engine.fill(of, block, 1000 * of + block) for block in table]
            for of, table in enumerate(self.tables)
        ]

    def store(self) -> None:
        self.fill()
        assert self.engine.store_prompt(self.keys, self.tables).dropped == 0

    def held_chunks(self) -> int:
        """As a lookup that uses nothing."""
        held = self.engine.lookup(self.keys, limit=0).held
        return min(int.from_bytes(bitmap, "little").bit_count() for bitmap in held)

    def load(self, chunks: int = CHUNKS) -> None:
        """So much of it, byte by byte."""
        self.engine.memory[:] = 0
        found = self.engine.lookup(self.keys)
        assert found.resume_tokens == chunks * self.engine.chunk_size
        self.engine.load(found, self.keys, self.tables)
        self.engine.end(found)
        for of, each in enumerate(self.engine.groups):
            for position in each.needed_blocks(found.resume_tokens):
                page = self.engine.pages(of, self.tables[of][position])
                assert (page == self.pages[of][position]).all()


Connect = Callable[[LMCacheServer], RawEngine]
in_memory_and_on_disk = pytest.mark.parametrize("path", ["memory", "disk"], indirect=True)


def restart_warm(server: LMCacheServer, engine: RawEngine) -> None:
    assert server.terminate() == 0
    server.start()
    reconnect(engine, server)


@in_memory_and_on_disk
def test_pages_come_back_exactly_after_a_clean_restart(running: LMCacheServer, connect: Connect) -> None:
    prompt = Prompt(connect(running))
    prompt.store()
    before = running.status()
    for _ in range(3):
        restart_warm(running, prompt.engine)
        after = running.status()
        prompt.load()
    assert after["boot_id"] != before["boot_id"]
    for name in ("stored_bytes", "ready_bytes", "chunks"):
        assert after["l1"][name] == before["l1"][name] > 0
    assert after["l1"]["leases"] == after["l1"]["reserved_bytes"] == after["l1"]["readers"] == 0
    assert running.log.read_text().count("restored 4 chunks") == 3


def test_the_status_knows_the_models_of_restored_chunks(running: LMCacheServer) -> None:
    with contextlib.closing(new_engine(running)) as engine:
        Prompt(engine).store()
    assert running.terminate() == 0
    running.start()
    assert [
        (each["model"], each["chunks"], each["engines"], [of["kind"] for of in each["groups"]])
        for each in running.status()["namespaces"]
    ] == [("model", CHUNKS, [], ["full", "sliding_window"])]


@pytest.mark.parametrize("restarted", [True, False])
def test_the_order_of_eviction_survives(path: Path, connect: Connect, restarted: bool) -> None:
    frames = 2 * CHUNKS * CHUNK_FRAMES + CHUNK_FRAMES
    with LMCacheServer(l1_size_gb=(frames + 0.5) * FRAME_BYTES / GB_BYTES, l1_path=path) as server:
        engine = connect(server)
        first, second, third = (Prompt(engine, number) for number in range(3))
        first.store()
        second.store()
        first.load()
        if restarted:
            restart_warm(server, engine)
        third.store()
        assert [each.held_chunks() for each in (first, second, third)] == [4, 1, 4]
        first.load()
        assert engine.lookup(second.keys).resume_tokens == engine.chunk_size


@in_memory_and_on_disk
def test_a_killed_server_starts_empty(running: LMCacheServer, connect: Connect) -> None:
    prompt = Prompt(connect(running))
    for _ in range(2):
        prompt.store()
        restart_warm(running, prompt.engine)
        running.restart()
        reconnect(prompt.engine, running)
        assert prompt.held_chunks() == 0
        assert running.status()["l1"]["chunks"] == 0
    assert "is not restored: the previous server did not stop cleanly" in running.log.read_text()
    prompt.store()
    prompt.load()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_every_signal_that_asks_for_an_end_saves_the_cache(
    running: LMCacheServer, connect: Connect, number: signal.Signals
) -> None:
    prompt = Prompt(connect(running))
    prompt.store()
    assert running.process is not None
    assert running.process.stop(10, number) == 0
    running.process = None
    running.start()
    reconnect(prompt.engine, running)
    prompt.load()


def test_a_kill_at_any_moment_of_the_stop_leaves_everything_or_nothing(
    running: LMCacheServer, connect: Connect
) -> None:
    prompt = Prompt(connect(running))
    outcomes = set()
    for delay_s in (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 1.0):
        prompt.store()
        os.kill(running.pid, signal.SIGTERM)
        time.sleep(delay_s * random.uniform(0.5, 1))
        running.restart()
        reconnect(prompt.engine, running)
        held = prompt.held_chunks()
        assert held in (0, CHUNKS)
        outcomes.add(held)
        if held:
            prompt.load()
    assert CHUNKS in outcomes, "after a second the server has ended in order"


def test_a_stop_in_the_middle_of_stores_keeps_only_whole_chunks(path: Path, connect: Connect) -> None:
    with LMCacheServer(l1_size_gb=0.5, l1_path=path) as server:
        prompt = Prompt(connect(server))
        engine, size = prompt.engine, prompt.engine.chunk_size
        keys = [chain([1000 + nth] * (CHUNKS * size), size) for nth in range(400)]

        def store_until_the_server_ends() -> None:
            with contextlib.suppress(ChannelError):
                for each in keys:
                    engine.store_prompt(each, prompt.tables)

        for _ in range(3):
            prompt.fill()
            stores = threading.Thread(target=store_until_the_server_ends)
            stores.start()
            time.sleep(random.uniform(0.02, 0.1))
            assert server.terminate() == 0
            stores.join()
            server.start()
            reconnect(engine, server)
            whole = 0
            for prompt.keys in keys:
                found = engine.lookup(prompt.keys)
                engine.end(found)
                held = found.resume_tokens // size
                whole += held == CHUNKS
                if held:
                    prompt.load(held)
            assert 0 < whole < len(keys), "it was stopped in the middle"
            assert server.cli("clear").returncode == 0


@in_memory_and_on_disk
def test_a_stop_while_the_file_still_grows(path: Path, connect: Connect) -> None:
    with LMCacheServer(l1_size_gb=1, l1_path=path) as server:
        prompt = Prompt(connect(server))
        prompt.store()
        restart_warm(server, prompt.engine)
        prompt.load()
        server.wait_until(lambda l1: l1["total_bytes"] == GB_BYTES, 60)
        prompt.load()
        restart_warm(server, prompt.engine)
        prompt.load()
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-1], "bytes instead of"),
        (lambda content: content[:40] + b"\xff" + content[41:], "its header is damaged"),
        (lambda content: content[:-9] + b"\xff" + content[-8:], "its index is damaged"),
        (lambda content: content[:16] + b"\x63" + content[17:], "another version of lmcache wrote it"),
    ],
    ids=["cut", "header", "index", "version"],
)
def test_a_damaged_file_starts_empty_with_a_sentence(
    running: LMCacheServer,
    connect: Connect,
    path: Path,
    damage: Callable[[bytes], bytes],
    reason: str,
) -> None:
    prompt = Prompt(connect(running))
    prompt.store()
    assert running.terminate() == 0
    path.write_bytes(damage(path.read_bytes()))
    running.start()
    reconnect(prompt.engine, running)
    assert prompt.held_chunks() == 0
    assert reason in running.log.read_text()
    prompt.store()
    restart_warm(running, prompt.engine)
    prompt.load()


def test_an_object_with_too_few_frames_is_forgotten_after_one_load(
    running: LMCacheServer, connect: Connect, path: Path
) -> None:
    """Only the engine that registers says how many bytes its pages have."""
    prompt = Prompt(connect(running))
    prompt.store()
    assert running.terminate() == 0
    file = L1File(str(path), int(0.05 * GB_BYTES))
    assert file.index is not None
    snapshot, known = restart.decode(file.index, file.num_frames, 0.0)
    full, window = PackedObjects(snapshot.rows[0].objects).objects()
    (start, _), *_ = full.runs
    small = full._replace(num_bytes=FRAME_BYTES, runs=((start, 1),))
    objects = msgpack.packb([small, window])
    snapshot.rows[0] = msgspec.structs.replace(snapshot.rows[0], objects=objects)
    file.finish(restart.encode(snapshot, known, 0.0))
    file.close()
    running.start()
    reconnect(prompt.engine, running)
    with pytest.raises(ChannelError, match="is damaged"):
        prompt.load()
    assert running.metrics()["lmcache_verify_failures_total"] == 1
    assert prompt.held_chunks() == CHUNKS - 1
    prompt.store()
    prompt.load()


def test_chunks_grow_older_while_no_server_runs(running: LMCacheServer, connect: Connect, path: Path) -> None:
    """A restart makes none young: the file says when it was written, and how old each chunk was."""
    running.flags["max_age"] = "2h"
    prompt = Prompt(connect(running))
    prompt.store()
    for hours, held in ((1.5, CHUNKS), (0.4, CHUNKS), (0.2, 0)):
        assert running.terminate() == 0
        file = L1File(str(path), int(0.05 * GB_BYTES))
        assert file.index is not None
        snapshot, known = restart.decode(file.index, file.num_frames, time.time())
        assert len(snapshot.rows) == CHUNKS
        file.finish(restart.encode(snapshot, known, time.time() - 3600 * hours))
        file.close()
        running.start()
        reconnect(prompt.engine, running)
        assert prompt.held_chunks() == held
    said = running.log.read_text()
    assert said.count(f"restored {CHUNKS} chunks") == 3
    assert said.count(f"forgot {CHUNKS} of these chunks, because of --max-age") == 1
    prompt.store()
    prompt.load()


def test_another_size_starts_empty_and_the_old_one_is_gone(running: LMCacheServer, connect: Connect) -> None:
    prompt = Prompt(connect(running))
    prompt.store()
    for size_gb in (0.03, 0.05):
        assert running.terminate() == 0
        running.flags["l1_size_gb"] = size_gb
        running.start()
        reconnect(prompt.engine, running)
        assert prompt.held_chunks() == 0
    assert running.log.read_text().count("it was made for --l1-size-gb") == 2


def refusal(**flags: object) -> str:
    """The one line with which a server does not start."""
    with (
        pytest.raises(RuntimeError, match=r"did not start \(exit code 2\)") as refused,
        LMCacheServer(**flags),
    ):
        """Not reached."""
    lines = str(refused.value).splitlines()
    assert "Traceback" not in str(refused.value)
    assert lines[-1].startswith("lmcache: ")
    return lines[-1]


def test_two_servers_on_one_file(running: LMCacheServer, connect: Connect, path: Path) -> None:
    prompt = Prompt(connect(running))
    prompt.store()
    assert refusal(l1_size_gb=0.05, l1_path=path) == (
        f"lmcache: --l1-path {path} is in use by another lmcache server: stop it, or name another file"
    )
    prompt.load()
    restart_warm(running, prompt.engine)
    prompt.load()


def test_a_file_of_something_else_and_a_link_are_refused_and_untouched(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"precious" * HEADER_BYTES)
    path.chmod(0o600)
    assert "is not an lmcache file and is left unchanged" in refusal(l1_size_gb=0.05, l1_path=path)
    assert path.read_bytes() == b"precious" * HEADER_BYTES
    (tmp_path / "link").symlink_to(path)
    assert "symbolic link" in refusal(l1_size_gb=0.05, l1_path=tmp_path / "link")
    assert "cannot be combined" in refusal(l1_path=path, l1_hugetlb=True)


def test_a_clean_file_outlives_a_refused_start(running: LMCacheServer, connect: Connect, path: Path) -> None:
    """More than there is, by mistake."""
    prompt = Prompt(connect(running))
    prompt.store()
    assert running.terminate() == 0
    assert "--l1-size-gb asks for 89999" in refusal(l1_size_gb=90000, l1_path=path)
    running.start()
    reconnect(prompt.engine, running)
    prompt.load()
