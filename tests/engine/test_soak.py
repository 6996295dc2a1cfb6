"""One engine against a server that is killed at any moment, again and again: no output is ever wrong."""

import random
import threading
import time

import pytest
from harness.engine import Engine, Result
from harness.prompts import prompt
from harness.server import LMCacheServer

LENGTH = 2000
PROMPTS = [prompt(LENGTH, seed) for seed in range(3)]


@pytest.mark.parametrize("rounds", [8, pytest.param(25, marks=pytest.mark.long)])
def test_kills_at_any_moment_change_no_output_and_leak_no_block(server: LMCacheServer, rounds: int) -> None:
    draw = random.Random(7)
    answers: list[tuple[int, str, Result]] = []
    with Engine("gemma3", server=server, block_size=32) as engine:
        for round_number in range(rounds):
            delay_s = draw.random() * 0.4
            killer = threading.Timer(delay_s, server.kill)
            assert engine.reset_prefix_cache()
            killer.start()
            said = f"round {round_number}, killed after {delay_s:.3f} s"
            answers += [(number, said, engine.run(PROMPTS[number])) for number in draw.sample(range(3), 3)]
            killer.join()
            server.kill()
            server.start()
            if round_number % 3 == 0:
                # Time enough to register again and to store; otherwise the next kill comes first.
                time.sleep(0.8)
                assert engine.reset_prefix_cache()
                answers += [
                    (number, f"{said}, started again", engine.run(PROMPTS[number])) for number in range(3)
                ]
        engine.settle()
        info = engine.info()
        assert info["free_blocks"] == info["num_blocks"] - 1
        status = server.status()["l1"]
        assert status["leases"] == status["readers"] == status["reserved_bytes"] == 0
    assert any(answer.external_tokens for _, _, answer in answers), "some were served before the kill"
    # With a snapshot at every boundary, so that it can resume by itself wherever the server let it resume.
    with Engine("gemma3", block_size=32, prefix_cache_retention_interval=None) as alone:
        right = {number: {0: cold(alone, number)} for number in range(3)}
        for number, said, answer in answers:
            resumed = answer.external_tokens
            if resumed not in right[number]:
                right[number][resumed] = resumed_at(alone, number, resumed)
            # A load that failed was computed from the beginning.
            assert answer.output in (right[number][0], right[number][resumed]), said


def cold(alone: Engine, number: int) -> object:
    assert alone.reset_prefix_cache()
    result = alone.run(PROMPTS[number])
    assert result.cached_tokens == 0
    return result.output


def resumed_at(alone: Engine, number: int, tokens: int) -> object:
    """What vLLM answers by itself if it resumes there. It need not equal the cold answer to the last bit: a
    prompt that is computed in two parts is rounded in other places."""
    assert alone.reset_prefix_cache()
    shared = PROMPTS[number][:tokens]
    alone.run([*shared, *prompt(LENGTH - tokens, 100 + number)])
    result = alone.run(PROMPTS[number])
    assert result.local_tokens == tokens
    return result.output
