"""One engine against a server that is killed at any moment, again and again: no output is ever wrong."""

import random
import threading

import pytest
from harness.engine import Engine, Result
from harness.prompts import prompt
from harness.served import held_blocks
from harness.server import LMCacheServer

LENGTH = 1000
PROMPTS = [prompt(LENGTH, seed) for seed in range(3)]


@pytest.mark.parametrize("rounds", [6, pytest.param(25, marks=pytest.mark.long)])
def test_kills_at_any_moment_change_no_output_and_leak_no_block(server: LMCacheServer, rounds: int) -> None:
    draw = random.Random(7)
    answers: list[tuple[int, str, Result]] = []
    with Engine("gemma3", server=server, block_size=32) as engine:

        def ask(said: str) -> None:
            assert engine.reset_prefix_cache()
            answers.extend((number, said, engine.run(PROMPTS[number])) for number in draw.sample(range(3), 3))

        for round_number in range(rounds):
            if round_number % 4 == 0:
                # It registers again and stores; otherwise the next kill comes first.
                server.wait_for_engine()
                for _ in range(2):
                    ask(f"round {round_number}, before the kill")
            delay_s = draw.random() * 0.4
            killer = threading.Timer(delay_s, server.kill)
            killer.start()
            ask(f"round {round_number}, killed after {delay_s:.3f} s")
            killer.join()
            server.kill()
            server.start()
        engine.settle()
        assert held_blocks(engine) == 0
        status = server.status()["l1"]
        assert status["leases"] == status["readers"] == status["reserved_bytes"] == 0
    assert any(answer.external_tokens for _, _, answer in answers), "some were served before the kill"
    # With a snapshot at every boundary, so that it can resume by itself wherever the server let it resume.
    with Engine("gemma3", block_size=32, prefix_cache_retention_interval=None) as alone:
        right: dict[tuple[int, int], object] = {}
        for number, said, answer in answers:
            # A load that failed was computed from the beginning.
            either = [(number, tokens) for tokens in (0, answer.external_tokens)]
            for each in either:
                right[each] = right.get(each) or resumed_at(alone, *each)
            assert answer.output in [right[each] for each in either], said


def resumed_at(alone: Engine, number: int, tokens: int) -> object:
    """What vLLM answers by itself if it resumes there. It need not equal the cold answer to the last bit: a
    prompt that is computed in two parts is rounded in other places."""
    assert alone.reset_prefix_cache()
    alone.run([*PROMPTS[number][:tokens], *prompt(LENGTH - tokens, 100 + number)])
    result = alone.run(PROMPTS[number])
    assert result.local_tokens == tokens
    return result.output
