"""`--checksums`: a page that was damaged in L1 is never loaded, is forgotten, counted and logged."""

from pathlib import Path

import numpy as np
import pytest
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import wait_until

from lmcache_client.channel import RefusedError
from lmcache_client.contract import messages

GROUPS = [group(layers=3, page_bytes=6000), group("sliding_window", window=40, layers=2, page_bytes=70_000)]


def damage(server: LMCacheServer, page: bytes) -> None:
    """Flip a bit in the middle of the one copy of `page` in the server's memory."""
    pid = server.pid
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            extent, access = line.split()[:2]
            start, end = (int(each, 16) for each in extent.split("-"))
            # L1 is the one mapping of its size.
            if (
                end - start != int(server.flags["l1_size_gb"] * (1 << 30)) // 65536 * 65536
                or "w" not in access
            ):
                continue
            memory.seek(start)
            at = memory.read(end - start).find(page)
            assert at >= 0, "the page is in L1"
            middle = start + at + len(page) // 2
            memory.seek(middle)
            byte = memory.read(1)[0]
            memory.seek(middle)
            memory.write(bytes([byte ^ 16]))
            return
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("checksums", [True, False])
def test_a_damaged_page_is_a_miss(checksums: bool) -> None:
    with LMCacheServer(l1_size_gb=0.0625, checksums=checksums) as server:
        engine = RawEngine(f"ipc://{server.runtime_dir}/{server.port}.sock", GROUPS, num_blocks=140).start()
        try:
            size = engine.chunk_size
            prompts = [chain(range(start, start + 2 * size), size) for start in (0, 5000)]
            tables = [list(range(1, 1 + 2 * size // 16))] * 2
            for seed, keys in enumerate(prompts):
                for block in tables[0]:
                    for index in range(2):
                        engine.fill(index, block, 10_000 * seed + 100 * block + index)
                engine.store_prompt(keys, tables)
            # The middle of a page of the second chunk of the last prompt that was stored.
            damaged_block = tables[0][-3]
            page = engine.pages(0, damaged_block)[6000:12000].tobytes()
            damage(server, page)
            elsewhere = [list(range(80, 80 + 2 * size // 16))] * 2
            before = engine.memory.copy()
            found = engine.lookup(prompts[1])
            assert found.resume_tokens == 2 * size
            if not checksums:
                engine.load(found, prompts[1], elsewhere)
                wrong = engine.pages(0, elsewhere[0][-3]) != engine.pages(0, damaged_block)
                assert int(np.count_nonzero(wrong)) == 1, "the test does damage what would be loaded"
                return
            with pytest.raises(RefusedError) as refusal:
                engine.load(found, prompts[1], elsewhere)
            assert refusal.value.code == messages.COPY_FAILED
            assert (engine.memory == before).all(), "not a byte reached the engine"
            engine.end(found)
            assert server.metrics()["lmcache_verify_failures_total"] == 1
            lines = [line for line in server.log.read_text().splitlines() if "damaged" in line]
            assert len([line for line in lines if "WARNING" in line]) == 1
            assert prompts[1][1].hex()[:16] in lines[0] or prompts[1][1].hex()[:16] in lines[-1]
            # That chunk is forgotten, the one before it and the other prompt are not.
            assert engine.lookup(prompts[1]).resume_tokens == size
            other = engine.lookup(prompts[0])
            engine.load(other, prompts[0], elsewhere)
            for position in range(2 * size // 16):
                for index in range(2):
                    if position in engine.groups[index].needed_blocks(2 * size):
                        right = engine.fill(index, 130, 100 * tables[index][position] + index)
                        assert (engine.pages(index, elsewhere[index][position]) == right).all()
            assert server.terminate() == 0
        finally:
            engine.close()


def test_the_records_of_a_damaged_page_go_with_it(tmp_path: Path) -> None:
    """They may have been written from it. Then they would bring it back with a new checksum."""
    tier = f"dir://{tmp_path}/tier?size_gb=1&write=commit"
    with LMCacheServer(l1_size_gb=0.0625, checksums=True, tier=tier) as server:
        engine = RawEngine(f"ipc://{server.runtime_dir}/{server.port}.sock", GROUPS, num_blocks=140).start()
        try:
            size = engine.chunk_size
            keys, table = chain(range(2 * size), size), list(range(1, 1 + 2 * size // 16))
            for block in table:
                for index in range(2):
                    engine.fill(index, block, 100 * block + index)
            engine.store_prompt(keys, [table] * 2)
            records = tmp_path / "tier"
            wait_until(lambda: len(list(records.rglob(f"*{keys[1].hex()}*"))) == 2)
            damage(server, engine.pages(0, table[-3])[6000:12000].tobytes())
            found = engine.lookup(keys)
            assert found.resume_tokens == 2 * size
            with pytest.raises(RefusedError):
                engine.load(found, keys, [list(range(80, 80 + len(table)))] * 2)
            engine.end(found)
            wait_until(lambda: not list(records.rglob(f"*{keys[1].hex()}*")))
            assert list(records.rglob(f"*{keys[0].hex()}*"))
            assert engine.lookup(keys).resume_tokens == size, "no tier brings it back"
        finally:
            engine.close()
