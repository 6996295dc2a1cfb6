"""One vLLM engine that measures itself: the child process of `systems.Probe`.

It needs nothing but vLLM, so that it runs in any environment, with any connector. The engine lives in this
process and is stepped by hand, as vLLM's own core steps it; so steps can be counted and the scheduler's
thread watched. Started with a JSON object, it takes a command a line, as JSON, and answers likewise.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SETTLE_TIMEOUT_S = 60.0
SCHEDULER_SIDE = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "get_kv_connector_stats",
    "has_pending_push_work",
    "has_pending_block_frees",
)


class Probe:
    """See the module; each command is a method named `do_…`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.engine = LLM(**arguments).llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector_s = 0.0
        self.scheduled_tokens = 0
        self.number = 0
        self._watch()

    def _watch(self) -> None:
        """Count what is scheduled, and the time that the scheduler's thread spends in the connector."""
        schedule = self.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.scheduled_tokens = output.total_num_scheduled_tokens
            return output

        self.scheduler.schedule = counted
        if self.scheduler.connector is not None:
            for name in SCHEDULER_SIDE:
                if hasattr(self.scheduler.connector, name):
                    setattr(self.scheduler.connector, name, self._timed(name))

    def _timed(self, name: str) -> Callable[..., Any]:
        method, now = getattr(self.scheduler.connector, name), time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return method(*args, **kwargs)
            finally:
                self.connector_s += now() - start

        return timed

    def _add(self, prompts: list[list[int]], max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self.number += 1
            self.engine.add_request(str(self.number), {"prompt_token_ids": prompt}, params.clone())

    def _step(self) -> Any:
        """One step, with the rest that vLLM's core takes after one in which nothing was computed."""
        outputs = self.engine.step()
        if not self.scheduled_tokens and self.scheduler.has_requests():
            time.sleep(0.001)
        return outputs

    def do_first_token(self, prompt: list[int], max_tokens: int = 1) -> dict[str, Any]:
        """Seconds and steps to the first token of one request to an engine that has nothing else to do, and
        all of its tokens."""
        start = time.perf_counter()
        self._add([prompt], max_tokens)
        steps = 1
        while not (outputs := self._step()):
            steps += 1
        seconds = time.perf_counter() - start
        while not outputs or not outputs[0].finished:
            outputs = self._step()
        found = outputs[0].outputs[0].token_ids
        cached = outputs[0].num_cached_tokens or 0
        return {
            "seconds": seconds,
            "steps": steps,
            "cached": cached,
            "token": found[0],
            "tokens": list(found),
        }

    def do_batch(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Work through all prompts; `steps` has, per step, the tokens computed, its seconds, and those of
        the scheduler's thread in the connector."""
        start = time.perf_counter()
        self.connector_s = 0.0
        self._add(prompts, max_tokens)
        steps = []
        before_s = 0.0
        while self.engine.has_unfinished_requests():
            begun = time.perf_counter()
            self._step()
            steps.append((self.scheduled_tokens, time.perf_counter() - begun, self.connector_s - before_s))
            before_s = self.connector_s
        return {"seconds": time.perf_counter() - start, "steps": steps}

    def do_settle(self) -> float:
        """Step as an idle engine does until its connector has nothing to do; returns the seconds."""
        start = time.perf_counter()
        while self.scheduler.has_requests():
            self._step()
            if time.perf_counter() - start > SETTLE_TIMEOUT_S:
                raise TimeoutError("the connector does not come to rest")
        return time.perf_counter() - start

    def do_forget(self) -> None:
        """Reset the engine's own prefix cache."""
        start = time.perf_counter()
        while not self.engine.reset_prefix_cache():
            self.engine.step()
            if time.perf_counter() - start > SETTLE_TIMEOUT_S:
                raise TimeoutError("the engine does not reset its prefix cache")
            time.sleep(0.01)

    def do_close(self) -> None:
        self.engine.engine_core.shutdown()


def _make_numba_bearable() -> None:
    """LMCache imports numba, which vLLM's CPU worker stumbles over: it asks every object of every module for
    `__dict__`, and llvmlite's library object takes that for a function of LLVM."""
    try:
        from llvmlite.binding import ffi
    except ImportError:
        return
    find = ffi._lib_wrapper.__getattr__

    def find_function(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    ffi._lib_wrapper.__getattr__ = find_function


def main() -> None:
    commands = os.fdopen(os.dup(0), "r")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _make_numba_bearable()
    probe = Probe(json.loads(sys.argv[1]))
    print(json.dumps({}), file=answers, flush=True)
    for line in commands:
        command = json.loads(line)
        name = command.pop("command")
        print(json.dumps(getattr(probe, f"do_{name}")(**command)), file=answers, flush=True)
        if name == "close":
            return


if __name__ == "__main__":
    main()
