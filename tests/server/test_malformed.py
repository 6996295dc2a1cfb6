"""Frames that are no messages, and messages that lie: refused or dropped, and nothing is harmed by them."""

import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence

import pytest
import zmq
from harness.exercise import served
from harness.peer import CHUNK_BLOCKS, CHUNK_SIZE, Peer
from harness.server import LMCacheServer
from msgspec import structs

from lmcache_client.contract import messages
from lmcache_client.contract.codec import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, pack, packed, unpacked
from lmcache_client.contract.geometry import Geometry, GroupSpec, Region
from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.messages import (
    Done,
    Hello,
    Join,
    Joined,
    Memory,
    Message,
    Ping,
    Prove,
    Refused,
    Release,
    Store,
    StoreObject,
)
from lmcache_server.host import machine

BIG = (1 << 63) - 1


@pytest.fixture(scope="module")
def server() -> Iterator[LMCacheServer]:
    """One for all tests of this file; at its end the invariants are checked."""
    with LMCacheServer(l1_size_gb=0.1) as running:
        running.wait_until_populated()  # tests compare figures of L1
        yield running
        running.wait_at_rest()
        log = running.log.read_text()
        assert " ERROR " not in log, "no request met a fault of the server"
        assert "Traceback" not in log
        assert running.terminate() == 0


@pytest.fixture
def peer(server: LMCacheServer) -> Iterator[Peer]:
    with Peer(server.address) as one:
        yield one
        # Whatever was said before, the server answers, and to the one that said it.
        with Peer(server.address) as other:
            assert isinstance(other.ask(Ping()), Done)
        if not one.socket.closed:
            one.ask(one.hello())
            one.ask(messages.Goodbye())


def refused(reply: Message, *codes: str) -> str:
    assert isinstance(reply, Refused), reply
    assert reply.code in codes, reply
    return reply.message


# -- frames -------------------------------------------------------------------------------------------


def test_empty_frames_and_multipart_messages_are_dropped(peer: Peer) -> None:
    honest = messages.encode_request(77, Ping())
    for parts in ([b""], [b"", b""], [b"", honest], [honest, honest], [honest] * 50, [honest, b""]):
        peer.socket.send_multipart(parts)
    request_id = peer.send(Ping())
    assert peer.receive()[0] == request_id, "no reply came before"


def test_invariant_4_the_largest_frame_is_read_and_a_larger_one_ends_a_connection(
    server: LMCacheServer,
) -> None:
    with Peer(server.address) as peer:
        peer.live("join")
        frame = pack([messages.PROTOCOL_VERSION, 5, 11, ["r", 1, bytes(32), 0, 0, [[1] * 4_000_000]]])
        assert MAX_MESSAGE_BYTES - 200_000 < len(frame) <= MAX_MESSAGE_BYTES
        peer.socket.send(frame)
        refused(peer.wait_for(5), messages.BAD_REQUEST)
        events = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        peer.socket.send(bytes(MAX_FRAME_BYTES + 1))
        assert events.poll(60_000), "the connection is closed, before the frame is read"
        peer.socket.disable_monitor()
        events.close(0)
        # It connects again by itself, is nobody, and can greet.
        refused(peer.ask(Join("peer")), messages.NOT_REGISTERED)
        peer.live("goodbye")


# -- lies ---------------------------------------------------------------------------------------------


def test_lies_about_the_shape_of_an_engine(peer: Peer) -> None:
    peer.live("hello")
    size = peer.memory.nbytes
    honest = peer.register()

    def geometry(*regions: Region, block_size: int = 16, kind: str = "full", blocks: int = 40) -> Geometry:
        return Geometry((GroupSpec(kind, block_size, 0, "", regions),), blocks)

    lies = [
        {"rank": 1},
        {"rank": BIG},
        {"model": ModelTag("m", (), 0, 0)},
        {"geometry": geometry(Region(0, 0, 4096, 4097))},
        {"geometry": geometry(Region(0, 1, 4096, 4096))},
        {"geometry": geometry(Region(1, 0, 4096, 4096))},
        {"geometry": geometry(Region(BIG, BIG, BIG, 1))},
        {"geometry": geometry(Region(0, size, 1, 1))},
        {"geometry": geometry(Region(0, 0, 0, 0))},
        {"geometry": geometry(Region(0, 0, 4096, 4096), blocks=1 << 31)},
        {"geometry": Geometry(tuple(GroupSpec("full", 4194301 - 2 * n, 0, "", ()) for n in range(64)), 2)},
    ]
    for lie in lies:
        reply = peer.ask(structs.replace(honest, **lie))  # type: ignore[arg-type]
        refused(reply, messages.BAD_REQUEST, messages.CONFIGURATION)
    refused(peer.ask(Prove()), messages.BAD_REQUEST)


def closed_pages(size: int) -> int:
    """The address of memory without any right to read or write, so that nothing else comes to lie there."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    return int(libc.mmap(None, size, 0, 0x22, -1, 0))


def test_lies_about_memory(server: LMCacheServer) -> None:
    with Peer(server.address) as honest:
        own, size = honest.host_memory(), honest.memory.nbytes
    start = own.buffers[0][0]
    lies = [
        *(structs.replace(own, pid=pid) for pid in (1, 0, BIG, 1 << 31, (1 << 32) + 1)),
        *(structs.replace(own, buffers=((at, BIG),)) for at in (0, BIG, start)),
        *(structs.replace(own, buffers=((at, size),)) for at in (1 << 46, closed_pages(size))),
        # Nothing wrote the nonce to the last of these, which can be read.
        *(structs.replace(own, proof_address=at) for at in (0, BIG, start)),
    ]
    for lie in lies:
        with Peer(server.address) as peer:
            peer.live("hello")
            reply = peer.ask(structs.replace(peer.register(), memory=lie))
            refused(reply if isinstance(reply, Refused) else peer.ask(Prove()), messages.NO_ACCESS)
            refused(peer.ask(peer.store()), messages.NOT_REGISTERED)
            peer.ask(messages.Goodbye())


def test_lies_about_the_process_of_a_session(server: LMCacheServer) -> None:
    for pid in (0, 1, 1 << 22, 1 << 31, BIG):
        with Peer(server.address) as peer:
            assert isinstance(peer.ask(Hello(pid, peer.client_id, "peer")), messages.Welcome)
            peer.live("goodbye", since="register")


def wrong_ids(ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Too few, too many, and blocks that the engine does not have, of 40."""
    yield from ((), (*ids[1:],), (*ids, 1))
    for number in (0, 40, 1 << 31, (1 << 32) - 1):
        yield from ((number, *ids[1:]), (*ids[:-1], number))


def test_lies_about_stores_change_nothing(peer: Peer, server: LMCacheServer) -> None:
    peer.live("join")
    (first, *_) = peer.store().objects
    lies = [
        {"group": 1},
        {"group": BIG},
        {"chunk_index": 1 << 16},
        {"chunk_index": BIG},
        *({"block_ids": packed(lie)} for lie in wrong_ids(unpacked(first.block_ids))),
        {"block_ids": first.block_ids[1:]},
        {"block_ids": first.block_ids + b"\0"},
    ]
    before = server.status()["l1"]
    for lie in lies:
        # The whole message is refused, the object that is right in it as well.
        wrong = structs.replace(first, **lie)  # type: ignore[arg-type]
        refused(peer.ask(Store((first, wrong))), messages.BAD_REQUEST)
    assert server.status()["l1"] == before


def test_lies_about_chains_store_what_nobody_finds(peer: Peer, server: LMCacheServer) -> None:
    """A key is whatever a client says; only those who say the same find it, in the same namespace."""
    peer.live("join")
    ids = Peer.chunk_blocks(0)
    for number, parent in enumerate((bytes(32), b"\xff" * 32, bytes([7]) * 32)):
        key = bytes([7 + number]) * 32  # the last is its own parent
        for chunk in (0, (1 << 16) - 1):
            reply = peer.ask(Store((StoreObject(key, parent, chunk, 0, packed(ids)),) * 3))
            assert isinstance(reply, messages.Stored)
            assert reply.present >= 2
    server.cli("clear")


def test_lies_about_lookups(peer: Peer) -> None:
    peer.live("store")
    honest = peer.lookup()
    sizes = (0, 16, 512, BIG), (0, 16, 512, 768, BIG), (0, 1, 513, BIG)
    for computed, limit, num in itertools.product(*sizes):
        asked = structs.replace(honest, computed_tokens=computed, limit_tokens=limit, num_tokens=num)
        reply = peer.ask(asked)
        if computed <= limit < num and limit <= 512:
            assert isinstance(reply, messages.Found)
        else:
            refused(reply, messages.BAD_REQUEST)
    for keys in ((), (bytes(32),) * (1 << 16), peer.keys * (1 << 14)):
        assert isinstance(peer.ask(structs.replace(honest, keys=keys, limit_tokens=0)), messages.Found)
    reply = peer.ask(Join("another"))
    assert isinstance(reply, Joined)
    assert not reply.ready


def test_lies_about_leases_load_nothing(peer: Peer, server: LMCacheServer) -> None:
    peer.live("lookup")
    honest = peer.load()
    peer.memory[:] = 9
    ids = unpacked(honest.block_ids[0])
    lies = [
        {"lease_id": 0},
        {"lease_id": honest.lease_id + 1},
        {"lease_id": BIG},
        {"key": peer.keys[0]},
        {"key": bytes(32)},
        {"resume_tokens": CHUNK_SIZE, "block_ids": (packed(ids[:CHUNK_BLOCKS]),)},
        {"resume_tokens": 3 * CHUNK_SIZE, "block_ids": (packed((*ids[:39], *(1,) * 9)),)},
        {"resume_tokens": BIG},
        {"resume_tokens": BIG // CHUNK_SIZE * CHUNK_SIZE},
        {"computed_tokens": BIG},
        {"computed_tokens": 16},
        {"computed_tokens": 1 << 40, "block_ids": (b"",)},
        {"block_ids": ()},
        {"block_ids": 2 * honest.block_ids},
        *({"block_ids": (packed(lie),)} for lie in wrong_ids(ids)),
        {"block_ids": (honest.block_ids[0][1:],)},
        {"block_ids": (honest.block_ids[0] + b"\0",)},
    ]
    for lie in lies:
        reply = peer.ask(structs.replace(honest, **lie))  # type: ignore[arg-type]
        if isinstance(reply, Refused):
            refused(reply, messages.BAD_REQUEST, messages.EXPIRED)
    assert (peer.memory == 9).all(), "not a byte was written"
    with Peer(server.address, "thief") as thief:
        thief.live("join")
        # Leases end for their owner alone, whoever names them.
        thief.ask(Release(tuple(range(4096)), ()))
        assert server.status()["l1"]["leases"] == 1
        thief.ask(messages.Goodbye())
    assert isinstance(peer.ask(honest), Done)
    assert not peer.memory[4096 : 33 * 4096].any(), "the honest one loads"


def test_memory_of_a_process_that_the_client_did_not_start_is_refused(
    peer: Peer, server: LMCacheServer
) -> None:
    """What is proven is that the nonce is there, and a cache hands bytes around: also to other processes."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as own:
        # Workers of one run share what starts their servers, so a server is not always this process's.
        of_server = machine.is_descendant(server.pid, os.getpid())
        for pid, is_own in ((os.getppid(), False), (1, False), (own.pid, True), (server.pid, of_server)):
            with Peer(server.address, f"owner of {pid}") as thief:
                thief.live("hello")
                reply = thief.ask(
                    structs.replace(thief.register(), memory=Memory(pid, ((1 << 20, 4096 * 40),), 1))
                )
                if is_own:
                    assert isinstance(reply, messages.Challenge)
                    refused(thief.ask(messages.Prove()), messages.NO_ACCESS)
                else:
                    refused(reply, messages.NO_ACCESS)
        own.kill()
    assert isinstance(peer.ask(messages.Ping()), Done)


def test_of_two_live_engines_of_one_name_the_later_is_told(peer: Peer, server: LMCacheServer) -> None:
    peer.live("join")
    for model in (peer.model, ModelTag("another model", (), 1, 1)):
        with Peer(server.address) as later:
            later.model = model
            later.live("hello")
            refused(later.ask(later.register()), messages.ENGINE_ID_TAKEN)
            refused(later.ask(later.message("join")), messages.ENGINE_ID_TAKEN)
            assert isinstance(peer.ask(peer.store()), messages.Stored), "the earlier one is not disturbed"
            later.ask(messages.Goodbye())
    peer.ask(messages.Goodbye())
    with Peer(server.address) as heir:
        heir.live("lookup")
        assert heir.found is not None
        assert heir.found.resume_tokens
        heir.ask(messages.Goodbye())


def test_after_all_that_the_cache_serves(server: LMCacheServer) -> None:
    assert served(server, "honest", 1) == 0
    assert served(server, "another", 1) == 3 * CHUNK_SIZE
