"""A prompt of a million tokens: a real server and the real channel, and the largest messages."""

import array
import random

import numpy as np
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer

from lmcache_client.contract.codec import packed
from lmcache_client.contract.keys import KEY_BYTES, MAX_CHUNKS
from lmcache_client.contract.messages import Done, Load, Lookup, decode_request, encode_request
from lmcache_client.engine import chunk_object
from lmcache_server.core.cache import Cache, Layout, Reservation

TOKENS = 1_000_000
GROUPS = (
    group(layers=1, page_bytes=64),
    group("sliding_window", window=1024, layers=1, page_bytes=64),
    group("recurrent", block_size=256, layers=1, page_bytes=512),
)
STEP_TOKENS = 1 << 14


def test_it_is_stored_step_by_step_and_restored_at_its_end_and_in_its_middle() -> None:
    blocks = sum(TOKENS // each.block_size + 1 for each in GROUPS)
    with LMCacheServer(l1_size_gb=1) as server:
        engine = RawEngine(server.address, GROUPS, 2 * blocks + 1).start()
        keys = chain(array.array("i", range(TOKENS)), engine.chunk_size)
        free = list(range(1, 2 * blocks + 1))
        random.Random(1).shuffle(free)
        tables = [[free.pop() for _ in range(TOKENS // each.block_size + 1)] for each in GROUPS]
        engine.memory[:] = np.random.default_rng(2).integers(0, 256, len(engine.memory), np.uint8)
        whole = len(keys) * engine.chunk_size
        assert whole > TOKENS - engine.chunk_size
        # Windows and states are stored where a request resumes: here, in the middle and at the end.
        resumes = [whole // 2 // engine.chunk_size * engine.chunk_size, whole]
        needed = [{at for n in resumes for at in each.needed_blocks(n)} for each in GROUPS]
        step = STEP_TOKENS // engine.chunk_size
        for first in range(0, len(keys), step):
            objects = []
            for chunk in range(first, min(first + step, len(keys))):
                for index, each in enumerate(GROUPS):
                    positions = each.stored_blocks(chunk, engine.chunk_size)
                    if needed[index].intersection(positions):
                        ids = tuple(tables[index][at] for at in positions)
                        objects.append(chunk_object(keys, chunk, index, ids))
            assert engine.store(objects).stored == len(objects)
        for resume in resumes:
            found = engine.lookup(keys, limit=resume)
            assert found.resume_tokens == resume
            others = [[free.pop() for _ in table] for table in tables]
            assert isinstance(engine.load(found, keys, others), Done)
            for index, each in enumerate(GROUPS):
                spec, at = engine.groups[index].regions[0], list(each.needed_blocks(resume))
                pages = np.ndarray(
                    (engine.num_blocks, spec.page_bytes), np.uint8, engine.memory, spec.offset
                )  # no padding
                assert at
                assert (pages[np.array(tables[index])[at]] == pages[np.array(others[index])[at]]).all()
            engine.end(found)
            free += [block for table in others for block in table]


def test_with_the_smallest_chunks_it_fits_into_messages_leases_and_reads() -> None:
    """16 tokens, the smallest block of vLLM; three groups."""
    groups = (group(layers=1), *(group("sliding_window", window=TOKENS, layers=1) for _ in range(2)))
    count = TOKENS // 16
    assert count <= MAX_CHUNKS
    keys = tuple(number.to_bytes(KEY_BYTES, "big") for number in range(count))
    blocks = packed(range(1_000_000, 1_000_000 + count))
    for message in (
        Lookup("request", keys, 0, TOKENS, TOKENS + 1),
        Load("request", 1, keys[-1], TOKENS, 0, (blocks,) * len(groups)),
    ):
        assert decode_request(encode_request(1, message)) == (1, message)
    cache = Cache(64, count * len(groups))
    layout = Layout(b"ns", 16, groups, ((0,),) * len(groups))
    for key in keys:
        for number in range(len(groups)):
            room = cache.reserve(layout, key, number, 0, 1, 64)
            assert isinstance(room, Reservation)
            cache.commit(room)
    hit = cache.lookup(layout, keys, 0, TOKENS, 1, 0.0)
    assert hit.resume_tokens == TOKENS
    read = cache.open_read(hit.lease_id, keys[-1], 0, TOKENS, 0, layout)
    assert read is not None
    assert sum(part.pages for part in read.parts) == count * len(groups)
