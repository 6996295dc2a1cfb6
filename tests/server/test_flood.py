"""One client that floods the server: the others are answered, and the server's memory stays bounded."""

from collections.abc import Iterator

import pytest
from harness.clients import client
from harness.exercise import exercise, keys_of, new_engine
from harness.peer import Peer
from harness.server import LMCacheServer
from harness.waiting import wait_until

from lmcache_client.contract.messages import Lookup

LOOKUPS = 20
"""So often another client asks while one floods the server."""
MOST_RSS_BYTES = 200 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=0.1) as running:
        running.wait_until_populated()
        yield running
        running.wait_at_rest()
        assert running.terminate() == 0, "the invariants are checked at the end"


# Sends as fast as the socket takes it, and reads whatever comes.
FLOODER = """
import itertools, os, sys, zmq
from harness.peer import Peer
from lmcache_client.contract import messages
from lmcache_client.contract.codec import packed
from lmcache_client.contract.control import Status
from lmcache_client.contract.keys import ROOT_KEY
from lmcache_client.contract.messages import Hello, Lookup, Register, Store

peer = Peer(sys.argv[1], "flooder")
peer.live("store")
kind = sys.argv[2]
chain = tuple(number.to_bytes(32, "big") for number in range(1 << 16))


def message(number):
    if kind == "long lookup":
        return Lookup("r", peer.keys + chain[2:], 0, 256 * len(chain), 256 * len(chain) + 1)
    if kind == "new store":
        key = number.to_bytes(32, "little")
        return Store((messages.StoreObject(key, ROOT_KEY, 0, 0, packed(peer.chunk_blocks(0))),))
    if kind == "hello":
        return Hello(os.getpid(), os.urandom(16), "flooder")
    if kind == "register":
        tag = messages.ModelTag("m", (("weights", f"{number}"),), 1, 1)
        return Register("flooder", 0, tag, peer.geometry, peer.host_memory())
    return Status()


def drain():
    while True:
        try:
            peer.socket.recv(zmq.NOBLOCK)
        except zmq.ZMQError:
            return


print("up", flush=True)
garbage = {"garbage": os.urandom(1000), "large garbage": b"\\xdd\\x00\\x3f\\xff\\xf0" + b"\\x01" * 0x3ffff0}
for number in itertools.count(1):
    try:
        if kind in garbage:
            peer.socket.send(garbage[kind], zmq.NOBLOCK)
        else:
            peer.socket.send(messages.encode_request(number, message(number)), zmq.NOBLOCK)
    except zmq.ZMQError:
        peer.socket.poll(1, zmq.POLLOUT)
    drain()
"""
KINDS = ("long lookup", "new store", "hello", "register", "status", "garbage", "large garbage")


MANY = """
import os, sys, zmq
from harness.peer import Peer
from lmcache_client.contract import messages
from lmcache_client.contract.messages import Lookup

keys = tuple(os.urandom(32) for _ in range(1 << 16))
frame = messages.encode_request(1, Lookup("r", keys, 0, 256 * len(keys), 256 * len(keys) + 1))
peers = [Peer(sys.argv[1], f"flooder {number}") for number in range(16)]
for peer in peers:
    peer.live("join")
print("up", flush=True)
while True:
    for peer in peers:
        try:
            peer.socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            pass
        while peer.socket.poll(0):
            peer.socket.recv()
"""


def test_a_process_gets_no_more_turns_through_more_connections(server: LMCacheServer) -> None:
    lookup, refused = (
        f'lmcache_requests_total{{op="{name}"}}'
        for name in ('lookup",outcome="ok', 'other",outcome="refused')
    )
    chain = tuple(number.to_bytes(32, "big") for number in range(1 << 16))
    long = Lookup("r", chain, 0, 256 * len(chain), 256 * len(chain) + 1)
    with Peer(server.address, "bystander") as bystander, client(MANY, server.address):
        bystander.live("store")
        wait_until(lambda: server.metrics()[refused] > 0, 60, "more waits than one process may have waiting")
        before = server.metrics()[lookup]
        numbers = [bystander.send(long) for _ in range(12)]
        assert [bystander.receive()[0] for _ in numbers] == numbers
        others = server.metrics()[lookup] - before - len(numbers)
    print(f"{others:.0f} lookups of the others")
    assert others < 4 * len(numbers), "each of their connections has a turn for each of ours"
    server.wait_at_rest()


@pytest.mark.parametrize("kind", KINDS)
def test_beside_a_client_that_floods_others_are_answered_and_memory_is_bounded(
    server: LMCacheServer, kind: str
) -> None:
    bystander = new_engine(server.address, f"beside {kind}")
    exercise(bystander, 1)
    before, handled = server.rss_bytes(), server.answered()
    with client(FLOODER, server.address, kind) as flooder:
        for _ in range(LOOKUPS):
            bystander.end(bystander.lookup(keys_of(bystander, 2)))
        wait_until(lambda: server.answered() > handled + 2 * LOOKUPS + 20, what="it is a flood")
        peak = server.rss_bytes()
        assert flooder.popen.poll() is None
    assert peak - before < MOST_RSS_BYTES
    server.wait_at_rest(sessions=2)
    exercise(bystander, 2)
    assert exercise(bystander, 2) == 3 * bystander.chunk_size
    bystander.close()
