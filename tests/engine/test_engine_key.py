"""A real engine over TCP with a shared key."""

import os
from pathlib import Path

import pytest
from harness.engine import Engine
from harness.prompts import prompt
from harness.served import served
from harness.server import LMCacheServer

from lmcache_client.connector.rank_servers import rank_servers
from lmcache_client.connector.settings import Settings
from lmcache_client.contract.endpoint import EndpointError

HOST = "127.0.0.1"
CACHED = prompt(700, 1)


def made(path: Path) -> str:
    path.touch(0o600)
    path.write_text(os.urandom(32).hex())
    return str(path)


def test_with_the_servers_key_an_engine_is_served_and_without_it_computes_and_says_why_once(
    tmp_path: Path,
) -> None:
    """That it says so once, however often it tries again: server/test_key.py."""
    key, other = made(tmp_path / "key"), made(tmp_path / "other")
    answers = []
    with LMCacheServer(l1_size_gb=0.06, host=HOST, key_file=key) as server:
        for own, why in ((key, ""), (other, "has another key, or none"), ("", "wants a key")):
            extra = {"lmcache.mp.host": HOST} | ({"lmcache.mp.key_file": own} if own else {})
            with Engine("llama", server=server, extra_config=extra) as engine:
                answers.append(engine.run(CACHED).output)
                assert served(engine, CACHED, 0 if why else 512).output == answers[0]
                lines = [
                    each for each in engine.log.read_text().splitlines() if " refused this engine" in each
                ]
            # With the right key, a server that is too busy to shake hands may seem to refuse. It says no.
            assert not why or len(lines) == 2, "one for each side"
            assert why or "a client is refused" not in server.log.read_text()
            assert all(why in line and "lmcache.mp.key_file" in line for line in lines)
    assert len(set(answers)) == 1


def test_a_key_file_that_cannot_be_used_keeps_the_engine_from_starting(tmp_path: Path) -> None:
    key, several = made(tmp_path / "key"), {"0": f"{HOST}:1", "1": f"{HOST}:2"}
    assert [each.address for each in rank_servers(Settings(key_file=key, servers=several), 2)] == [
        f"tcp://{HOST}:{port}?key_file={key}" for port in (1, 2)
    ]
    os.chmod(key, 0o644)
    for settings in (Settings(HOST, key_file=key), Settings(key_file=key, servers=several)):
        with pytest.raises(EndpointError, match=f"chmod 600 {key}"):
            rank_servers(settings, 2)
