"""How fast the engine says that it computes prompts, from when its steps begin and end."""

from lmcache_client.connector.request import MAX_STEPS, MIN_PREFILL_TOKENS, PrefillSpeed


def step(speed: PrefillSpeed, tokens: int, began_s: float, ended_s: float) -> None:
    speed.began(tokens, began_s)
    speed.ended(ended_s)


def test_the_first_step_counts_whole_later_ones_half_and_some_tell_nothing() -> None:
    speed = PrefillSpeed()
    speed.ended(1.0)
    speed.began(1000, 2.0)
    assert speed.tokens_per_s == 0, "no step has ended"
    speed = PrefillSpeed()
    step(speed, MIN_PREFILL_TOKENS - 1, 10.0, 11.0)
    step(speed, 1000, 12.0, 12.0)
    assert speed.tokens_per_s == 0, "few tokens, or no time"
    step(speed, MIN_PREFILL_TOKENS, 20.0, 21.0)
    assert speed.tokens_per_s == MIN_PREFILL_TOKENS
    speed = PrefillSpeed()
    step(speed, 1000, 10.0, 11.0)
    assert speed.tokens_per_s == 1000
    step(speed, 1000, 20.0, 20.5)
    assert speed.tokens_per_s == 1500


def test_a_step_that_began_before_another_ended_took_only_the_time_since() -> None:
    speed = PrefillSpeed()
    speed.began(1000, 10.0)
    speed.began(1000, 10.0)
    speed.ended(11.0)
    speed.ended(12.0)
    assert speed.tokens_per_s == 1000


def test_steps_whose_ends_nobody_tells_are_forgotten() -> None:
    speed = PrefillSpeed()
    for _ in range(MAX_STEPS):
        speed.began(1000, 10.0)
    step(speed, 1000, 100.0, 101.0)
    assert speed.tokens_per_s == 1000


def test_steps_without_tokens_do_not_shift_the_ends_of_others() -> None:
    """vLLM tells of their ends only if a copy has ended as well. Then a prefill seemed to take as long as the
    decoding step after it."""
    speed = PrefillSpeed()
    speed.began(0, 1.0)
    speed.began(1000, 10.0)
    speed.ended(11.0)
    speed.began(1, 11.0)
    speed.ended(11.1)
    assert speed.tokens_per_s == 1000
    speed.began(0, 12.0)
    speed.ended(12.1)
    step(speed, 1000, 20.0, 21.0)
    assert speed.tokens_per_s == 1000
