"""The server killed in mid-store and mid-load, or stopped for a while: clients come back by themselves, what
they get is right, and nothing is kept for those who were there before."""

import functools
import os
import random
import statistics
import threading
import time

import pytest
from harness.clients import go_on, stop
from harness.exercise import exercise, keep_the_server_copying, new_engine
from harness.rawclient import RawEngine, chain
from harness.server import LMCacheServer
from harness.waiting import wait_until

from lmcache_client.channel import ChannelError
from lmcache_client.contract.messages import Ping

KILLS = int(os.environ.get("KILLS", "60"))
PROMPTS = 6


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


def wait_until_back(engines: list[RawEngine], generations: list[tuple[int, int]]) -> float:
    """Seconds until every engine has registered and joined anew."""
    started_s = time.monotonic()
    wait_until(
        lambda: all(
            engine.worker.generation > worker and engine.scheduler.generation > scheduler
            for engine, (worker, scheduler) in zip(engines, generations, strict=True)
        ),
        what="every client has come back",
        interval_s=0.002,
    )
    return time.monotonic() - started_s


def test_hundreds_of_kills_in_mid_copy() -> None:
    draw = random.Random(9)
    with LMCacheServer(l1_size_gb=0.1) as server:
        drivers = [Driver(new_engine(server.address, f"engine {n}"), n) for n in range(2)]
        engines = [driver.engine for driver in drivers]
        starts, returns, in_flight = [], [], 0

        def has_loaded(before: int) -> bool:
            return sum(driver.loaded_tokens for driver in drivers) > before

        try:
            for number in range(KILLS):
                if not number % 10:
                    # However slow the machine is, some kills come after loads.
                    wait_until(functools.partial(has_loaded, sum(d.loaded_tokens for d in drivers)))
                time.sleep(draw.random() * draw.choice((0.01, 0.05, 0.15)))
                generations = [(each.worker.generation, each.scheduler.generation) for each in engines]
                waiting = sum(bool(engine.worker._pending) for engine in engines)
                server.kill()
                started_s = time.monotonic()
                server.start()
                starts.append(time.monotonic() - started_s)
                in_flight += waiting > 0
                returns.append(wait_until_back(engines, generations))
            time.sleep(0.5)
        finally:
            for driver in drivers:
                driver.end()
        loaded = sum(driver.loaded_tokens for driver in drivers)
        print(
            f"{KILLS} kills, {in_flight} of them with a copy asked for; there again after "
            f"{1e3 * statistics.median(starts):.0f} ms (at most {1e3 * max(starts):.0f}); clients back after "
            f"{statistics.median(returns):.2f} s (at most {max(returns):.2f}); {loaded} tokens loaded, right"
        )
        # 20 ms on a quiet machine; beside a full load it takes its turns like everybody.
        assert statistics.median(starts) < 1.0
        assert in_flight > KILLS / 4, "kills in mid-copy"
        assert loaded > KILLS, "what is stored between two kills is loaded"
        server.wait_at_rest()


@pytest.mark.parametrize("stopped_s", [3.0])
def test_a_server_stopped_for_seconds_goes_on_and_leaks_nothing(stopped_s: float) -> None:
    with LMCacheServer(l1_size_gb=0.1) as server:
        engine = new_engine(server.address, "waiting")
        try:
            exercise(engine, 1)
            keys = chain(range(100_000, 100_000 + 3 * engine.chunk_size), engine.chunk_size)
            stop(server.pid)
            started_s = time.monotonic()
            pending = [engine.scheduler.submit(engine.lookup_message(keys), 0.5) for _ in range(20)]
            blocked = engine.worker.submit(Ping(), 0.5)
            for each in (*pending, blocked):
                engine.scheduler.poll(each, 0.1)
            with pytest.raises(ChannelError, match="did not answer in time"):
                engine.scheduler.call(Ping(), 0.5)
            assert time.monotonic() - started_s < 20, "nobody hangs"
            assert all(each.done and not each.settled for each in pending)
            time.sleep(stopped_s)
            go_on(server.pid)

            def all_settled() -> bool:
                engine.scheduler.poll()
                engine.worker.poll()
                return all(each.settled for each in (*pending, blocked))

            wait_until(all_settled, 5.0, "every request is settled")
            assert exercise(engine, 1) == 3 * engine.chunk_size, "the same session goes on"
            # Twenty leases were granted to questions that nobody waits for; they end with the session.
            assert server.status()["l1"]["leases"] == 20
        finally:
            engine.close()
        server.wait_at_rest()
        assert server.terminate() == 0
