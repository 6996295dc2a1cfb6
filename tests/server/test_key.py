"""TCP with a shared key: who has it is served, nobody else gets in or can read along, and nobody hangs."""

import logging
import os
import socket
import stat
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from harness.cli import LMCACHE, clean_environment, in_process, lmcache, sentence
from harness.exercise import GROUPS, exercise, new_engine
from harness.proxy import Proxy
from harness.rawclient import RawEngine
from harness.server import LMCacheServer, refusal
from harness.waiting import PATIENCE_S, wait_until
from zmq.utils import z85

from lmcache_client import server_channel
from lmcache_client.contract.codec import MAX_MESSAGE_BYTES
from lmcache_client.contract.endpoint import address, split
from lmcache_client.contract.messages import Ping, encode_request
from lmcache_client.server_channel import Channel
from lmcache_client.transport import Connection

Start = Callable[..., LMCacheServer]
HOST = "127.0.0.1"
MODEL = "a model whose name everybody knows"
WARNING = "a client is refused: it does not have the key of --key-file"

__all__ = ["clean_environment"]


@pytest.fixture
def key(tmp_path: Path) -> str:
    return made(tmp_path / "key")


def made(path: Path) -> str:
    assert lmcache("key", str(path)) == (0, "", "")
    return str(path)


@pytest.fixture
def keyed(start_server: Start, key: str) -> LMCacheServer:
    return start_server(l1_size_gb=0.06, host=HOST, key_file=key)


@pytest.fixture(autouse=True)
def _tries_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_channel, "RETRY_REFUSED_S", 0.2)


def asked(server: LMCacheServer, *more: str) -> list[str]:
    return ["--host", HOST, "--port", str(server.port), "--timeout-s", str(PATIENCE_S), *more]


# -- the key and its file -------------------------------------------------------------------------------


def test_a_key_is_made_for_its_user_alone_and_never_twice(tmp_path: Path, capsys) -> None:
    path, before = tmp_path / "key", os.umask(0)
    try:
        assert in_process(capsys, "key", str(path)) == (0, "", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert len(bytes.fromhex(text)) == 32
    assert f"{path} exists and may be in use: name another file" in sentence(capsys, 1, "key", str(path))
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert "exists" in sentence(capsys, 1, "key", str(tmp_path / "link")), "it follows no link"
    assert "No such file" in sentence(capsys, 1, "key", str(tmp_path / "none" / "key"))
    assert path.read_text() == text


def test_a_key_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    command = ["prlimit", "--fsize=0", *LMCACHE, "key", str(tmp_path / "key")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("/key: File too large\n")
    assert not list(tmp_path.iterdir())


def test_a_server_and_a_command_want_a_key_file_that_others_cannot_read(
    keyed: LMCacheServer, tmp_path: Path, capsys
) -> None:
    other = made(tmp_path / "open")
    os.chmod(other, 0o644)
    for path, said in {other: f"chmod 600 {other}", "/none": "make one with 'lmcache key /none'"}.items():
        assert said in refusal(l1_size_gb=0.02, host=HOST, key_file=path)
        assert said in sentence(capsys, 1, "ping", *asked(keyed, "--key-file", path))


# -- with the key ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_key", [True, False])
def test_pages_are_stored_and_loaded_and_only_without_a_key_can_others_read_along(
    has_key: bool, start_server: Start, key: str
) -> None:
    flags = {"key_file": key} if has_key else {}
    server = start_server(l1_size_gb=0.1, host=HOST, **flags)
    with Proxy(server.port) as proxy:
        proxy.noted = bytearray()
        between = address(HOST, proxy.port, key if has_key else "")
        engine = RawEngine(between, GROUPS, num_blocks=130, engine_id="over TCP", model=MODEL).start()
        assert exercise(engine, 1) == 0
        assert exercise(engine, 1) == 3 * engine.chunk_size
        engine.close()
        noted = bytes(proxy.noted)
    assert (MODEL.encode() in noted) is not has_key
    assert len(noted) > 1000
    if has_key:
        secret = split(between)[1]
        public = z85.decode(zmq.curve_public(z85.encode(secret)))
        assert secret not in noted
        assert public not in noted, "whoever has it is half in"
    server.wait_at_rest()


def test_commands_and_the_self_test_use_the_key(keyed: LMCacheServer, key: str, tmp_path: Path) -> None:
    for name, said in {"ping": "the server answers", "status": "L1: ", "clear": "forgot 0 chunks"}.items():
        code, output, errors = lmcache(name, *asked(keyed, "--key-file", key))
        assert (code, errors) == (0, "")
        assert said in output
    # As all flags, the environment and the configuration file can set it.
    (tmp_path / "toml").write_text(f"host = '{HOST}'\nport = {keyed.port}\nkey_file = '{key}'")
    assert lmcache("ping", "--config", str(tmp_path / "toml"))[0] == 0
    assert keyed.selftest()[1]["ok"]
    assert key not in keyed.get("/metrics")
    assert Path(key).read_text().strip() not in keyed.get("/status") + Path(keyed.log).read_text()


def test_the_longest_message_passes_with_a_key_too(keyed: LMCacheServer) -> None:
    connection = Connection(keyed.address)
    try:
        wait_until(connection.event, what="the connection is up")
        connection.send(b"\xc1" * MAX_MESSAGE_BYTES)
        connection.send(encode_request(1, Ping()))
        wait_until(connection.receive, what="the server answers")
        assert connection.event() is None, "it is still the same connection"
    finally:
        connection.close()


def test_a_unix_socket_uses_no_key(start_server: Start, key: str) -> None:
    server = start_server(l1_size_gb=0.06, key_file=key)
    assert exercise(new_engine(server.address, "engine"), 1) == 0
    assert server.cli("ping").returncode == 0
    done = server.cli("ping", "--key-file", key)
    assert (done.returncode, done.stderr) == (0, "lmcache: --key-file has no effect without --host\n")


# -- without the key ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["no key", "another key", "a key for a server without one"])
def test_who_has_not_the_servers_key_is_told_once_and_all_others_are_served(
    case: str, start_server: Start, key: str, tmp_path: Path, capsys, stack: ExitStack
) -> None:
    server_key = {} if case == "a key for a server without one" else {"key_file": key}
    client_key = {"no key": "", "another key": made(tmp_path / "other")}.get(case, key)
    server = start_server(l1_size_gb=0.1, host=HOST, **server_key)
    place = address(HOST, server.port, client_key)
    whose = "has another key, or none, or was too busy to shake hands" if client_key else "wants a key"
    why = (
        f"tcp://{HOST}:{server.port} {whose}: give it and its clients the same key file (--key-file of the "
        "server and of commands, lmcache.mp.key_file of engines)"
    )
    said: list[tuple[int, str]] = []
    engine = Channel(place, lambda _channel: None, lambda *state: said.append(state))
    stack.callback(engine.close)
    engine.start(PATIENCE_S, PATIENCE_S)
    assert not engine.ready
    wait_until(lambda: engine.refusal is not None, what="the client knows why")
    assert str(engine.refusal) == why
    more = ("--key-file", client_key) if client_key else ()
    for name in ("ping", "status", "bench", "clear"):
        assert sentence(capsys, 1, name, *asked(server, *more)) == f"lmcache: the lmcache server at {why}"
    assert exercise(new_engine(server.address, "bystander"), 1) == 0
    since_s = engine._retry_s
    wait_until(lambda: engine._retry_s > since_s + 1, what="it has tried again several times")
    assert [text for _, text in said] == [f"the lmcache server refused this engine: {why}"]
    assert Path(server.log).read_text().count(WARNING) == len(server_key)


def test_a_server_that_gets_a_key_later_or_another_one_is_used_without_a_restart_of_the_engine(
    start_server: Start, key: str
) -> None:
    server = start_server(l1_size_gb=0.06, host=HOST)
    engine = RawEngine(address(HOST, server.port, key), GROUPS, num_blocks=130)
    engine.worker.start(PATIENCE_S, 0)
    engine.scheduler.start(0, 0)
    wait_until(lambda: engine.worker.refusal is not None, what="it knows that the server has no key")
    server.flags["key_file"] = key
    server.restart()
    wait_until(lambda: engine.worker.ready and engine.scheduler.ready, what="it has found the server")
    assert engine.worker.refusal is None
    assert exercise(engine, 1) == 0
    # Nor is one needed for another key.
    Path(key).write_bytes(os.urandom(32))
    both = engine.worker, engine.scheduler
    generations = [each.generation for each in both]
    server.restart()
    later = lambda: [each.generation for each in both if each.ready]  # noqa: E731
    wait_until(lambda: later() == [each + 1 for each in generations], what="both are back")
    assert exercise(engine, 1) == 0
    assert exercise(engine, 1) == 3 * engine.chunk_size


def test_an_engine_that_connects_while_its_key_cannot_be_read_is_served_when_it_can(
    keyed: LMCacheServer, key: str
) -> None:
    place, content = keyed.address, Path(key).read_bytes()
    Path(key).unlink()
    engine = RawEngine(place, GROUPS, num_blocks=130)
    engine.worker.start(PATIENCE_S, 0)
    assert "key" in str(engine.worker.refusal)
    assert [level for level, _ in engine.states] == [logging.ERROR]
    with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(content)
    engine.scheduler.start(0, 0)
    wait_until(lambda: engine.worker.ready and engine.scheduler.ready, what="it has read the key")
    assert exercise(engine, 1) == 0
    assert exercise(engine, 1) == 3 * engine.chunk_size


def test_the_public_key_alone_lets_nobody_in(keyed: LMCacheServer) -> None:
    """Somebody who has learned it still lacks the secret one, of which the server wants to see proof."""
    secret = z85.encode(split(keyed.address)[1])
    public = zmq.curve_public(secret)
    for own, gets_in in (zmq.curve_keypair(), False), ((public, secret), True):
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger, client.curve_serverkey = 0, public
            client.curve_publickey, client.curve_secretkey = own
            with client.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH) as refusals:
                client.connect(f"tcp://{HOST}:{keyed.port}")
                client.send(encode_request(1, Ping()))
                ends = client, refusals
                wait_until(lambda ends=ends: any(each.poll(0) for each in ends), what="the server decides")
                assert bool(client.poll(0)) is gets_in
                client.disable_monitor()


def test_a_thousand_clients_without_the_key_cost_one_line_and_no_memory(keyed: LMCacheServer) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    hello = b"\x04\xc8" + b"\x05HELLO\x01\x00" + bytes(192)
    exercise(engine := new_engine(keyed.address, "bystander"), 1)
    keyed.wait_until_populated()
    before = keyed.rss_bytes()
    for _ in range(1000):
        with socket.create_connection((HOST, keyed.port)) as raw:
            raw.settimeout(PATIENCE_S)
            raw.sendall(greeting + hello)
            while raw.recv(1000):
                pass  # until the server closes it
    assert exercise(engine, 1) == 3 * engine.chunk_size
    assert keyed.rss_bytes() - before < 16 << 20
    assert Path(keyed.log).read_text().count(WARNING) == 1
