"""Clients killed in the middle of stores and loads, many times: the server stays whole, bytes stay right."""

import hashlib
import random
import subprocess
import sys
import time
from pathlib import Path

from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer

from lmcache_client.contract.keys import ROOT_KEY
from lmcache_client.contract.protocol import Store, StoreObject

HERE = str(Path(__file__).parent)
KILLS = 60
PROMPTS = 12
GROUPS = [
    group(layers=8, page_bytes=48 << 10),
    group("sliding_window", window=100, layers=4, page_bytes=32 << 10),
]

CLIENT = """
import random, sys
sys.path[:0] = sys.argv[3:]
from test_kills import exercise, keep_the_server_copying, new_engine
engine = new_engine(sys.argv[1], sys.argv[2])
draw = random.Random(sys.argv[2])
for turn in range(1_000_000):
    keep_the_server_copying(engine, draw.randrange(1 << 30))
    if not turn:
        print("up", flush=True)
    exercise(engine, draw.randrange(12))
"""


def new_engine(address: str, name: str) -> RawEngine:
    return RawEngine(address, GROUPS, num_blocks=130, engine_id=name).start()


def exercise(engine: RawEngine, number: int) -> int:
    """Store a prompt whose pages follow from its number, load what is there elsewhere, compare; returns
    the tokens that were loaded. Exits the process with code 3 on a wrong byte."""
    tokens = 3 * engine.chunk_size
    keys = chain(range(number * 100_000, number * 100_000 + tokens), engine.chunk_size)
    blocks = tokens // 16
    tables = [list(range(1, 1 + blocks)), list(range(1, 1 + blocks))]
    found = engine.lookup(keys)
    if found.resume_tokens:
        elsewhere = [list(range(60, 60 + blocks)), list(range(60, 60 + blocks))]
        engine.retrieve(found, keys, elsewhere)
        for index, each in enumerate(engine.groups):
            for position in each.needed_blocks(found.resume_tokens):
                right = engine.fill(index, 125, number * 1000 + index * 500 + position)
                if (engine.pages(index, 60 + position) != right).any():
                    sys.exit(3)
    for index in range(2):
        for position, block in enumerate(tables[index]):
            engine.fill(index, block, number * 1000 + index * 500 + position)
    engine.store_prompt(keys, tables)
    engine.end(found, keys)
    return found.resume_tokens


def keep_the_server_copying(engine: RawEngine, seed: int) -> None:
    """Stores that nobody waits for or reads again: a kill that follows finds the server in a copy."""
    for number in range(8):
        key = hashlib.sha256(f"{seed} {number}".encode()).digest()
        positions = engine.groups[0].stored_blocks(0, engine.chunk_size)
        blocks = tuple(range(1, 1 + len(positions)))
        engine.worker.submit(Store((StoreObject(key, ROOT_KEY, 0, 0, blocks),)), 60)


def test_clients_killed_in_mid_copy_leave_the_server_whole() -> None:
    draw = random.Random(3)
    # Less room than the prompts and the stores beside them take: eviction goes on all the while.
    with LMCacheServer(l1_size_gb=0.2) as server:
        address = f"ipc://{server.runtime_dir}/{server.port}.sock"
        for number in range(KILLS // 2):
            pair = [
                subprocess.Popen(
                    [sys.executable, "-c", CLIENT, address, f"{number}-{side}", HERE, *sys.path],
                    stdout=subprocess.PIPE,
                )
                for side in range(2)
            ]
            for client in pair:
                assert client.stdout is not None
                assert client.stdout.readline() == b"up\n"
            time.sleep(draw.random() * draw.choice((0.01, 0.1, 0.3)))
            for client in pair:
                assert client.poll() is None, "a client saw a wrong byte or an error"
                client.kill()
            for client in pair:
                client.wait()
                assert client.stdout is not None
                client.stdout.close()
        limit_s = time.monotonic() + 5
        while server.status()["sessions"]:
            assert time.monotonic() < limit_s
            time.sleep(0.02)
        l1 = server.status()["l1"]
        assert l1["leases"] == l1["readers"] == l1["reserved_bytes"] == 0
        assert l1["free_bytes"] + l1["ready_bytes"] == l1["total_bytes"]
        engine = new_engine(address, "last")
        try:
            for number in range(PROMPTS):
                exercise(engine, number)
                assert exercise(engine, number) == 3 * engine.chunk_size, "it serves as before"
        finally:
            engine.close()
        metrics = server.metrics()
        failures = metrics['lmcache_copy_failures_total{direction="store"}']
        assert failures > 0, "some died in mid-copy"
        assert server.terminate() == 0, "the invariants are checked at the end"
