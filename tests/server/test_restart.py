"""The server killed in mid-store and mid-load, or stopped for a while: clients come back by themselves, what
they get is right, and nothing is kept for those who were there before."""

import os
import random
import threading
import time
from functools import partial

import pytest
from harness.clients import go_on, stop
from harness.exercise import exercise, keep_the_server_copying, keys_of, new_engine
from harness.rawclient import RawEngine
from harness.server import LMCacheServer
from harness.waiting import wait_until

from lmcache_client.contract.messages import Ping
from lmcache_client.server_channel import ChannelError

KILLS = int(os.environ.get("KILLS", "20"))
PROMPTS = 3


class Driver(threading.Thread):
    """Stores, loads and compares until it is told to end, whatever becomes of the server."""

    def __init__(self, engine: RawEngine, seed: int) -> None:
        super().__init__(daemon=True)
        self.engine = engine
        self.loaded_tokens = 0
        self.fault: BaseException | None = None
        self._draw = random.Random(seed)
        self._ending = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            while not self._ending.is_set():
                self._turn()
        except BaseException as fault:  # SystemExit: a wrong byte
            self.fault = fault

    def _turn(self) -> None:
        keep_the_server_copying(self.engine, self._draw.randrange(1 << 30), stores=2)
        try:
            self.loaded_tokens += exercise(self.engine, self._draw.randrange(PROMPTS))
        except ChannelError:
            time.sleep(0.002)

    def end(self) -> None:
        self._ending.set()
        self.join(30)
        self.engine.close()
        if self.fault is not None:
            raise AssertionError(f"{self.engine.engine_id}: {self.fault!r}")


def are_back(engines: list[RawEngine], generations: list[tuple[int, int]]) -> bool:
    return all(
        engine.worker.generation > worker and engine.scheduler.generation > scheduler
        for engine, (worker, scheduler) in zip(engines, generations, strict=True)
    )


def test_hundreds_of_kills_in_mid_copy() -> None:
    draw = random.Random(9)
    with LMCacheServer(l1_size_gb=0.1) as server:
        drivers = [Driver(new_engine(server.address, f"engine {n}"), n) for n in range(2)]
        engines = [driver.engine for driver in drivers]
        in_flight = 0

        def loaded() -> int:
            return sum(driver.loaded_tokens for driver in drivers)

        try:
            for number in range(KILLS):
                if not number % 5:
                    # However slow the machine is, some kills come after loads.
                    before = loaded()
                    wait_until(lambda before=before: loaded() > before)  # type: ignore[misc]
                time.sleep(draw.random() * draw.choice((0.01, 0.05, 0.15)))
                generations = [(each.worker.generation, each.scheduler.generation) for each in engines]
                in_flight += any(engine.worker._pending for engine in engines)
                server.restart()
                wait_until(partial(are_back, engines, generations), what="every client has come back")
        finally:
            for driver in drivers:
                driver.end()
        print(f"{KILLS} kills, {in_flight} of them with a copy asked for; {loaded()} tokens loaded, right")
        assert in_flight > KILLS / 4, "kills in mid-copy"
        server.wait_at_rest()


def test_a_server_stopped_for_seconds_goes_on_and_leaks_nothing() -> None:
    with LMCacheServer(l1_size_gb=0.1) as server:
        engine = new_engine(server.address, "waiting")
        exercise(engine, 1)
        message = engine.lookup_message(keys_of(engine, 1))
        stop(server.pid)
        pending = [engine.scheduler.submit(message, 0.5) for _ in range(20)]
        blocked = engine.worker.submit(Ping(), 0.5)
        for each in (*pending, blocked):
            engine.scheduler.poll(each, 0.1)
        with pytest.raises(ChannelError, match="did not answer in time"):
            engine.scheduler.call(Ping(), 0.5)
        wait_until(lambda: all(each.done for each in pending), what="nobody hangs")
        time.sleep(1.0)  # the server says nothing for longer than requests and greetings wait
        assert not any(each.settled for each in pending)
        go_on(server.pid)

        def all_settled() -> bool:
            engine.scheduler.poll()
            engine.worker.poll()
            return all(each.settled for each in (*pending, blocked))

        wait_until(all_settled, what="every request is settled")
        assert exercise(engine, 1) == 3 * engine.chunk_size, "the same session goes on"
        # Twenty leases were granted to questions that nobody waits for; they end with the session.
        assert server.status()["l1"]["leases"] == 20
        engine.close()
        server.wait_at_rest()
        assert server.terminate() == 0
