"""L1's file cut short by somebody while a server uses it: it belongs to the server alone, and this is why."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.exercise import exercise, new_engine
from harness.server import LMCacheServer
from harness.waiting import wait_until

from lmcache_client.channel import ChannelError

TOKENS = 3 * 256


@pytest.fixture
def path() -> Iterator[Path]:
    """In memory: the pages of a file on a disk may stay readable for a while."""
    path = Path(f"/dev/shm/lmcache-test-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("checksums", [False, True])
def test_a_file_cut_short_costs_loads_and_never_gives_wrong_bytes(path: Path, checksums: bool) -> None:
    """The kernel, which copies for the server, refuses what is gone. But if the server read a page itself to
    compare its checksum, the kernel would end it."""
    with LMCacheServer(l1_size_gb=0.05, l1_path=str(path), checksums=checksums) as server:
        server.wait_until_populated()
        engine = new_engine(server.address, "engine")
        try:
            exercise(engine, 1)
            assert exercise(engine, 1) == TOKENS
            os.truncate(path, 4096)
            with pytest.raises(ChannelError, match="was cut short by another program: restart the server"):
                exercise(engine, 1)
            assert server.terminate() == 0
            server.start()
            wait_until(lambda: engine.worker.generation > 1 and engine.scheduler.generation > 1)
            exercise(engine, 1)
            assert exercise(engine, 1) == TOKENS, "it is served by the next server"
        finally:
            engine.close()
