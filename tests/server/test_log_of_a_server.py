"""What a real server logs: nothing about single requests by default, and at debug all about each. Nobody
needs to read it."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.peer import Peer
from harness.processes import environment
from harness.rawclient import TIMEOUT_S, RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S, wait_until
from msgspec import structs

from lmcache_client.contract.codec import packed
from lmcache_client.contract.keys import ROOT_KEY
from lmcache_client.contract.messages import Clear, Done, Load, Lookup, Ping, Release, Store, StoreObject
from lmcache_client.server_channel import ChannelError
from lmcache_server.host.logs import MAX_LINES

MODEL = "model\n2026-01-01 00:00:00,000 INFO forged"


def lines(server: LMCacheServer) -> list[dict[str, object]]:
    return [json.loads(line) for line in server.log.read_text().splitlines()]


def one_request(engine: RawEngine, request_id: str) -> None:
    """As the connector does it: looked up and missed, stored, looked up and found, loaded, ended."""
    size = engine.chunk_size
    keys = chain(range(size), size)
    blocks = tuple(range(1, 1 + size // 16))
    question = Lookup(request_id, keys, 0, size, size + 1)
    assert engine.scheduler.call(question, TIMEOUT_S).resume_tokens == 0
    objects = (StoreObject(keys[0], ROOT_KEY, 0, 0, packed(blocks)),)
    assert engine.worker.call(Store(objects, (request_id,)), TIMEOUT_S).stored == 1
    found = engine.scheduler.call(question, TIMEOUT_S)
    assert found.resume_tokens == size
    engine.worker.call(Load(request_id, found.lease_id, keys[0], size, 0, (packed(blocks),)), TIMEOUT_S)
    engine.scheduler.call(Release((found.lease_id,), keys, request_id), TIMEOUT_S)


def test_a_request_is_followed_by_its_id_at_debug() -> None:
    with LMCacheServer(l1_size_gb=0.05, log_level="debug", log_format="json") as server:
        engine = RawEngine(server.address, [group()], 64, model=MODEL).start()
        one_request(engine, "cmpl-7")
        engine.scheduler.call(Clear(), TIMEOUT_S)
        one_request(engine, "cmpl-8")
        with pytest.raises(ChannelError):
            engine.worker.call(
                Load("cmpl-7", 999, bytes(32), engine.chunk_size, 0, (packed((1,) * 16),)), TIMEOUT_S
            )
        engine.close()
        server.wait_at_rest()
        assert server.terminate() == 0
        told = lines(server)
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in told)
    followed = [
        line for line in told if line.get("request_id") == "cmpl-7" or "cmpl-7" in line.get("request_ids", ())
    ]
    size = engine.chunk_size
    expected = [
        {"hit_tokens": 0, "num_tokens": size + 1},
        {"direction": "store", "stored": 1, "dropped": 0},
        {"hit_tokens": size},
        {"direction": "load", "tokens": size, "outcome": "ok"},
        {"message": "request cmpl-7: ended"},
        {"operation": "load", "code": "expired"},
    ]
    assert len(followed) == len(expected)
    for line, wanted in zip(followed, expected, strict=True):
        assert wanted.items() <= line.items()
        assert (line["engine"], line["level"]) == ("engine", "debug")
    stored, loaded = followed[1], followed[3]
    assert stored["bytes"] == loaded["bytes"] == size // 16 * 2 * 4096
    assert stored["session"] == loaded["session"] != followed[0]["session"]
    assert 0 < loaded["seconds"] < 60
    assert [line["model"] for line in told if "is registered" in str(line["message"])] == [MODEL]


def test_by_default_there_is_no_line_for_a_request_and_none_that_a_client_made_up() -> None:
    with LMCacheServer(l1_size_gb=0.05) as server:
        engine = RawEngine(server.address, [group()], 64, model=MODEL).start()
        one_request(engine, "cmpl-7")
        engine.scheduler.call(Clear(), TIMEOUT_S)
        # The line is written after the answer.
        wait_until(lambda: "cleared" in server.log.read_text())
        before = server.log.read_text()
        one_request(engine, "cmpl-8")
        assert server.log.read_text() == before
        with Peer(server.address) as peer:
            peer.ask(peer.register())  # without a greeting, which anybody may do
            peer.ask(peer.hello())
            peer.ask(structs.replace(peer.register(), rank=7))
        engine.scheduler.call(Clear(), TIMEOUT_S)
        engine.scheduler.call(Clear(), TIMEOUT_S)
        asked = f"pid {os.getpid()}) asked"
        wait_until(
            lambda: (
                len(re.findall(rf"cleared: .* as session \d+ \({re.escape(asked)}", server.log.read_text()))
                == 2
            ),
            what="of three times there was something",
        )
        assert server.log.read_text().count(" WARNING ") == 1
        refused = r"session \d+ \(pid \d+, model 'peer'\): refused register: rank 7 of 1 workers"
        assert re.search(refused, server.log.read_text())
        assert "cmpl" not in server.log.read_text()
        assert not [line for line in server.log.read_text().splitlines() if line.endswith("INFO forged")]
        assert "model\\n2026-01-01 00:00:00,000 INFO forged is registered" in server.log.read_text()


def test_a_client_that_is_refused_without_end_fills_no_disk() -> None:
    with LMCacheServer(l1_size_gb=0.05) as server, Peer(server.address) as peer:
        peer.ask(peer.hello())
        for number in range(500):
            peer.ask(structs.replace(peer.register(), rank=7, engine_id=f"engine {number}"))
        server.wait_for_log("refused register", 64)


LINE_BYTES = 100
PIPE_BYTES = 1 << 16
LINES = 2 * MAX_LINES + PIPE_BYTES // LINE_BYTES


@pytest.fixture
def unread(tmp_path: Path) -> Iterator[tuple[LMCacheServer, int]]:
    """A server and the reading end of the pipe that is its stderr."""
    pipe = tmp_path / "stderr"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    server = LMCacheServer(l1_size_gb=0.02, log_level="debug")
    server.log, usual = pipe, server.log
    with server:
        # The end of a log goes into the message of a failed test, and nobody could read the end of a pipe.
        assert server.process is not None
        server.log = server.process.log = usual
        with Peer(server.address) as peer:
            for _ in range(LINES // 100):
                for _ in range(100):
                    peer.socket.send(b"garbage")  # a line each
                assert isinstance(peer.ask(Ping()), Done), "the event loop does not wait for a reader"
        yield server, descriptor
    os.close(descriptor)


def test_the_server_goes_on_and_ends(unread: tuple[LMCacheServer, int]) -> None:
    server, _ = unread
    assert server.get("/healthz") == "ok\n"
    assert server.terminate() == 0


def test_who_reads_later_learns_how_many_lines_were_dropped(unread: tuple[LMCacheServer, int]) -> None:
    server, descriptor = unread
    heard = b""

    def notice() -> re.Match[bytes] | None:
        nonlocal heard
        with contextlib.suppress(BlockingIOError):
            heard += os.read(descriptor, 1 << 20)
        return re.search(rb" WARNING (\d+) lines of the log were dropped: nobody read them\n", heard)

    match = wait_until(notice)
    assert match is not None
    lines = heard.count(b"dropped a frame of 7 bytes")
    assert MAX_LINES <= lines <= LINES - int(match[1])
    assert server.terminate() == 0
    wait_until(lambda: notice() and heard.endswith(b" INFO stopping with 0 sessions open\n"))


NICE = shutil.which("nice") or "nice"


def test_l1_is_filled_by_a_server_that_may_not_lower_its_niceness() -> None:
    with LMCacheServer(l1_size_gb=0.02, without_capability=23, through=(NICE, "-n", "15")) as server:
        server.wait_until_populated()


_NEVER_FILLED = """
import sys
from lmcache_server.commands import cli
from lmcache_server.l1 import memory
memory._populate_piece = lambda address, num_bytes: [][0]
sys.argv[1:] = "server --l1-size-gb 0.02 --http-port 0".split()
cli.main()
"""


def test_a_server_whose_memory_is_not_filled_ends_with_an_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NEVER_FILLED],
        env=environment({"LMCACHE_RUNTIME_DIR": str(tmp_path / "run")}),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert "a thread that fills L1 has ended (IndexError('list index out of range')): this server ends" in (
        done.stderr
    )
