"""Sessions: memory must be proven, deaths and restarts are noticed, nothing is leaked."""

from pathlib import Path

import pytest
from harness.clients import go_on, stop
from harness.peer import Peer
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S, wait_until

from lmcache_client.contract import messages
from lmcache_client.server_channel import Channel, RefusedError
from lmcache_client.transport import SYSTEM, System


def one_chunk(first: int = 0) -> tuple[tuple[bytes, ...], list[list[int]]]:
    """The keys of a prompt of one chunk, and its block table."""
    return chain(range(first, first + 256), 256), [list(range(1, 17))]


def test_a_restart_within_milliseconds_is_noticed_and_leases_from_before_it_load_nothing(
    server: LMCacheServer,
) -> None:
    """Lease numbers start anew with the server: the same one soon stands for something else."""
    engine = RawEngine(server.address, [group()]).start()
    (mine, table), (others, _) = one_chunk(), one_chunk(10_000)
    engine.store_prompt(mine, table)
    promised = engine.lookup(mine)
    boot_id, generations = engine.worker.boot_id, (engine.worker.generation, engine.scheduler.generation)
    server.restart()
    wait_until(lambda: engine.worker.generation > generations[0], what="the worker is back")
    wait_until(lambda: engine.scheduler.generation > generations[1], what="the scheduler is back")
    assert engine.worker.boot_id != boot_id
    assert engine.lookup(mine).resume_tokens == 0
    assert engine.store_prompt(others, table).stored == 1
    assert engine.lookup(others).lease_id == promised.lease_id
    with pytest.raises(RefusedError) as refused:
        engine.load(promised, mine, table)
    assert refused.value.code == messages.EXPIRED
    assert engine.store_prompt(mine, table).stored == 1
    assert engine.lookup(mine).resume_tokens == 256


class Blind(System):
    """A client that cannot open the server's process: EMFILE, another process namespace, a sandbox."""

    def open_process(self, pid: int) -> None:
        return None


@pytest.mark.parametrize("system", [SYSTEM, Blind()], ids=["seen", "not seen"])
def test_what_went_to_a_server_that_lives_is_not_settled_by_another_one(
    server: LMCacheServer, monkeypatch: pytest.MonkeyPatch, system: System
) -> None:
    monkeypatch.setattr("lmcache_client.server_channel.OVERDUE_S", PATIENCE_S)
    channel = Channel(server.address, lambda _channel: None, system=system)
    channel.start(PATIENCE_S, PATIENCE_S)
    first = channel.boot_id
    stop(server.pid)
    pending = channel.submit(messages.Ping(), PATIENCE_S)
    other = server.beside()
    for file in Path(server.runtime_dir).iterdir():
        file.unlink()
    other.start()
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
            monkeypatch.setattr("lmcache_client.server_channel.OVERDUE_S", 0.0)
        wait_until(lambda: pending.settled, what="nobody can act on it any more")
    finally:
        channel.close()
        server.kill()
        other.kill()


def test_a_stopped_server_is_not_waited_for_again_and_again(server: LMCacheServer) -> None:
    engine = RawEngine(server.address, [group()]).start()
    stop(server.pid)
    engine.worker.submit(messages.Ping(), timeout_s=0.1)
    wait_until(lambda: not engine.worker.responsive)
    go_on(server.pid)
    wait_until(lambda: engine.worker.responsive)
    assert server.terminate() == 0, "with engines connected"
    wait_until(lambda: not engine.worker.ready)


def test_a_client_of_another_process_namespace_ends_with_its_connection() -> None:
    """Its process id says nothing to the server, and must not be mistaken for that of another."""
    for flags in ({}, {"host": "127.0.0.1"}):
        with LMCacheServer(l1_size_gb=0.05, **flags) as server:  # type: ignore[arg-type]
            for _ in range(2):
                with Peer(server.address) as peer:
                    assert isinstance(peer.ask(peer.hello(1 << 30)), messages.Welcome)
                    assert len(server.status()["sessions"]) == 1
                server.wait_at_rest()


def test_another_version_of_the_protocol_is_told_to_install_the_same(server: LMCacheServer) -> None:
    with Peer(server.address) as peer:
        for request_id in (7, 8):
            peer.socket.send(bytes([0x94, 99, request_id, 0, 0x90]))
            reply = peer.wait_for(request_id)
            assert isinstance(reply, messages.Refused)
            assert reply.code == messages.WRONG_VERSION
            assert "install the same version of lmcache-mp" in reply.message
        server.wait_for_log("speaks protocol version 99")
        reply = peer.ask(messages.Done())
        assert isinstance(reply, messages.Refused)
        assert reply.code == messages.NOT_REGISTERED
        assert isinstance(peer.ask(messages.Ping()), messages.Done)
