"""`lmcache verify`: the order of the requests, and the verdict.

vLLM answers each prompt four times. It computes the first two without any cache, under two salts: they differ
by the engine's own noise. The third uses vLLM's own prefix cache: its noise is of another kind, because parts
of the prompt are computed in other shapes. The fourth, after a reset of vLLM's own cache, uses the server's
pages. It must equal one of the others, or be no further from the first than twice the noise. If it equals
none, vLLM's own cache may have ended at another token: then the prompt is cut where the served part ends,
and verified again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmcache_server.commands.verify.compare import MAX_NOISE, distance, is_equal, is_within
from lmcache_server.commands.verify.engine import Answer, Counters, VerifyError, VllmServer, new_salt
from lmcache_server.commands.verify.prompts import ANSWER_TOKENS, Case

HEADER = f"{'prompt':<16}{'tokens':>8}{'served':>8}  {'text':<8}{'logprobs':<21}first token, cold -> served"
COUNT_TIMEOUT_S = 2.0
REST_TOKENS = 8
"""The tokens that a cut prompt leaves to compute: less than any block, so both caches end at its start."""


@dataclass(frozen=True)
class Result:
    """One prompt: computed, computed again, with vLLM's own prefix cache, and served by the server."""

    case: Case
    cold: Answer
    again: Answer
    local: Answer
    served: Answer
    served_tokens: int

    @property
    def noise(self) -> float:
        """How much the engine's own answers differ."""
        return max(distance(self.cold, self.again), distance(self.cold, self.local))

    @property
    def difference(self) -> float:
        return distance(self.cold, self.served)

    @property
    def equals(self) -> str:
        """The name of the engine's own answer that the served one equals to the last bit; empty if none."""
        own = {"equal": self.cold, "as computed again": self.again, "as vLLM's own cache": self.local}
        return next((name for name, answer in own.items() if is_equal(answer, self.served)), "")

    def is_right(self, noise: float) -> bool:
        """Whether vLLM could have given the served answer itself."""
        return bool(self.equals) or is_within(self.cold, self.served, noise)

    def row(self) -> dict[str, Any]:
        """The figures of one prompt; times in seconds, differences in log probability."""
        return {
            "prompt": self.case.name,
            "tokens": len(self.served.prompt_ids),
            "served_tokens": self.served_tokens,
            "text_equal": self.cold.text == self.served.text,
            "logprobs": self.equals or "differ",
            "difference": self.difference,
            "noise": self.noise,
            "first_token_cold_s": round(self.cold.first_token_s, 6),
            "first_token_served_s": round(self.served.first_token_s, 6),
        }

    def line(self) -> str:
        """The same as a line for the terminal, below HEADER."""
        start = f"{self.case.name:<16}{len(self.served.prompt_ids):>8}"
        if not self.served_tokens:
            return f"{start}{'-':>8}  not served"
        logprobs = self.equals or f"differ by {self.difference:.2g}"
        text = "equal" if self.cold.text == self.served.text else "as own" if self.equals else "differs"
        times = f"{1e3 * self.cold.first_token_s:.0f} ms -> {1e3 * self.served.first_token_s:.0f} ms"
        return f"{start}{self.served_tokens:>8}  {text:<8}{logprobs:<21}{times}"


def run(vllm: VllmServer, cases: list[Case], done: Callable[[Result], None]) -> list[Result]:
    """Verify each case, one request at a time; `done` is called with each result. Raises VerifyError."""
    if vllm.counters().running:
        raise VerifyError("vLLM is busy with other requests: run verify while it is idle")
    vllm.reset_prefix_cache()
    results = []
    for case in cases:
        result = _verify(vllm, case)
        results.append(result)
        done(result)
        if result.served_tokens and not result.equals:
            ids = result.cold.prompt_ids
            # Recurrent layers can resume only where the stored prompt left a state.
            stored = ids if case.is_repeat else case.stored
            cut = Case(f"{case.name}, cut", ids[: result.served_tokens + REST_TOKENS], stored)
            results.append(_verify(vllm, cut))
            done(results[-1])
    return results


def _verify(vllm: VllmServer, case: Case) -> Result:
    salts = [new_salt(), new_salt()]
    start = vllm.counters()
    cold, again = (vllm.ask(case.prompt, ANSWER_TOKENS, salt) for salt in salts)
    requests = 4
    if case.is_repeat:
        salts = [salts[0], salts[0]]
    else:
        salts = [new_salt(), new_salt()]
        for salt in salts:
            vllm.ask(case.stored, ANSWER_TOKENS, salt)
            requests += 1
    local = vllm.ask(case.prompt, ANSWER_TOKENS, salts[0])
    vllm.reset_prefix_cache()
    before = vllm.counters()
    served = vllm.ask(case.prompt, ANSWER_TOKENS, salts[1])
    loaded = _loaded(vllm, before)
    if vllm.counters().finished - start.finished > requests:
        raise VerifyError("vLLM served other requests meanwhile: run verify while it is idle")
    return Result(case, cold, again, local, served, loaded)


def _loaded(vllm: VllmServer, before: Counters) -> int:
    """The tokens loaded since `before`. vLLM's metrics lag behind its answers, so this waits for them."""
    end_s = time.monotonic() + COUNT_TIMEOUT_S
    while True:
        now = vllm.counters()
        loaded = now.loaded_tokens - before.loaded_tokens
        if (loaded and now.finished > before.finished) or time.monotonic() > end_s:
            return loaded
        time.sleep(0.05)


def verdict(results: list[Result]) -> tuple[bool, str]:
    """Whether the cache was right, and a sentence about it."""
    noise = max(result.noise for result in results)
    served = [result for result in results if result.served_tokens]
    wrong = [result for result in served if not result.is_right(noise)]
    own = (
        f"the engine's own answers differ by up to {noise:.2g}"
        if noise
        else "the engine repeats itself exactly"
    )
    if not served:
        return False, (
            "nothing was served: is `lmcache server` running (see vLLM's log), and are the prompts longer "
            "than its chunk size (`lmcache status`)?"
        )
    if noise > MAX_NOISE:
        return False, f"cannot tell: without the cache {own}, which is too much to judge by"
    if wrong:
        worst = max(result.difference for result in wrong)
        return False, (
            f"WRONG: {len(wrong)} of {len(served)} served answers differ, by up to {worst:.2g}, from what "
            f"vLLM computes, while {own}; stop using the cache and report this"
        )
    exactly = sum(bool(result.equals) for result in served)
    others = "" if exactly == len(served) else f", {len(served) - exactly} within its noise"
    return True, (
        f"right: {len(served)} of {len(results)} prompts were served, {exactly} equal to the last bit to an "
        f"answer of the engine's own{others}; {own}"
    )
