"""A client that stores prompts, loads them elsewhere and compares every byte."""

import hashlib
import sys

from harness.rawclient import RawEngine, chain, group
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


def exercise(engine: RawEngine, number: int, salt: int = 0) -> int:
    """Store a prompt whose pages follow from its number and `salt`, its keys from its number alone; load what
    is there elsewhere, compare; returns the tokens that were loaded. Exits the process on a wrong byte."""
    tokens = 3 * engine.chunk_size
    keys = chain(range(number * 100_000, number * 100_000 + tokens), engine.chunk_size)
    blocks = tokens // 16
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


def keep_the_server_copying(engine: RawEngine, seed: int, stores: int = 8) -> None:
    """Stores that nobody waits for or reads again: a kill that follows finds the server in a copy."""
    for number in range(stores):
        key = hashlib.sha256(f"{seed} {number}".encode()).digest()
        positions = engine.groups[0].stored_blocks(0, engine.chunk_size)
        blocks = tuple(range(1, 1 + len(positions)))
        engine.worker.submit(Store((StoreObject(key, ROOT_KEY, 0, 0, blocks),)), 60)
