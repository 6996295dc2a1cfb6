"""One engine against a server that is killed at any moment, again and again: no output ever differs."""

import random
import threading
import time

from harness.engine import Engine
from harness.prompts import prompt
from harness.server import LMCacheServer

ROUNDS = 25


def test_kills_at_any_moment_change_no_output_and_leak_no_block(server: LMCacheServer) -> None:
    draw = random.Random(7)
    prompts = [prompt(2000, seed) for seed in range(3)]
    with Engine("gemma3", server=server, block_size=32) as engine:
        expected = [engine.run(each).output for each in prompts]
        served = 0
        for round_number in range(ROUNDS):
            delay_s = draw.random() * 0.4
            killer = threading.Timer(delay_s, server.kill)
            assert engine.reset_prefix_cache()
            killer.start()
            for number in draw.sample(range(3), 3):
                result = engine.run(prompts[number])
                served += result.external_tokens > 0
                assert result.output == expected[number], (
                    f"round {round_number}, killed after {delay_s:.3f} s"
                )
            killer.join()
            server.kill()
            server.start()
            if round_number % 3 == 0:
                # Time enough to register again and to store; otherwise the next kill comes first.
                time.sleep(0.8)
                assert engine.reset_prefix_cache()
                for number in range(3):
                    assert engine.run(prompts[number]).output == expected[number]
        assert served > 0, "some rounds were served before the kill"
        engine.settle()
        info = engine.info()
        assert info["free_blocks"] == info["num_blocks"] - 1
        status = server.status()["l1"]
        assert status["leases"] == status["readers"] == status["reserved_bytes"] == 0
