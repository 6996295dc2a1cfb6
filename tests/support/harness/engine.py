"""A real vLLM engine in a child process, driven from a test."""

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.device import ON_GPU, engine_defaults
from harness.forks import OF_ONE
from harness.models import NEEDS_TORCHVISION, model_path
from harness.paths import CACHE, STUBS, SUFFIX
from harness.processes import ChildProcess, environment, group_members, new_log, tail
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S, wait_until

START_TIMEOUT_S = 500.0
COMMAND_TIMEOUT_S = 540.0
"""Less than a test may take. On a busy machine, an engine is twenty times slower."""
CLOSE_TIMEOUT_S = PATIENCE_S
MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    # Some processors multiply matrices of bfloat16 ten times as slowly as those of float32. What is not about
    # a kind of model needs no bfloat16; test_models.py has it for all.
    "llama": {"dtype": "float32"},
    # The lengths of its steps change how a prompt is rounded. With steps of one chunk, a prompt that resumes
    # at a chunk goes on with the steps of one that does not, and their answers are equal to the last bit.
    "gemma3": {"max_num_batched_tokens": 256, "dtype": "float32"},
    "gptoss": {"max_num_batched_tokens": 256},
    # The CPU kernel of Mamba-2 cannot prefill more than one block in a step. With states of float32, a block
    # has 256 tokens.
    "falconh1": {"max_num_batched_tokens": 256, "mamba_ssm_cache_dtype": "float32"},
    "nemotronh": {"max_num_batched_tokens": 256},
    "granite4": {"max_num_batched_tokens": 256, "mamba_ssm_cache_dtype": "float32"},
    "zamba2": {"max_num_batched_tokens": 128},
    # Here, too, such a block has 256 tokens, and a step as many.
    "qwen3next": {"max_num_batched_tokens": 256, "mamba_ssm_cache_dtype": "float32"},
    "qwen35": {"max_num_batched_tokens": 256},
    # A short convolution rounds by the length of a step: with steps of one block, all are of the same length.
    "lfm2": {"max_num_batched_tokens": 128},
    "lfm2moe": {"max_num_batched_tokens": 128},
    # vLLM 0.32 caches no prefix of a model without attention unless it is told to.
    "mamba2": {
        "block_size": 128,
        "max_num_batched_tokens": 128,
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align",
    },
    # The MLA kernel of processors with AMX takes multiples of 32.
    "dsv2": {"block_size": 32},
}

Prompt = Sequence[int]


class EngineError(AssertionError):
    """The engine failed, refused to start, or did not answer in time; the message ends with its log."""


@dataclass(frozen=True)
class Result:
    """One finished request. Logprobs are exact: per position, (token, float in hex), ordered by token."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, str], ...], ...]
    prompt_tokens: int
    cached_tokens: int
    local_tokens: int
    external_tokens: int
    finish_reason: str | None
    transfer: dict[str, Any] | None
    """The kv_transfer_params that vLLM's connector answered with."""

    @property
    def output(self) -> tuple[object, ...]:
        """What must be equal, bit for bit, however the KV cache was come by."""
        return (self.tokens, self.logprobs)


def differ_by(one: Result, other: Result, length: int | None = None) -> float:
    """How far the logprobs of two answers are apart, in their first `length` tokens or in all that both have.

    Prompts that are computed at once are rounded otherwise than alone; by how much depends on the processor.
    Where two tokens were nearly as likely, the answers may go on differently. What comes behind is not
    compared."""
    apart = 0.0
    said = zip(one.tokens[:length], other.tokens, one.logprobs, other.logprobs, strict=False)
    for token, other_token, *probs in said:
        left, right = ({token: float.fromhex(value) for token, value in each} for each in probs)
        apart = max([apart, *(abs(left[each] - right[each]) for each in left.keys() & right.keys())])
        if token != other_token:
            return max(apart, left[token] - left.get(other_token, -math.inf))
    return apart


def _result(fields: dict[str, Any]) -> Result:
    logprobs = tuple(tuple((token, value) for token, value in each) for each in fields.pop("logprobs"))
    return Result(tokens=tuple(fields.pop("tokens")), logprobs=logprobs, **fields)


class Engine:
    """`vllm.LLM` of a tiny model (or of a model directory) in a process of its own. A context manager.

    With `server`, LMCacheMPConnector is configured to use it. With `other_servers`, the configuration in
    `extra_config` names more; it must have joined them all. `extra_config` adds to or replaces
    kv_connector_extra_config and `connector` other fields of kv_transfer_config. `scratch` are kinds of
    scratch_layers.py; `second_runner` gives vLLM its second model runner; the weights in the directory
    `replaced` change as soon as they are loaded; `changed` is a change to vLLM, of changed_vllm.py. Further
    keyword arguments go to `vllm.LLM`; None leaves vLLM's default.

    Unless `joins` is False, it waits until the engine has joined a server that runs, or is refused, because
    what is computed before is not stored. It is forked from a process that has imported vLLM already. `cold`
    says whether it is started afresh instead; by default one is that has further variables in `env`.
    """

    def __init__(
        self,
        model: str,
        *,
        server: LMCacheServer | None = None,
        other_servers: Sequence[LMCacheServer] = (),
        extra_config: Mapping[str, Any] | None = None,
        connector: Mapping[str, Any] | None = None,
        kv_role: str = "kv_both",
        multiprocessing: bool = False,
        env: Mapping[str, str | None] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        cold: bool | None = None,
        joins: bool = True,
        **llm: Any,
    ) -> None:
        self.model = model
        self.log = new_log(f"engine-{Path(model).name}")
        self.startup_s = 0.0
        self._server = server
        self._other_servers = other_servers
        self._start_timeout_s = start_timeout_s
        self._multiprocessing = multiprocessing
        self._joins = joins
        self._process: ChildProcess | None = None
        self._unread = b""
        self._arguments: dict[str, Any] = {
            "model": model if os.path.isabs(model) else str(model_path(model)),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
            "seed": 0,
            "disable_log_stats": False,
            **MODEL_DEFAULTS.get(model, {}),
            **engine_defaults(model),
            **{name: value for name, value in llm.items() if value is not None},
        }
        if llm.get("prefix_cache_retention_interval", 0) is None:
            # The one argument for which None is a value: a snapshot at every boundary.
            self._arguments["prefix_cache_retention_interval"] = None
        if server is not None or connector is not None:
            extra = {"lmcache.mp.port": server.port} if server is not None else {}
            self._arguments["kv_transfer_config"] = {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": kv_role,
                "kv_connector_extra_config": {**extra, **(extra_config or {})},
                **(connector or {}),
            }
        self.environment = self._make_environment(model, multiprocessing, env or {})
        self._cold = ON_GPU or (bool(set(env or ()) - set(OF_ONE)) if cold is None else cold)

    def _make_environment(
        self, model: str, multiprocessing: bool, env: Mapping[str, str | None]
    ) -> dict[str, str]:
        # A copy of this tree is found there, as for `make mutants`.
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        changes: dict[str, str | None] = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_CI_ENV": "1",
            "VLLM_CPU_KVCACHE_SPACE": None,
            "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
            "XDG_CACHE_HOME": str(CACHE / "user"),
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if multiprocessing else "0",
            # Lets do_corrupt_kv reach the workers; they are our own processes.
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "PYTHONPATH": os.pathsep.join([*self._packages(model), *inherited]) or None,
            "PYTHONSAFEPATH": "1",
        }
        if self._server is not None:
            changes["LMCACHE_RUNTIME_DIR"] = self._server.runtime_dir
        return environment({**changes, **env})

    def _packages(self, model: str) -> Iterator[str]:
        """Where an engine finds what vLLM needs for this model and drafter. No other engine should see it."""
        if any(each in model for each in NEEDS_TORCHVISION):
            yield str(STUBS)
        if self._arguments.get("speculative_config", {}).get("method") == "suffix":
            yield str(SUFFIX)

    def __enter__(self) -> Self:
        start = time.monotonic()
        arguments = json.dumps(self._arguments)
        command = [sys.executable, str(Path(__file__).with_name("engine_process.py")), arguments]
        self._process = ChildProcess(
            "engine",
            command if self._cold else [arguments],
            self.environment,
            self.log,
            pipes=True,
            tether=False,
            forks="" if self._cold else "engine",
        )
        try:
            self._answer("start", self._start_timeout_s)
        except BaseException:
            self.kill()
            raise
        self.startup_s = time.monotonic() - start
        if self._joins and self._server is not None and self._server.process is not None:
            try:
                for each in (self._server, *self._other_servers):
                    self._wait_until_joined(each)
            except BaseException:
                self.kill()
                raise
        return self

    def _wait_until_joined(self, server: LMCacheServer) -> None:
        """Or until it is clear that it does not use the cache."""
        if not self._multiprocessing:
            self.call("wait_until_joined")
            return

        def is_known() -> bool:
            own = group_members(self.pid)
            sessions = [each for each in server.status()["sessions"] if each["pid"] in own]
            return any(each["role"] == "scheduler" or each["not_cached"] for each in sessions)

        wait_until(is_known, what="the engine has joined its server, or does not use it")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()
            if not isinstance(error, EngineError):
                error.add_note(tail(self.log))

    @property
    def pid(self) -> int:
        assert self._process is not None, "the engine is not running"
        return self._process.pid

    def call(self, command: str, *, timeout_s: float = COMMAND_TIMEOUT_S, **arguments: Any) -> Any:
        """Run one of the commands of engine_process.py. Raises EngineError."""
        assert self._process is not None, "the engine is not running"
        try:
            self._process.say(json.dumps({"command": command, **arguments}))
        except BrokenPipeError:
            raise EngineError(f"the engine has ended\n{tail(self.log)}") from None
        return self._answer(command, timeout_s)

    def _answer(self, command: str, timeout_s: float) -> Any:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                os.killpg(self._process.pid, signal.SIGUSR1)  # its stacks, into the log
                time.sleep(0.5)
                self.kill()
                raise EngineError(f"{command}: no answer within {timeout_s} s\n{tail(self.log)}")
            received = os.read(self._process.stdout.fileno(), 1 << 20)
            if not received:
                code = self._process.popen.wait()
                raise EngineError(f"{command}: the engine ended with code {code}\n{tail(self.log)}")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{command}: {answer['error']}\n{tail(self.log)}")
        return answer["value"]

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 8,
        *,
        logprobs: int | None = 5,
        cache_salt: str | None = None,
        lora: str | None = None,
        embeds: int | None = None,
        transfer: Mapping[str, Any] | None = None,
        trace: str | None = None,
        settle: bool = True,
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> list[Result]:
        """Serve all prompts as one batch, greedily; with `settle`, then let the connector finish. `lora` is
        the directory of an adapter; `embeds` a seed for embeddings to give instead of each prompt;
        `transfer` the requests' kv_transfer_params; `trace` their header `traceparent`."""
        results = self.call(
            "generate",
            prompts=[list(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            logprobs=logprobs,
            cache_salt=cache_salt,
            lora=lora,
            embeds=embeds,
            transfer=transfer,
            trace=trace,
            settle=settle,
            timeout_s=timeout_s,
        )
        return [_result(each) for each in results]

    def run(self, prompt: Prompt, max_tokens: int = 8, **options: Any) -> Result:
        return self.generate([prompt], max_tokens, **options)[0]

    def submit(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 8,
        *,
        logprobs: int | None = 5,
        cache_salt: str | None = None,
        transfer: dict[str, Any] | None = None,
    ) -> list[str]:
        """Add requests without running them; returns their names for `abort` and `collect`."""
        names: list[str] = self.call(
            "submit",
            prompts=[list(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            logprobs=logprobs,
            cache_salt=cache_salt,
            transfer=transfer,
        )
        return names

    def step(self, count: int = 1) -> int:
        """Run at most `count` engine steps; returns the number of unfinished requests."""
        return int(self.call("step", count=count))

    def abort(self, names: Sequence[str]) -> None:
        self.call("abort", names=list(names))

    def collect(self, names: Sequence[str], *, timeout_s: float = COMMAND_TIMEOUT_S) -> list[Result]:
        """Run until the named requests have finished."""
        return [_result(each) for each in self.call("collect", names=list(names), timeout_s=timeout_s)]

    def settle(self) -> float:
        """Step as an idle engine does until the connector has nothing to do; returns the seconds."""
        return float(self.call("settle"))

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        return bool(self.call("reset_prefix_cache", reset_connector=reset_connector))

    def pause(self, mode: str = "abort") -> None:
        """Pause and clear all caches, as before a weight update, and go on. Raises EngineError."""
        self.call("pause", mode=mode)

    def corrupt_kv(self, seed: int = 0, rank: int | None = None) -> int:
        """Overwrite the whole KV cache, or that of one rank, with random numbers; returns its bytes."""
        return int(self.call("corrupt_kv", seed=seed, rank=rank))

    def compare_stored(self, prompt: Prompt, resume_tokens: int) -> int:
        """Compute a prompt and compare its pages with what the server stored; returns bytes compared."""
        return int(self.call("compare_stored", prompt=list(prompt), resume_tokens=resume_tokens))

    def metrics(self) -> dict[str, float]:
        """vLLM's own counters and gauges, summed over labels, for example `vllm:num_preemptions`; of
        histograms how often they observed something (`…_count`)."""
        metrics: dict[str, float] = self.call("metrics")
        return metrics

    def drafts(self) -> list[list[int]]:
        """The drafts of each step since the last call, one list per request; for an engine in one process
        that speculates."""
        drafts: list[list[int]] = self.call("drafts")
        return drafts

    def info(self) -> dict[str, Any]:
        """unified_block_size, block_sizes, group_kinds, num_blocks, free_blocks, replayed_tokens,
        max_num_batched_tokens."""
        info: dict[str, Any] = self.call("info")
        return info

    def close(self) -> None:
        """Shut the engine down in an orderly way. Raises EngineError if it does not end with 0."""
        if self._process is None:
            return
        process = self._process
        try:
            self.call("close", timeout_s=CLOSE_TIMEOUT_S)
            code = process.popen.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise EngineError(f"close: still running after {CLOSE_TIMEOUT_S} s\n{tail(self.log)}") from None
        finally:
            self.kill()
        if code != 0:
            raise EngineError(f"close: exit code {code}\n{tail(self.log)}")

    def kill(self) -> None:
        """End it as a crash would, with all its processes."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
