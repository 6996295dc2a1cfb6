"""A real engine while the disk behind a tier's directory is full, read-only, or fails (EIO)."""

from collections.abc import Iterator

import pytest
from harness.disks import Disk, disk
from harness.engine import Engine, Result
from harness.prompts import prompt
from harness.server import LMCacheServer
from harness.waiting import wait_until

CHUNKS = 2


class Setting:
    def __init__(self, disk: Disk, server: LMCacheServer, engine: Engine) -> None:
        self.disk, self.server, self.engine = disk, server, engine
        self.served = CHUNKS * server.wait_for_engine()
        engine.call("seem_slow")
        self.prompts = [prompt(self.served + 10, seed) for seed in range(4)]
        self.cold = engine.run(self.prompts[0])
        server.wait_until_written()

    def ask_again(self) -> Result:
        """The engine and L1 have lost the prompt. The answer is right, and nothing is left behind."""
        assert self.server.cli("clear").returncode == 0
        assert self.engine.reset_prefix_cache()
        found = self.engine.run(self.prompts[0])
        assert found.output == self.cold.output
        self.server.wait_at_rest(sessions=2)
        return found

    def is_served(self) -> bool:
        return self.ask_again().external_tokens == self.served

    def count(self, what: str, outcome: str) -> int:
        return int(self.server.status()["tiers"][0][what][outcome])

    def is_not_written(self, seed: int, outcome: str) -> None:
        """A new prompt is answered, but not written."""
        written, refused = (self.count("written_objects", each) for each in ("written", outcome))
        self.engine.run(self.prompts[seed])
        wait_until(lambda: self.count("written_objects", outcome) > refused)
        assert self.count("written_objects", "written") == written


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    with (
        disk(tmp_path_factory.mktemp("disk")) as made,
        LMCacheServer(tier=f"dir://{made.place}/records?size_gb=0.05", l1_size_gb=0.1) as server,
        Engine("qwen3next", server=server, block_size=32) as engine,
    ):
        yield Setting(made, server, engine)


def test_a_disk_that_becomes_full_then_read_only_then_unreadable(setting: Setting) -> None:
    wait_until(setting.is_served, what="as long as the disk is well, it serves")
    with setting.disk.full():
        setting.is_not_written(1, "full")
        wait_until(setting.is_served, what="what was written before is served")
    setting.disk.become_read_only()
    setting.is_not_written(2, "failed")
    setting.server.wait_for_log("its file system is read-only: name another one, remount it or")
    wait_until(setting.is_served)
    setting.disk.fail()
    assert setting.ask_again().external_tokens == 0
    setting.server.wait_for_log("the disk fails: see the kernel's log")
    for _ in range(3):
        assert setting.ask_again().external_tokens == 0
    setting.engine.run(setting.prompts[3])
    assert setting.server.get("/readyz") == "ok\n"
