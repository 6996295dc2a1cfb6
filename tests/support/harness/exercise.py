"""A client that stores prompts, loads them elsewhere and compares every byte."""

import hashlib
import sys

from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import wait_until
from lmcache_client.contract.codec import packed
from lmcache_client.contract.keys import ROOT_KEY
from lmcache_client.contract.messages import Store, StoreObject

WRONG_BYTE = 3
"""Exit code of a process that saw a wrong byte."""
GROUPS = [
    group(layers=8, page_bytes=48 << 10),
    group("sliding_window", window=100, layers=4, page_bytes=32 << 10),
]


def new_engine(address: str, name: str) -> RawEngine:
    return RawEngine(address, GROUPS, num_blocks=130, engine_id=name).start()


def keys_of(engine: RawEngine, number: int) -> tuple[bytes, ...]:
    """The keys of the prompt with this number, which has three chunks."""
    return chain(range(number * 100_000, number * 100_000 + 3 * engine.chunk_size), engine.chunk_size)


def exercise(engine: RawEngine, number: int, salt: int = 0) -> int:
    """Store a prompt whose pages follow from its number and `salt`, its keys from its number alone; load what
    is there elsewhere, compare; returns the tokens that were loaded. Exits the process on a wrong byte."""
    keys = keys_of(engine, number)
    blocks = 3 * engine.chunk_size // 16
    tables = [list(range(1, 1 + blocks)) for _ in engine.groups]
    seed = salt * 1_000_000 + number * 1000
    found = engine.lookup(keys)
    if found.resume_tokens:
        elsewhere = [list(range(60, 60 + blocks)) for _ in engine.groups]
        engine.load(found, keys, elsewhere)
        for index, each in enumerate(engine.groups):
            for position in each.needed_blocks(found.resume_tokens):
                right = engine.fill(index, 125, seed + index * 500 + position)
                if (engine.pages(index, 60 + position) != right).any():
                    sys.exit(WRONG_BYTE)
    for index, table in enumerate(tables):
        for position, block in enumerate(table):
            engine.fill(index, block, seed + index * 500 + position)
    engine.store_prompt(keys, tables)
    engine.end(found, keys)
    return found.resume_tokens


def served(server: LMCacheServer, name: str, number: int) -> int:
    """The tokens that this prompt gets in a new engine, which then stores it."""
    engine = new_engine(server.address, name)
    try:
        return exercise(engine, number)
    finally:
        engine.close()


def wait_until_found(engine: RawEngine, number: int) -> None:
    """Look a prompt up until all of it is found. On a busy machine a lookup that waits for a tier may come
    too late and answer zero; what it fetched stays."""
    keys = keys_of(engine, number)

    def is_found() -> bool:
        answer = engine.lookup(keys)
        engine.end(answer, keys)
        return answer.resume_tokens == len(keys) * engine.chunk_size

    wait_until(is_found, what=f"prompt {number} is found", interval_s=0.5)


def restored(engine: RawEngine, number: int) -> int:
    """As `exercise`, for a prompt that is whole in L1 or a tier."""
    wait_until_found(engine, number)
    return exercise(engine, number)


def is_served(server: LMCacheServer, name: str, number: int) -> bool:
    """Whether all of this prompt comes from the server, exactly."""
    engine = new_engine(server.address, name)
    try:
        return restored(engine, number) == 3 * engine.chunk_size
    finally:
        engine.close()


def keep_the_server_copying(engine: RawEngine, seed: int, stores: int = 8) -> None:
    """Stores that nobody waits for or reads again: a kill that follows finds the server in a copy."""
    for number in range(stores):
        key = hashlib.sha256(f"{seed} {number}".encode()).digest()
        positions = engine.groups[0].stored_blocks(0, engine.chunk_size)
        blocks = tuple(range(1, 1 + len(positions)))
        engine.worker.submit(Store((StoreObject(key, ROOT_KEY, 0, 0, packed(blocks)),)), 60)
