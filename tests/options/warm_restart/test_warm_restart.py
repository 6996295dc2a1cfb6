"""A warm restart: what a server stored is served by the next one, exactly, or nothing is."""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
from harness.rawclient import chain
from harness.server import STOP_TIMEOUT_S, LMCacheServer, refusal
from harness.warm import CHUNKS, Prompt, new_engine, path, reconnect, restart_warm

from lmcache_client.contract import codec
from lmcache_client.server_channel import ChannelError
from lmcache_server.core.packed import PackedObjects
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.options.warm_restart.l1_file import L1File
from lmcache_server.options.warm_restart.snapshot import Snapshot, decode

__all__ = ["path"]
GB_BYTES = 1 << 30


@pytest.fixture
def running(path: Path) -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=0.05, l1_path=path) as server:
        yield server


@contextlib.contextmanager
def changed_index(path: Path) -> Iterator[Snapshot]:
    """What a server left in its file, to be changed."""
    file = L1File(str(path), int(0.05 * GB_BYTES))
    assert file.index is not None, file.reason
    snapshot = decode(file.index, file.num_frames)
    yield snapshot
    file.finish(codec.pack(snapshot))
    file.close()


@pytest.mark.parametrize("path", ["memory", "disk"], indirect=True)
def test_pages_come_back_exactly_after_a_clean_restart(running: LMCacheServer) -> None:
    prompt = Prompt(new_engine(running))
    prompt.store()
    before = running.status()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        assert running.process is not None
        assert running.process.stop(STOP_TIMEOUT_S, number) == 0, "each signal asks for an end"
        running.process = None
        running.start()
        (namespace,) = running.status()["namespaces"]
        assert (namespace["model"], namespace["chunks"]) == ("model", CHUNKS), "before an engine is back"
        assert [of["kind"] for of in namespace["groups"]] == ["full", "sliding_window"]
        reconnect(prompt.engine, running)
        after = running.status()
        prompt.load()
    assert after["boot_id"] != before["boot_id"]
    for name in ("stored_bytes", "ready_bytes", "chunks"):
        assert after["l1"][name] == before["l1"][name] > 0
    running.wait_at_rest(sessions=2)
    running.wait_for_log("restored 4 chunks", 3)


def test_a_killed_server_starts_empty(running: LMCacheServer) -> None:
    prompt = Prompt(new_engine(running))
    prompt.store()
    restart_warm(running, prompt.engine)
    running.restart()
    reconnect(prompt.engine, running)
    assert prompt.held_chunks() == 0
    assert running.status()["l1"]["chunks"] == 0
    running.wait_for_log("is not restored: the previous server did not stop cleanly")
    prompt.store()
    prompt.load()


def test_a_stop_in_the_middle_of_stores_keeps_only_whole_chunks(running: LMCacheServer) -> None:
    prompt = Prompt(new_engine(running))
    engine, size = prompt.engine, prompt.engine.chunk_size
    for first in (1000, 2000):
        prompt.fill()
        asked: list[tuple[bytes, ...]] = []

        def store_until_the_server_ends(numbers: Iterator[int], asked: list[tuple[bytes, ...]]) -> None:
            with contextlib.suppress(ChannelError):
                for number in numbers:
                    asked.append(chain([number] * (CHUNKS * size), size))
                    engine.store_prompt(asked[-1], prompt.tables)

        stores = threading.Thread(target=store_until_the_server_ends, args=(itertools.count(first), asked))
        stores.start()
        running.wait_until(lambda l1: l1["chunks"] > 5 * CHUNKS)
        assert running.terminate() == 0
        stores.join()
        running.start()
        reconnect(engine, running)
        whole = 0
        for prompt.keys in asked:
            found = engine.lookup(prompt.keys)
            engine.end(found)
            held = found.resume_tokens // size
            whole += held == CHUNKS
            if held:
                prompt.load(held)
        assert whole
        running.clear()


def test_a_larger_l1_has_all_chunks_of_the_smaller_one_and_room_for_more(path: Path) -> None:
    with LMCacheServer(l1_size_gb=0.05, l1_path=path) as server:
        server.wait_until_populated()
        prompt = Prompt(new_engine(server))
        prompt.store()
        server.terminate()
    assert refusal(l1_size_gb=0.04, l1_path=path).startswith(
        f"lmcache: --l1-path {path} holds the cache of a larger L1: pass --l1-size-gb 0.05 or more "
    )
    with LMCacheServer(l1_size_gb=0.1, l1_path=path) as server:
        all_bytes = int(0.1 * GB_BYTES) // FRAME_BYTES * FRAME_BYTES
        server.wait_until(lambda l1: l1["total_bytes"] == all_bytes)
        prompt = Prompt(new_engine(server))
        prompt.fill()
        prompt.load()
        prompts = [Prompt(prompt.engine, number) for number in range(3)]
        for each in prompts:
            each.store()
        for each in prompts:
            each.load()


def test_a_stop_while_the_file_still_grows(path: Path) -> None:
    with LMCacheServer(l1_size_gb=0.5, l1_path=path) as server:
        prompt = Prompt(new_engine(server))
        prompt.store()
        restart_warm(server, prompt.engine)
        prompt.load()
        server.wait_until(lambda l1: l1["total_bytes"] == GB_BYTES // 2)
        restart_warm(server, prompt.engine)
        prompt.load()
    assert "Traceback" not in server.log.read_text()


def test_an_object_with_too_few_frames_is_forgotten_after_one_load(
    running: LMCacheServer, path: Path
) -> None:
    """Only the engine that registers says how many bytes its pages have."""
    prompt = Prompt(new_engine(running))
    prompt.store()
    assert running.terminate() == 0
    with changed_index(path) as snapshot:
        full, window = PackedObjects(snapshot.rows[0].objects).objects()
        (start, _), *_ = full.runs
        small = full._replace(num_bytes=FRAME_BYTES, runs=((start, 1),))
        objects = msgpack.packb([small, window])
        snapshot.rows[0] = msgspec.structs.replace(snapshot.rows[0], objects=objects)
    running.start()
    reconnect(prompt.engine, running)
    with pytest.raises(ChannelError, match="too few frames"):
        prompt.load()
    assert running.metrics()["lmcache_verify_failures_total"] == 1
    assert prompt.held_chunks() == CHUNKS - 1
    prompt.store()
    prompt.load()


def test_a_file_outlives_servers_that_are_refused(running: LMCacheServer, path: Path) -> None:
    """One while the file is in use, and one that asks, by mistake, for more memory than there is."""
    prompt = Prompt(new_engine(running))
    prompt.store()
    assert refusal(l1_size_gb=0.05, l1_path=path) == (
        f"lmcache: --l1-path {path} is in use by another lmcache server: name another "
        "file, or stop that server"
    )
    prompt.load()
    assert running.terminate() == 0
    assert refusal(1, l1_size_gb=90000, l1_path=path).startswith(
        "lmcache: --l1-size-gb asks for 90000.00 GB, of which 89999"
    )
    running.start()
    reconnect(prompt.engine, running)
    prompt.load()


@pytest.mark.parametrize("checksums", [False, True])
def test_a_file_cut_short_costs_loads_and_never_gives_wrong_bytes(path: Path, checksums: bool) -> None:
    """It belongs to the server alone, and this is why. The kernel, which copies for the server, refuses what
    is gone. But if the server itself read an object to compare its digest, the kernel would end it."""
    with LMCacheServer(l1_size_gb=0.05, l1_path=path, checksums=checksums) as server:
        server.wait_until_populated()
        prompt = Prompt(new_engine(server))
        prompt.store()
        prompt.load()
        os.truncate(path, 4096)
        with pytest.raises(ChannelError, match="was cut short by another program: restart the server"):
            prompt.load()
        restart_warm(server, prompt.engine)
        prompt.store()
        prompt.load()
