"""Sessions: memory must be proven, deaths and restarts are noticed, nothing is leaked."""

import ctypes
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq
from harness.clients import client, go_on, stop
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S, wait_until

from lmcache_client.channel import Channel, RefusedError
from lmcache_client.contract import messages
from lmcache_client.contract.messages import Challenge, Memory, Prove, Register
from lmcache_client.memory.host import HostExport
from lmcache_client.transport import SYSTEM, System


def address(server: LMCacheServer) -> str:
    return f"ipc://{server.runtime_dir}/{server.port}.sock"


@pytest.fixture
def server():
    with LMCacheServer(l1_size_gb=0.05) as running:
        yield running


def test_memory_of_another_process_cannot_be_registered(server: LMCacheServer) -> None:
    """Without the proof a server with more rights than its client would read strangers' memory for it."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    engine = RawEngine(address(server), [group()])
    outcomes: list[str] = []

    def register_the_stranger(channel: Channel) -> None:
        own = engine.own_memory()
        memory = Memory(stranger.pid, own.buffers, own.proof_address)
        challenge = channel.call(Register("thief", 0, engine.model, engine.geometry, memory), 5)
        assert isinstance(challenge, Challenge)
        try:
            with engine.export.proving(challenge.nonce):
                channel.call(Prove(), 5)
        except RefusedError as error:
            outcomes.append(error.code)
            raise

    channel = Channel(address(server), register_the_stranger)
    try:
        channel.start(PATIENCE_S, PATIENCE_S)
        wait_until(lambda: bool(outcomes))
        assert outcomes[0] in (messages.NO_ACCESS, messages.INTERNAL)
        assert server.status()["namespaces"] == []
    finally:
        channel.close()
        engine.close()
        stranger.kill()
        stranger.wait()


def test_a_nonce_that_was_not_written_is_no_proof(server: LMCacheServer) -> None:
    engine = RawEngine(address(server), [group()])

    def register_without_writing(channel: Channel) -> None:
        message = Register("liar", 0, engine.model, engine.geometry, engine.own_memory())
        assert isinstance(channel.call(message, 5), Challenge)
        channel.call(Prove(), 5)

    channel = Channel(address(server), register_without_writing)
    try:
        channel.start(PATIENCE_S, PATIENCE_S)
        assert channel.refusal is not None
        assert channel.refusal.code == messages.NO_ACCESS
    finally:
        channel.close()
        engine.close()


def test_memory_that_is_not_there_is_refused(server: LMCacheServer) -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    size = 1 << 20
    # Mapped, so that nothing else comes to lie there, but without any right to read or write.
    gone = libc.mmap(None, size, 0, 0x22, -1, 0)
    engine = RawEngine(address(server), [group()])
    engine.client.export = HostExport(((gone, size),))
    try:
        engine.start()
        assert engine.worker.refusal is not None
        assert engine.worker.refusal.code == messages.NO_ACCESS
    finally:
        engine.close()


def test_a_restart_within_milliseconds_is_noticed_and_used_again(server: LMCacheServer) -> None:
    engine = RawEngine(address(server), [group()]).start()
    try:
        keys = chain(range(engine.chunk_size), engine.chunk_size)
        table = [list(range(1, 1 + engine.chunk_size // 16))]
        engine.store_prompt(keys, table)
        boot_id, generation = engine.worker.boot_id, engine.worker.generation
        server.restart()
        wait_until(lambda: engine.worker.generation > generation and engine.scheduler.ready)
        assert engine.worker.boot_id != boot_id
        assert engine.lookup(keys).resume_tokens == 0
        assert engine.store_prompt(keys, table).stored == 1
        assert engine.lookup(keys).resume_tokens == engine.chunk_size
    finally:
        engine.close()


def test_requests_in_flight_at_the_death_of_the_server_end_and_settle(server: LMCacheServer) -> None:
    engine = RawEngine(address(server), [group()]).start()
    try:
        stop(server.pid)
        pending = engine.worker.submit(messages.Ping(), timeout_s=30)
        late = engine.worker.submit(messages.Ping(), timeout_s=0.1)
        wait_until(lambda: late.done)
        assert not late.settled, "a server that is only stopped can still act on the request"
        server.kill()
        wait_until(lambda: pending.done and pending.settled and late.settled)
        assert pending.error is not None
    finally:
        engine.close()


def test_the_kernel_says_which_process_a_client_is_connected_to() -> None:
    for flags in ({}, {"host": "127.0.0.1"}):
        with LMCacheServer(l1_size_gb=0.05, **flags) as running:  # type: ignore[arg-type]
            engine = RawEngine(running.address, [group()]).start()
            connection, system = engine.worker._connection, engine.worker.system
            assert connection is not None
            assert connection.peer_pid() == (None if flags else running.pid)
            assert not system.nobody_listens(running.address)
            engine.close()
        assert system.nobody_listens(running.address)


class Blind(System):
    """A client that cannot open the server's process: EMFILE, another process namespace, a sandbox."""

    def open_process(self, pid: int) -> None:
        return None


def test_a_client_without_a_descriptor_does_not_take_a_broken_connection_for_the_end(
    server: LMCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_client.channel.OVERDUE_S", 3.0)
    channel = Channel(address(server), lambda _channel: None, system=Blind())
    try:
        channel.start(5.0, 5.0)
        stop(server.pid)
        pending = channel.submit(messages.Ping(), 30.0)
        with channel._lock:
            channel._break("as if it had not answered everything")
        time.sleep(4.0)
        assert pending.done
        assert not pending.settled, "a server that is only stopped listens, and can still act on it"
        go_on(server.pid)
        wait_until(lambda: pending.settled, 5.0, "the server greets the client again")
        stop(server.pid)
        second = channel.submit(messages.Ping(), 30.0)
        server.kill()
        wait_until(lambda: second.done, 5.0, "the connection breaks")
        assert not second.settled
        wait_until(lambda: second.settled, 10.0, "connections have been refused for a while")
    finally:
        channel.close()


def beside(server: LMCacheServer) -> LMCacheServer:
    """Another server at the address of one that lives: its files were removed, with its lock."""
    other = LMCacheServer(l1_size_gb=0.05, port=server.port)
    shutil.rmtree(other.runtime_dir)
    other.runtime_dir, other.environment = server.runtime_dir, server.environment
    for file in Path(server.runtime_dir).iterdir():
        file.unlink()
    other.start()
    return other


@pytest.mark.parametrize("system", [SYSTEM, Blind()], ids=["seen", "not seen"])
def test_what_went_to_a_server_that_lives_is_not_settled_by_another_one(
    server: LMCacheServer, monkeypatch: pytest.MonkeyPatch, system: System
) -> None:
    monkeypatch.setattr("lmcache_client.channel.OVERDUE_S", PATIENCE_S)
    channel = Channel(address(server), lambda _channel: None, system=system)
    channel.start(PATIENCE_S, PATIENCE_S)
    first = channel.boot_id
    stop(server.pid)
    pending = channel.submit(messages.Ping(), PATIENCE_S)
    other = beside(server)
    try:
        with channel._lock:
            channel._break("as if it had not answered everything")
        wait_until(lambda: channel.ready, what="the other server has greeted the client")
        assert channel.boot_id != first
        assert channel.call(messages.Ping(), PATIENCE_S) == messages.Done()
        assert pending.done
        assert not pending.settled, "its server can still act on it"
        if system is SYSTEM:
            server.kill()
        else:
            monkeypatch.setattr("lmcache_client.channel.OVERDUE_S", 0.0)
        wait_until(lambda: pending.settled, what="nobody can act on it any more")
    finally:
        channel.close()
        server.kill()
        other.kill()


CLIENT = """
import sys
from harness.rawclient import RawEngine, chain, group
engine = RawEngine(sys.argv[1], [group()], engine_id=sys.argv[2]).start()
keys = chain(range(engine.chunk_size), engine.chunk_size)
engine.store_prompt(keys, [list(range(1, 1 + engine.chunk_size // 16))])
engine.lookup(keys)
print("up", flush=True)
sys.stdin.read()
"""


def test_a_killed_client_leaves_nothing_behind(server: LMCacheServer) -> None:
    with client(CLIENT, address(server), "victim"):
        status = server.status()
        assert len(status["sessions"]) == 2
        assert status["l1"]["leases"] == 1
    wait_until(lambda: server.status()["sessions"] == [])
    status = server.status()
    assert status["l1"]["leases"] == 0
    assert status["l1"]["reserved_bytes"] == 0
    assert status["l1"]["chunks"] == 1, "what it stored outlives it"


def test_a_client_that_says_goodbye_is_gone_at_once(server: LMCacheServer) -> None:
    engine = RawEngine(address(server), [group()]).start()
    assert len(server.status()["sessions"]) == 2
    engine.close()
    assert server.status()["sessions"] == []


def test_a_stopped_server_is_not_waited_for_again_and_again(server: LMCacheServer) -> None:
    engine = RawEngine(address(server), [group()]).start()
    try:
        stop(server.pid)
        engine.worker.submit(messages.Ping(), timeout_s=0.1)
        wait_until(lambda: not engine.worker.responsive)
        go_on(server.pid)
        wait_until(lambda: engine.worker.responsive)
    finally:
        engine.close()


def test_sigterm_with_engines_connected_ends_with_0_within_5_s(server: LMCacheServer) -> None:
    engine = RawEngine(address(server), [group()]).start()
    try:
        started_s = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - started_s < 5
        wait_until(lambda: not engine.worker.ready)
    finally:
        engine.close()


SHUT_CLIENT = """
import ctypes, sys, time
sys.path[:0] = sys.argv[3:]
from harness.rawclient import RawEngine, group
engine = RawEngine(sys.argv[1], [group()], engine_id=sys.argv[2])
ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: nobody without CAP_SYS_PTRACE may look inside
engine.start()
print(engine.worker.refusal.code, engine.worker.refusal, flush=True)
engine.close()
"""


def test_where_the_kernel_forbids_copies_the_refusal_says_what_to_change() -> None:
    with LMCacheServer(l1_size_gb=0.05, without_capability=19) as server:  # CAP_SYS_PTRACE
        command = [sys.executable, "-c", SHUT_CLIENT, address(server), "shut", *sys.path]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert result.stdout.startswith(messages.NO_ACCESS)
        for hint in ("user of vLLM", "kernel.yama.ptrace_scope", "seccomp"):
            assert hint in result.stdout


def test_over_tcp() -> None:
    with LMCacheServer(l1_size_gb=0.05, host="127.0.0.1") as server:
        engine = RawEngine(f"tcp://127.0.0.1:{server.port}", [group()]).start()
        try:
            keys = chain(range(engine.chunk_size), engine.chunk_size)
            table = [list(range(1, 1 + engine.chunk_size // 16))]
            pages = [engine.fill(0, block, block) for block in table[0]]
            engine.store_prompt(keys, table)
            found = engine.lookup(keys)
            engine.memory[:] = 0
            engine.load(found, keys, table)
            assert all((engine.pages(0, b) == p).all() for b, p in zip(table[0], pages, strict=True))
        finally:
            engine.close()


def test_a_lease_number_of_an_earlier_server_does_not_load_another_prompt(server: LMCacheServer) -> None:
    """Lease numbers start anew with the server: the same one soon stands for something else."""
    engine = RawEngine(address(server), [group()]).start()
    try:
        table = [list(range(1, 1 + engine.chunk_size // 16))]
        mine, others = (chain(range(s, s + engine.chunk_size), engine.chunk_size) for s in (0, 10_000))
        engine.store_prompt(mine, table)
        promised = engine.lookup(mine)
        generation = engine.scheduler.generation
        server.restart()
        wait_until(lambda: engine.scheduler.generation > generation and engine.worker.ready)
        engine.store_prompt(others, table)
        assert engine.lookup(others).lease_id == promised.lease_id
        with pytest.raises(RefusedError) as refused:
            engine.load(promised, mine, table)
        assert refused.value.code == messages.EXPIRED
    finally:
        engine.close()


def test_a_client_that_greets_twice_has_one_session(server: LMCacheServer) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address(server))
        for number in range(3):
            hello = messages.Hello(os.getpid(), bytes([number]) * 16, "test")
            socket.send(messages.encode_request(number, hello))
            assert socket.poll(5000)
            assert isinstance(messages.decode_reply(socket.recv())[2], messages.Welcome)
        assert len(server.status()["sessions"]) == 1


@pytest.mark.parametrize("over_tcp", [False, True])
def test_a_client_of_another_process_namespace_ends_with_its_connection(over_tcp: bool) -> None:
    """Its process id says nothing to the server, and must not be mistaken for that of another."""
    flags = {"host": "127.0.0.1"} if over_tcp else {}
    with LMCacheServer(l1_size_gb=0.05, **flags) as server, zmq.Context() as context:
        where = f"tcp://127.0.0.1:{server.port}" if over_tcp else address(server)
        for name in (b"one", b"two"):
            with context.socket(zmq.DEALER) as client:
                client.setsockopt(zmq.LINGER, 0)
                client.connect(where)
                greeting = messages.Hello(1 << 30, name.ljust(messages.CLIENT_ID_BYTES), "test")
                client.send(messages.encode_request(1, greeting))
                assert isinstance(messages.decode_reply(client.recv())[2], messages.Welcome)
                assert len(server.status()["sessions"]) == 1
            wait_until(lambda: not server.status()["sessions"])


def test_garbage_is_answered_or_dropped_and_the_server_goes_on(server: LMCacheServer) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address(server))
        for frame in (b"", b"\xc1", b"\x00" * 100, messages.encode_request(1, messages.Ping())[:-1]):
            socket.send(frame)
        socket.send_multipart([b"two", b"frames"])
        socket.send(b"\x94\x63\x07\x00\x90")  # version 99 of the protocol, request 7
        assert socket.poll(5000)
        _, request_id, reply = messages.decode_reply(socket.recv())
        assert request_id == 7
        assert isinstance(reply, messages.Refused)
        assert reply.code == messages.WRONG_VERSION
        assert "install the same version of lmcache-mp" in reply.message
        socket.send(b"\x94\x63\x08\x00\x90")
        assert socket.poll(5000)
        socket.recv()
        assert server.log.read_text().count("speaks protocol version 99") == 1, "it says so once"
        socket.send(messages.encode_request(8, messages.Done()))
        assert socket.poll(5000)
        assert messages.decode_reply(socket.recv())[2].code == messages.NOT_REGISTERED  # type: ignore[union-attr]
        socket.send(messages.encode_request(9, messages.Ping()))
        assert socket.poll(5000)
        assert isinstance(messages.decode_reply(socket.recv())[2], messages.Done)
