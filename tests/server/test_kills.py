"""Clients killed in the middle of stores and loads, many times: the server stays whole, bytes stay right."""

import random
import subprocess
import sys
import time

from harness.exercise import exercise, new_engine
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
        address = server.address
        for number in range(KILLS // 2):
            pair = [
                subprocess.Popen(
                    [sys.executable, "-c", CLIENT, address, f"{number}-{side}", *sys.path],
                    stdout=subprocess.PIPE,
                )
                for side in range(2)
            ]
            for client in pair:
                assert client.stdout is not None
                assert client.stdout.readline() == b"up\n"
            time.sleep(draw.random() * draw.choice((0.01, 0.1, 0.3)))
            for client in pair:
                assert client.poll() is None, "a client saw a wrong byte or an error"
                client.kill()
            for client in pair:
                client.wait()
                assert client.stdout is not None
                client.stdout.close()
        server.wait_at_rest(timeout_s=5)
        engine = new_engine(address, "last")
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
