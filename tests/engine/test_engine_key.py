"""Both sides of the connector over TCP with a shared key, called as vLLM calls them, without an engine."""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.rawclient import RawEngine, group
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S, wait_until
from vllm import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from lmcache_client import channel
from lmcache_client.connector.metadata import LoadJob, StoreJob
from lmcache_client.connector.scheduler import SchedulerSide
from lmcache_client.connector.server_of_rank import places
from lmcache_client.connector.settings import PREFIX, Settings, parse
from lmcache_client.connector.worker import WorkerSide
from lmcache_client.contract.endpoint import EndpointError
from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_client.contract.messages import Store
from lmcache_client.engine import chunk_object, load_message

CHUNK = 16
HOST = "127.0.0.1"


@pytest.fixture
def key(tmp_path: Path) -> str:
    return made(tmp_path / "key")


def made(path: Path) -> str:
    path.touch(0o600)
    path.write_text(os.urandom(32).hex())
    return str(path)


@pytest.fixture
def keyed(start_server: Callable[..., LMCacheServer], key: str) -> LMCacheServer:
    return start_server(l1_size_gb=0.06, chunk_size=CHUNK, host=HOST, key_file=key)


class Sides:
    """An engine with one worker, whose memory is that of a RawEngine."""

    def __init__(self, server: LMCacheServer, key_file: str, stack: ExitStack) -> None:
        extra = {"host": HOST, "port": server.port, "key_file": key_file}
        settings, _ = parse({PREFIX + name: value for name, value in extra.items() if value})
        self.raw = RawEngine(server.address, [group()])
        each = self.raw.model, self.raw.geometry, self.raw.export
        self.worker = WorkerSide(settings, "engine", 0, *each)
        self.scheduler = SchedulerSide(
            settings, "engine", (GroupSpec(FULL, CHUNK, 0, "", ()),), 1, True, True
        )
        self.scheduler.bind(BlockPool(64, enable_caching=False, hash_block_size=CHUNK))
        stack.callback(self.raw.close)
        stack.callback(self.worker.close)
        stack.callback(self.scheduler.channel.close)
        self.worker.start()
        self.scheduler.start()

    @property
    def ready(self) -> bool:
        return self.worker.channel.ready and self.scheduler.channel.ready

    def offered(self, name: str) -> tuple[Request, int]:
        """A request of three chunks and a token, and the tokens that vLLM can load of it."""
        request = Request(name, list(range(3 * CHUNK + 1)), SamplingParams(max_tokens=1), None)
        self.scheduler.new_request(request)
        answers: list[int] = []

        def is_answered() -> bool:
            tokens, _ = self.scheduler.matched_tokens(request, 0)
            answers.extend([] if tokens is None else [tokens])
            return bool(answers)

        wait_until(is_answered, what="the lookup is answered or given up")
        return request, answers[0]

    def run(self, job: LoadJob | StoreJob) -> None:
        """Until the worker reports that the server has done it."""
        self.worker.submit([job])
        wait_until(lambda: self.worker.collect(idle=True).settled[job.job_id], what="the job is settled")


def test_both_sides_store_look_up_and_load_over_tcp(keyed: LMCacheServer, key: str, stack: ExitStack) -> None:
    sides = Sides(keyed, key, stack)
    wait_until(lambda: sides.ready, what="both sides have joined")
    request, tokens = sides.offered("first")
    assert tokens == 0
    keys = tuple(sides.scheduler.lookups.requests["first"].keys)
    assert len(keys) == 3
    pages = [sides.raw.fill(0, block, seed=block) for block in (1, 2, 3)]
    objects = tuple(chunk_object(keys, chunk, 0, (1 + chunk,)) for chunk in range(3))
    sides.run(StoreJob(1, Store(objects)))
    sides.scheduler.finished(request)
    request, tokens = sides.offered("second")
    assert tokens == 3 * CHUNK
    found = sides.scheduler.lookups.requests["second"].state.found
    message = load_message("second", found, keys[-1], 0, sides.raw.groups, [[11, 12, 13]])
    sides.run(LoadJob(2, "second", message))
    assert all((sides.raw.pages(0, 11 + index) == page).all() for index, page in enumerate(pages))
    assert any(page.any() for page in pages)
    sides.scheduler.finished(request)


@pytest.mark.parametrize("has_key", [False, True])
def test_without_the_servers_key_an_engine_computes_and_says_so_once(
    has_key: bool,
    keyed: LMCacheServer,
    tmp_path: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(channel, "RETRY_REFUSED_S", 0.1)
    monkeypatch.setattr("lmcache_client.connector.worker.CONNECT_S", PATIENCE_S)
    monkeypatch.setattr("lmcache_client.connector.scheduler.CONNECT_S", PATIENCE_S)
    monkeypatch.setattr("vllm.logger.logger.propagate", True)
    other = made(tmp_path / "other") if has_key else ""
    sides = Sides(keyed, other, stack)
    assert not sides.ready
    assert sides.offered("request")[1] == 0
    sides.worker.submit([StoreJob(1, Store(()))])
    assert sides.worker.collect(idle=True).settled == {1: 1}
    since_s = sides.worker.channel._retry_s
    wait_until(lambda: sides.worker.channel._retry_s > since_s + 0.5, what="it has tried again several times")
    lines = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert [each.levelname for each in lines] == ["ERROR", "ERROR"], "one for each side"
    for line in lines:
        assert ("has another key, or none" if has_key else "wants a key") in line.getMessage()
        assert "lmcache.mp.key_file" in line.getMessage()


def test_a_key_file_that_cannot_be_used_keeps_the_engine_from_starting(key: str) -> None:
    several = {"0": f"{HOST}:1", "1": f"{HOST}:2"}
    assert [place.address for place in places(Settings(key_file=key, servers=several), 2)] == [
        f"tcp://{HOST}:{port}?key_file={key}" for port in (1, 2)
    ]
    os.chmod(key, 0o644)
    for settings in (Settings(HOST, key_file=key), Settings(key_file=key, servers=several)):
        with pytest.raises(EndpointError, match=f"chmod 600 {key}"):
            places(settings, 2)
