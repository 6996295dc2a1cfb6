"""`lmcache verify`: the order of the requests, and the verdict.

vLLM answers each prompt four times. It computes the first two without any cache, under two salts: they differ
by the engine's own noise. The third uses vLLM's own prefix cache: its noise is of another kind, because parts
of the prompt are computed in other shapes. The fourth, after a reset of vLLM's own cache, uses the server's
pages. It must equal one of the others, or be no further from the first than twice the noise. If it equals
none, vLLM's own cache may have ended at another token: then the prompt is cut soon after the served part, so
that both end at the same token, and verified again. With drafters that look ahead (EAGLE, MTP), vLLM's own
cache ends a block earlier, so the prompt that is cut keeps a block more.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcache_server.commands.verify import engine
from lmcache_server.commands.verify.engine import Answer, VllmServer, new_salt
from lmcache_server.commands.verify.prompts import ANSWER_TOKENS, Case
from lmcache_server.errors import CommandError

HEADER = f"{'prompt':<16}{'tokens':>8}{'served':>8}  {'text':<8}{'logprobs':<21}first token, cold -> served"
COUNT_TIMEOUT_S = 2.0
FACTOR = 2.0
"""A served answer may differ by this factor times the engine's own noise."""
MAX_NOISE = 0.5
"""An engine whose answers differ by more than this, in log probability, cannot be judged."""
DRAFTED = ("computed", "from vLLM's own cache", "served")
MAX_CUTS = 2
"""The first cut can show that vLLM's own cache ends earlier than the server's; the second allows for it."""
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
    own_tokens: int = 0
    """What the third answer took from vLLM's own prefix cache."""
    drafts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """How many drafts were accepted, and made, when the prompt was computed, resumed and served."""

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
        served = (self.served.tokens, self.served.tops)
        return next((name for name, answer in own.items() if (answer.tokens, answer.tops) == served), "")

    def is_right(self, noise: float) -> bool:
        """Whether vLLM could have given the served answer itself."""
        return bool(self.equals) or 0.0 < self.difference <= FACTOR * noise

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
            "drafts_accepted": {name: list(counts) for name, counts in self.drafts.items() if counts[1]},
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


def distance(a: Answer, b: Answer) -> float:
    """The largest difference of a log probability. Counts the positions up to the first one where the tokens
    differ; after it, the answers continue different texts."""
    largest = 0.0
    for token_a, token_b, top_a, top_b in zip(a.tokens, b.tokens, a.tops, b.tops, strict=False):
        largest = max(largest, _apart(top_a, top_b), _apart(top_b, top_a))
        if token_a != token_b:
            break
    return largest


def _apart(top: dict[str, float], other: dict[str, float]) -> float:
    # A token missing among the other's likeliest tokens is at most as likely as the last of those.
    last = min(other.values(), default=0.0)
    apart = (abs(own - other[name]) if name in other else max(0.0, own - last) for name, own in top.items())
    return max(apart, default=0.0)


def run(vllm: VllmServer, cases: list[Case], done: Callable[[Result], None]) -> list[Result]:
    """Verify each case, one request at a time; `done` is called with each result. Raises CommandError."""
    if vllm.counters()[engine.RUNNING]:
        raise CommandError("vLLM is busy with other requests: run verify while it is idle")
    vllm.reset_prefix_cache()
    results = []
    for case in cases:
        result = _verify(vllm, case)
        results.append(result)
        done(result)
        ids = result.cold.prompt_ids
        for _ in range(MAX_CUTS):
            end = result.served_tokens + REST_TOKENS
            early = result.served_tokens - result.own_tokens if result.own_tokens else 0
            if early > 0 and not 0 < vllm.max_tokens < end + early + ANSWER_TOKENS:
                end += early
            if result.equals or not result.served_tokens or end == len(result.cold.prompt_ids):
                break
            longer = (ids + ids)[: max(len(ids), end)]
            # Recurrent layers can resume only where the stored prompt left a state.
            stored = longer if case.is_repeat else case.stored
            result = _verify(vllm, Case(f"{case.name}, cut", longer[:end], stored))
            results.append(result)
            done(result)
    return results


def _verify(vllm: VllmServer, case: Case) -> Result:
    salts = [new_salt(), new_salt()]
    start = vllm.counters()
    cold, counts = _asked(vllm, case, salts[0])
    again, _ = _asked(vllm, case, salts[1])
    stored = [] if case.is_repeat else [new_salt(), new_salt()]
    for salt in stored:
        vllm.ask(case.stored, ANSWER_TOKENS, salt)
    salts = stored or [salts[0], salts[0]]
    local, own = _asked(vllm, case, salts[0], load=False)
    vllm.reset_prefix_cache()
    served, loaded = _asked(vllm, case, salts[1], is_served=True)
    if (vllm.counters() - start)[engine.FINISHED] > 4 + len(stored):
        raise CommandError("vLLM served other requests meanwhile: run verify while it is idle")
    named = zip(DRAFTED, (counts, own, loaded), strict=True)
    drafts = {name: (each[engine.ACCEPTED], each[engine.DRAFTS]) for name, each in named}
    tokens = loaded[engine.LOADED_TOKENS], own[engine.OWN_TOKENS]
    return Result(case, cold, again, local, served, *tokens, drafts)


def _asked(
    vllm: VllmServer, case: Case, salt: str, load: bool = True, is_served: bool = False
) -> tuple[Answer, Counter[str]]:
    """The answer, and what vLLM counted for it. vLLM's metrics lag behind its answers, so this waits for
    them; if the answer `is_served`, also for the tokens that were loaded."""
    before = vllm.counters()
    answer = vllm.ask(case.prompt, ANSWER_TOKENS, salt, load=load)
    end_s = time.monotonic() + COUNT_TIMEOUT_S
    while True:
        counts = vllm.counters() - before
        is_counted = counts[engine.FINISHED] and (counts[engine.LOADED_TOKENS] or not is_served)
        if is_counted or time.monotonic() > end_s:
            return answer, counts
        time.sleep(0.02)


def verdict(results: list[Result]) -> tuple[bool, str]:
    """Whether the cache was right, and a sentence about it."""
    noise = max(result.noise for result in results)
    served = [result for result in results if result.served_tokens]
    wrong = [result for result in served if not result.is_right(noise)]
    differ = f"the engine's own answers differ by up to {noise:.2g}"
    own = differ if noise else "the engine repeats itself exactly"
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
        f"answer of the engine's own{others}; {own}{_acceptance(served)}"
    )


def _acceptance(results: list[Result]) -> str:
    """How often the drafts of a drafter were right; empty without one."""
    shares = []
    for name in DRAFTED:
        accepted, made = (sum(each.drafts.get(name, (0, 0))[i] for each in results) for i in range(2))
        shares += [f"{100 * accepted / made:.0f} % {name}"] if made else []
    return f"; drafts accepted: {', '.join(shares)}" if shares else ""
