"""`--checksums`: a page that was damaged in L1 is never loaded, is forgotten, counted and logged."""

from pathlib import Path

import numpy as np
import pytest
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import wait_until

from lmcache_client.contract import messages
from lmcache_client.server_channel import RefusedError

GROUPS = [group(layers=3, page_bytes=6000), group("sliding_window", window=40, layers=2, page_bytes=70_000)]


BLOCKS = list(range(1, 33))
"""Of two chunks, in each group."""


def damage(server: LMCacheServer, page: bytes) -> None:
    """Flip a bit in the middle of the one copy of `page` in the server's memory."""
    l1_bytes = int(server.flags["l1_size_gb"] * (1 << 30)) // 65536 * 65536
    maps = Path(f"/proc/{server.pid}/maps").read_text().splitlines()
    extents = [[int(each, 16) for each in line.split()[0].split("-")] for line in maps if " rw" in line]
    # L1 is the first mapping of its size.
    start = next(start for start, end in extents if end - start == l1_bytes)
    with open(f"/proc/{server.pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        at = memory.read(l1_bytes).find(page)
        assert at >= 0, "the page is in L1"
        middle = start + at + len(page) // 2
        memory.seek(middle)
        byte = memory.read(1)[0]
        memory.seek(middle)
        memory.write(bytes([byte ^ 16]))


def store(engine: RawEngine, first: int) -> tuple[bytes, ...]:
    for block in BLOCKS:
        for index in range(2):
            engine.fill(index, block, first + 100 * block + index)
    keys = chain(range(first, first + 2 * engine.chunk_size), engine.chunk_size)
    engine.store_prompt(keys, [BLOCKS] * 2)
    return keys


def page_of_the_second_chunk(engine: RawEngine) -> bytes:
    """Of the prompt that was stored last."""
    return engine.pages(0, BLOCKS[-3])[6000:12000].tobytes()


@pytest.mark.parametrize("checksums", [True, False])
def test_a_damaged_page_is_a_miss(checksums: bool) -> None:
    with LMCacheServer(l1_size_gb=0.0625, checksums=checksums) as server:
        engine = RawEngine(server.address, GROUPS, num_blocks=140).start()
        size, elsewhere = engine.chunk_size, [list(range(80, 112))] * 2
        first, second = store(engine, 0), store(engine, 10_000)
        damage(server, page_of_the_second_chunk(engine))
        before = engine.memory.copy()
        found = engine.lookup(second)
        assert found.resume_tokens == 2 * size
        if not checksums:
            engine.load(found, second, elsewhere)
            wrong = engine.pages(0, elsewhere[0][-3]) != engine.pages(0, BLOCKS[-3])
            assert int(np.count_nonzero(wrong)) == 1, "the test does damage what would be loaded"
            return
        with pytest.raises(RefusedError) as refusal:
            engine.load(found, second, elsewhere)
        assert refusal.value.code == messages.COPY_FAILED
        assert (engine.memory == before).all(), "not a byte reached the engine"
        engine.end(found)
        assert server.metrics()["lmcache_verify_failures_total"] == 1
        server.wait_for_log(" WARNING ")
        (warning,) = (line for line in server.log.read_text().splitlines() if " WARNING " in line)
        assert "damaged" in warning
        assert second[1].hex()[:16] in warning
        # That chunk is forgotten, the one before it and the other prompt are not.
        assert engine.lookup(second).resume_tokens == size
        other = engine.lookup(first)
        engine.load(other, first, elsewhere)
        for index in range(2):
            for position in engine.groups[index].needed_blocks(2 * size):
                right = engine.fill(index, 130, 100 * BLOCKS[position] + index)
                assert (engine.pages(index, elsewhere[index][position]) == right).all()
        assert server.terminate() == 0


def test_the_records_of_a_damaged_page_go_with_it(tmp_path: Path) -> None:
    """A record may have been written while the page changed."""
    tier = f"dir://{tmp_path}/tier?size_gb=1&write=commit"
    with LMCacheServer(l1_size_gb=0.0625, checksums=True, tier=tier) as server:
        engine = RawEngine(server.address, GROUPS, num_blocks=140).start()
        keys, records = store(engine, 0), tmp_path / "tier"
        wait_until(lambda: len(list(records.rglob(f"*{keys[1].hex()}*"))) == 2)
        damage(server, page_of_the_second_chunk(engine))
        found = engine.lookup(keys)
        assert found.resume_tokens == 2 * engine.chunk_size
        with pytest.raises(RefusedError):
            engine.load(found, keys, [list(range(80, 112))] * 2)
        engine.end(found)
        wait_until(lambda: not list(records.rglob(f"*{keys[1].hex()}*")))
        assert list(records.rglob(f"*{keys[0].hex()}*"))
        assert engine.lookup(keys).resume_tokens == engine.chunk_size, "no tier brings it back"
