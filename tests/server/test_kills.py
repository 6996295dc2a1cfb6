"""Clients killed in the middle of stores and loads, many times: the server stays whole, bytes stay right."""

import random
import sys
import time

from harness.exercise import exercise, new_engine
from harness.processes import ChildProcess, tail
from harness.server import LMCacheServer

KILLS = 60
PROMPTS = 12

CLIENT = """
import random, sys
sys.path[:0] = sys.argv[3:]
from harness.exercise import exercise, keep_the_server_copying, new_engine
engine = new_engine(sys.argv[1], sys.argv[2])
draw = random.Random(sys.argv[2])
for turn in range(1_000_000):
    keep_the_server_copying(engine, draw.randrange(1 << 30))
    if not turn:
        print("up", flush=True)
    exercise(engine, draw.randrange(12))
"""


def test_clients_killed_in_mid_copy_leave_the_server_whole() -> None:
    draw = random.Random(3)
    # Less room than the prompts and the stores beside them take: eviction goes on all the while.
    with LMCacheServer(l1_size_gb=0.2) as server:
        command = [sys.executable, "-c", CLIENT, server.address]
        for number in range(KILLS // 2):
            pair = [
                ChildProcess("client", [*command, f"{number}-{side}", *sys.path], pipes=True)
                for side in range(2)
            ]
            for client in pair:
                assert client.stdout.readline() == b"up\n"
            time.sleep(draw.random() * draw.choice((0.01, 0.1, 0.3)))
            for client in pair:
                assert client.popen.poll() is None, f"a wrong byte or an error: {tail(client.log)}"
                client.kill()
        server.wait_at_rest()
        engine = new_engine(server.address, "last")
        try:
            for number in range(PROMPTS):
                exercise(engine, number)
                assert exercise(engine, number) == 3 * engine.chunk_size, "it serves as before"
        finally:
            engine.close()
        metrics = server.metrics()
        failures = metrics['lmcache_copy_failures_total{direction="store"}']
        assert failures > 0, "some died in mid-copy"
        assert server.terminate() == 0, "the invariants are checked at the end"
