"""What a real server logs: nothing about single requests by default, and at debug all about each."""

import json
import os
import re
import subprocess
import sys

import pytest
from harness.peer import Peer
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import wait_until
from msgspec import structs

from lmcache_client.channel import ChannelError
from lmcache_client.contract.keys import ROOT_KEY
from lmcache_client.contract.messages import Clear, Load, Lookup, Release, Store, StoreObject

MODEL = "model\n2026-01-01 00:00:00,000 INFO forged"


def address(server: LMCacheServer) -> str:
    return f"ipc://{server.runtime_dir}/{server.port}.sock"


def lines(server: LMCacheServer) -> list[dict[str, object]]:
    return [json.loads(line) for line in server.log.read_text().splitlines()]


def one_request(engine: RawEngine, request_id: str) -> None:
    """As the connector does it: looked up and missed, stored, looked up and found, loaded, ended."""
    size = engine.chunk_size
    keys = chain(range(size), size)
    blocks = tuple(range(1, 1 + size // 16))
    question = Lookup(request_id, keys, 0, size, size + 1)
    assert engine.scheduler.call(question, 5).resume_tokens == 0
    objects = (StoreObject(keys[0], ROOT_KEY, 0, 0, blocks),)
    assert engine.worker.call(Store(objects, (request_id,)), 5).stored == 1
    found = engine.scheduler.call(question, 5)
    assert found.resume_tokens == size
    engine.worker.call(Load(request_id, found.lease_id, keys[0], size, 0, (blocks,)), 5)
    engine.scheduler.call(Release((found.lease_id,), keys, request_id), 5)


def test_a_request_is_followed_by_its_id_at_debug() -> None:
    with LMCacheServer(l1_size_gb=0.05, log_level="debug", log_format="json") as server:
        engine = RawEngine(address(server), [group()], 64, model=MODEL).start()
        one_request(engine, "cmpl-7")
        engine.scheduler.call(Clear(), 5)
        one_request(engine, "cmpl-8")
        with pytest.raises(ChannelError):
            engine.worker.call(Load("cmpl-7", 999, bytes(32), engine.chunk_size, 0, ((1,) * 16,)), 5)
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
        engine = RawEngine(address(server), [group()], 64, model=MODEL).start()
        one_request(engine, "cmpl-7")
        engine.scheduler.call(Clear(), 5)
        # The line is written after the answer.
        wait_until(lambda: "cleared" in server.log.read_text())
        before = server.log.read_text()
        one_request(engine, "cmpl-8")
        assert server.log.read_text() == before
        with Peer(address(server)) as peer:
            peer.ask(peer.register())  # without a greeting, which anybody may do
            peer.ask(peer.hello())
            peer.ask(structs.replace(peer.register(), rank=7))
        engine.scheduler.call(Clear(), 5)
        engine.scheduler.call(Clear(), 5)
        cleared = re.findall(r"cleared: .* as session \d+ \(pid (\d+)\) asked", server.log.read_text())
        assert cleared == [str(os.getpid())] * 2, "of three times there was something"
        assert server.log.read_text().count(" WARNING ") == 1
        refused = r"session \d+ \(pid \d+, model 'peer'\): refused register: rank 7 of 1 workers"
        assert re.search(refused, server.log.read_text())
        engine.close()
        assert "cmpl" not in server.log.read_text()
        assert not [line for line in server.log.read_text().splitlines() if line.endswith("INFO forged")]
        assert "model\\n2026-01-01 00:00:00,000 INFO forged is registered" in server.log.read_text()


def test_a_client_that_is_refused_without_end_fills_no_disk() -> None:
    with LMCacheServer(l1_size_gb=0.05) as server, Peer(address(server)) as peer:
        peer.ask(peer.hello())
        for number in range(500):
            peer.ask(structs.replace(peer.register(), rank=7, engine_id=f"engine {number}"))
        assert server.log.read_text().count("refused register") == 64


def test_why_a_server_does_not_start_is_a_json_line_too(tmp_path) -> None:
    command = [sys.executable, "-m", "lmcache_server", "server", "--l1-size-gb", "90000", "--http-port", "0"]
    environment = {**os.environ, "LMCACHE_RUNTIME_DIR": str(tmp_path / "run"), "LMCACHE_LOG_FORMAT": "json"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 2
    assert told[-1]["level"] == "critical"
    assert str(told[-1]["message"]).startswith("--l1-size-gb asks for 90000.00 GB")
