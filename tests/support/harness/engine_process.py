"""The child process of `harness.engine.Engine`: one vLLM engine that serves commands.

Started with a JSON object of arguments for `vllm.LLM` as its only argument. Commands come in, one JSON
object a line, on standard input and answers leave the same way on standard output; all that vLLM prints
goes to standard error. When the parent goes away, the whole process group is killed.
"""

import faulthandler
import json
import logging
import multiprocessing.context
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

SETTLE_TIMEOUT_S = 120.0
IDLE_PAUSE_S = 0.0005


class EngineProcess:
    """One engine and its commands; each command is a method named `do_…`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        sys.path.append(str(Path(__file__).resolve().parent.parent))
        is_second = arguments.pop("second_runner", False)
        if is_second:
            from harness import second_runner

            second_runner.supply()
        if "speculative_config" in arguments:
            from harness import recurrent_kernels

            recurrent_kernels.mend()
            if not is_second:
                recurrent_kernels.supply()
        if scratch := arguments.pop("scratch", None):
            from harness import scratch_layers

            scratch_layers.supply(scratch)
        if arguments.get("decode_context_parallel_size", 1) > 1:
            from harness import context_parallel

            context_parallel.supply(arguments.get("cp_kv_cache_interleave_size", 1))
        if replaced := arguments.pop("replaced", None):
            _replace_when_loaded(Path(replaced))
        if changed := arguments.pop("changed", None):
            from harness import changed_vllm

            changed_vllm.change(changed)
        if arguments.pop("spawns", False):
            # The process that it was forked from has put forks in the place of what vLLM does on a CPU.
            multiprocessing.get_context = multiprocessing.context._default_context.get_context
        says_more = arguments.pop("says_more", False)
        self.llm = LLM(**arguments)
        if says_more:
            # What VLLM_LOGGING_LEVEL does, for a process that was forked when vLLM had read it.
            logger = logging.getLogger("vllm")
            for each in (logger, *logger.handlers):
                each.setLevel(logging.DEBUG)
            os.environ["VLLM_LOG_STATS_INTERVAL"] = "0.1"
        self.engine = self.llm.llm_engine
        self.numbers = iter(range(1 << 62))
        self.results: dict[str, dict[str, Any]] = {}
        self.prefills: dict[str, Any] = {}
        self.adapters: dict[str, int] = {}
        self.drafts: list[list[int]] = []
        self._watch_prefills()
        if "speculative_config" in arguments:
            self._watch_drafts()
        if arguments.get("pipeline_parallel_size", 1) > 1:
            self.llm.collective_rpc(_make_room_for_intermediate_tensors)

    def _watch_prefills(self) -> None:
        """Keep what the scheduler says about each prefill: it alone tells local hits from external ones."""
        processor = self.engine.output_processor
        original = processor.process_outputs

        def process_outputs(outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
            for output in outputs:
                state = processor.request_states.get(output.request_id)
                if output.prefill_stats is not None and state is not None:
                    self.prefills[state.external_req_id] = output.prefill_stats
            return original(outputs, *args, **kwargs)

        processor.process_outputs = process_outputs

    def _watch_drafts(self) -> None:
        """Keep what the drafter gives to the scheduler, or in the second runner to the next step."""
        runner = self._core().model_executor.driver_worker.worker.model_runner
        if handler := getattr(runner, "draft_tokens_handler", None):
            kept = handler.set_draft_tokens

            def set_draft_tokens(batch: Any, drafts: Any) -> None:
                self.drafts += drafts.tolist()
                kept(batch, drafts)

            handler.set_draft_tokens = set_draft_tokens
            return
        scheduler = self._core().scheduler
        original = scheduler.update_draft_token_ids

        def update_draft_token_ids(drafts: Any) -> None:
            self.drafts += [list(each) for each in drafts.draft_token_ids]
            original(drafts)

        scheduler.update_draft_token_ids = update_draft_token_ids

    def _core(self) -> Any:
        core = getattr(self.engine.engine_core, "engine_core", None)
        if core is None:
            raise RuntimeError("this command needs an in-process engine (multiprocessing=False)")
        return core

    def _step(self) -> None:
        outputs = self.engine.step()
        for output in outputs:
            if output.finished:
                self.results[output.request_id] = self._result(output)
        if not outputs:
            time.sleep(IDLE_PAUSE_S)  # all requests may wait for a server or a tier

    def _result(self, output: Any) -> dict[str, Any]:
        completion = output.outputs[0]
        prefill = self.prefills.pop(output.request_id, None)
        return {
            "tokens": list(completion.token_ids),
            "logprobs": [
                sorted((token, float(entry.logprob).hex()) for token, entry in position.items())
                for position in completion.logprobs or []
            ],
            "prompt_tokens": len(output.prompt_token_ids or ()),
            "cached_tokens": output.num_cached_tokens or 0,
            "local_tokens": prefill.num_local_cached_tokens if prefill else 0,
            "external_tokens": prefill.num_external_cached_tokens if prefill else 0,
            "finish_reason": completion.finish_reason,
            "transfer": output.kv_transfer_params,
        }

    def do_submit(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        logprobs: int | None,
        cache_salt: str | None,
        lora: str | None = None,
        embeds: int | None = None,
        transfer: dict[str, Any] | None = None,
        trace: str | None = None,
    ) -> list[str]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        adapter = None
        if lora is not None:
            number = self.adapters.setdefault(lora, len(self.adapters) + 1)
            adapter = LoRARequest(os.path.basename(lora), number, lora)
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            extra_args=None if transfer is None else {"kv_transfer_params": transfer},
        )
        names = []
        for prompt in prompts:
            name = str(next(self.numbers))
            request: dict[str, Any] = {"prompt_token_ids": prompt}
            if embeds is not None:
                request = {"prompt_embeds": self._embeddings(len(prompt), embeds)}
            if cache_salt is not None:
                request["cache_salt"] = cache_salt
            headers = {"traceparent": trace} if trace is not None else None
            self.engine.add_request(
                name, request, params.clone(), lora_request=adapter, trace_headers=headers
            )
            names.append(name)
        return names

    def _embeddings(self, length: int, seed: int) -> Any:
        import torch

        config = self.llm.model_config
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(length, config.get_hidden_size(), generator=generator).to(config.dtype)

    def do_step(self, count: int) -> int:
        for _ in range(count):
            if not self.engine.has_unfinished_requests():
                break
            self._step()
        return int(self.engine.get_num_unfinished_requests())

    def do_abort(self, names: list[str]) -> None:
        self.engine.abort_request(names)

    def do_collect(self, names: list[str]) -> list[dict[str, Any]]:
        while self.engine.has_unfinished_requests() and not all(name in self.results for name in names):
            self._step()
        return [self.results.pop(name) for name in names]

    def do_settle(self) -> float:
        """Step as an idle engine does until its connector has nothing to do; returns the seconds. A core in
        another process steps by itself, until its workers have no copy under way."""
        core = getattr(self.engine.engine_core, "engine_core", None)
        start = time.monotonic()
        while core.scheduler.has_requests() if core else any(self.llm.collective_rpc(_copies)):
            if core:
                self._step()
            if time.monotonic() - start > SETTLE_TIMEOUT_S:
                raise TimeoutError(f"the engine is not idle {SETTLE_TIMEOUT_S} s after its last request")
            time.sleep(IDLE_PAUSE_S)
        return time.monotonic() - start

    def do_wait_until_joined(self) -> None:
        """Until each server has let this engine's scheduler join, or refused it."""
        outer = self._core().scheduler.connector
        sides = [getattr(each, "_scheduler", None) for each in getattr(outer, "_connectors", [outer])]
        channels = [channel for side in sides if side is not None for channel in side.client.channels]
        start = time.monotonic()
        while not all(channel.ready or channel.refusal for channel in channels):
            if time.monotonic() - start > SETTLE_TIMEOUT_S:
                raise TimeoutError("this engine's scheduler has not joined its server")
            time.sleep(IDLE_PAUSE_S)

    def do_generate(self, settle: bool, **request: Any) -> list[dict[str, Any]]:
        results = self.do_collect(self.do_submit(**request))
        if settle:
            self.do_settle()
        return results

    def do_reset_prefix_cache(self, reset_connector: bool) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=reset_connector))

    def do_pause(self, mode: str) -> None:
        """As a weight update does: pause, clear all caches, and go on. Raises what vLLM raises."""
        core = self._core()
        core.pause_scheduler(mode=mode, clear_cache=False)
        # A core in a process of its own waits for the steps that are under way; this one would fail.
        while core.batch_queue:
            self._step()
        core.pause_scheduler(mode=mode, clear_cache=True)
        core.resume_scheduler()

    def do_change_weights(self) -> None:
        self.llm.collective_rpc(_change_weights)

    def do_set_weight_version(self, version: str) -> None:
        self.engine.engine_core.set_weight_version(version)

    def do_corrupt_kv(self, seed: int, rank: int | None = None) -> int:
        """Overwrite every page, or those of one rank, with random finite numbers; returns how many bytes."""
        return sum(self.llm.collective_rpc(_corrupt_kv, args=(seed, rank)))

    def do_kv_digests(self) -> list[str]:
        """Per worker, a digest of all its pages but the null block's."""
        return list(self.llm.collective_rpc(_kv_digest))

    def do_metrics(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                totals[metric.name] = totals.get(metric.name, 0.0) + float(metric.value)
            elif hasattr(metric, "count"):
                name = f"{metric.name}_count"
                totals[name] = totals.get(name, 0.0) + float(metric.count)
        return totals

    def do_drafts(self) -> list[list[int]]:
        drafts, self.drafts = self.drafts, []
        return drafts

    def do_info(self) -> dict[str, Any]:
        scheduler = self._core().scheduler
        groups = scheduler.kv_cache_config.kv_cache_groups
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "unified_block_size": scheduler.kv_cache_manager.coordinator.scheduler_block_size,
            "block_sizes": [group.kv_cache_spec.block_size for group in groups],
            "group_kinds": [type(group.kv_cache_spec).__name__ for group in groups],
            "num_blocks": pool.num_gpu_blocks,
            "free_blocks": pool.get_num_free_blocks(),
            "replayed_tokens": getattr(scheduler, "prefix_replay_tokens", 0),
            "max_num_batched_tokens": scheduler.scheduler_config.max_num_batched_tokens,
            "scheduler": type(scheduler).__name__,
            "runner": self.llm.collective_rpc(_runner)[0],
        }

    def do_kill_server_at_load(self, pid: int) -> None:
        """Kill the server in the moment a worker is about to ask for a load."""
        for worker in _worker_sides():
            original = worker.submit

            def submit(jobs: Any, original: Callable[[Any], None] = original) -> None:
                if any(hasattr(job, "request_id") for job in jobs):
                    os.kill(pid, signal.SIGKILL)
                original(jobs)

            worker.submit = submit

    def do_seem_slow(self) -> None:
        """Tell the server that computing takes long, so that it waits for everything that a tier has."""
        self._core().scheduler.connector._scheduler.lookups.prefill = SimpleNamespace(
            tokens_per_s=1, began=lambda *_: None, ended=lambda *_: None
        )

    def do_compare_stored(self, prompt: list[int], resume_tokens: int) -> int:
        """Compute a prompt, then compare what the server stored of it with the pages that a resume at
        `resume_tokens` needs; returns the number of bytes compared, raises where one differs."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from harness.stored_bytes import Twin, of_engine

        worker = get_kv_transfer_group()._worker
        manager = self._core().scheduler.kv_cache_manager
        tables = self._core().scheduler.connector._scheduler._offers.tables
        (name,) = self.do_submit([prompt], 4, None, None)
        pages: dict[tuple[int, int], bytes] = {}
        live, sizes = of_engine(worker.client.geometry, worker.client.export)
        geometry = live.geometry
        while name not in self.results:
            self._step()
            for request in self._core().scheduler.running:
                for index, table in enumerate(tables(manager.get_block_ids(request.request_id))):
                    for position in geometry.groups[index].needed_blocks(resume_tokens):
                        computed = (position + 1) * geometry.groups[index].block_size
                        if (
                            request.num_computed_tokens >= computed
                            and position < len(table)
                            and table[position]
                        ):
                            # The first sight is the step that completed the block: a state moves on after.
                            pages.setdefault((index, position), live.block(index, table[position]))
        del self.results[name]
        self.do_settle()
        twin = Twin(worker._settings.address, worker.client, sizes)
        try:
            compared = 0
            for index, table in enumerate(twin.load(prompt, resume_tokens)):
                for position, block in table.items():
                    assert pages[index, position] == twin.pages.block(index, block), (index, position)
                    compared += len(pages[index, position])
            return compared
        finally:
            twin.close()

    def do_close(self) -> None:
        self.engine.engine_core.shutdown()


def _replace_when_loaded(directory: Path) -> None:
    """Another process changes a model's weights as soon as vLLM has loaded them."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    load_weights = DefaultModelLoader.load_weights

    def load_and_replace(self: Any, *arguments: Any, **options: Any) -> None:
        load_weights(self, *arguments, **options)
        (file,) = directory.glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    DefaultModelLoader.load_weights = load_and_replace


def _worker_sides() -> list[Any]:
    """In a worker: those of its connectors of this project."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    from lmcache_client.connector.worker import WorkerSide

    outer = get_kv_transfer_group() if has_kv_transfer_group() else None
    sides = [getattr(each, "_worker", None) for each in getattr(outer, "_connectors", [outer])]
    return [side for side in sides if isinstance(side, WorkerSide)]


def _copies(_worker: Any) -> int:
    """In a worker: how many loads and stores the server has not settled."""
    return sum(len(side._jobs) for side in _worker_sides())


def _runner(worker: Any) -> str:
    return type(getattr(worker, "worker", worker).model_runner).__module__


def _make_room_for_intermediate_tensors(worker: Any) -> None:
    """In a worker: what vLLM 0.32 does on the side of its warm-up, which it skips on a CPU, so that without
    this no pipeline runs there."""
    runner = worker.model_runner
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _change_weights(worker: Any) -> None:
    model = getattr(worker, "worker", worker).model_runner.model
    # What it multiplies is packed for the processor already, or has been thrown away.
    norms = [weight for name, weight in model.named_parameters() if name.endswith("0.input_layernorm.weight")]
    assert len(norms) == 1
    norms[0].data.neg_()


def _corrupt_kv(worker: Any, seed: int, rank: int | None) -> int:
    import torch

    worker = getattr(worker, "worker", worker)
    if rank not in (None, worker.rank):
        return 0
    runner = worker.model_runner
    buffers: dict[int, torch.Tensor] = {}
    pending = list(runner.kv_caches)
    while pending:
        each = pending.pop()
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            buffers[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=each.device).set_(storage)
        else:
            pending.extend(each)
    torch.manual_seed(seed)
    for buffer in buffers.values():
        # Small numbers whether a layer reads them as bfloat16 or as float32: garbage, but no infinities.
        noise = torch.randn(buffer.numel() // 2, dtype=torch.float32).to(torch.bfloat16)
        buffer[: noise.numel() * 2].copy_(noise.view(torch.uint8))
    return sum(buffer.numel() for buffer in buffers.values())


def _kv_digest(worker: Any) -> str:
    import hashlib

    import torch

    digest = hashlib.sha256()
    layers = getattr(
        worker, "worker", worker
    ).model_runner.vllm_config.compilation_config.static_forward_context
    for name in sorted(layers):
        cache = getattr(layers[name], "kv_cache", ())
        for each in cache if isinstance(cache, list | tuple) else [cache]:
            digest.update(each[1:].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _take_over_streams() -> tuple[TextIO, TextIO]:
    """The two command streams; what others write to standard output goes to standard error from now on."""
    commands = os.fdopen(os.dup(0), "r")
    answers = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, answers


def _read_commands(commands: TextIO, into: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in commands:
        command = json.loads(line)
        is_last = command["command"] == "close"
        into.put(command)  # whoever gets it takes it apart
        if is_last:
            return
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> int:
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    commands, answers = _take_over_streams()
    pending: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(commands, pending), daemon=True).start()

    def answer(make: Callable[..., Any], **arguments: Any) -> Any:
        try:
            value = make(**arguments)
        except Exception:
            traceback.print_exc()
            message = {"error": traceback.format_exc()}
            value = None
        else:
            message = {"value": None if isinstance(value, EngineProcess) else value}
        answers.write(json.dumps(message) + "\n")
        answers.flush()
        return value

    engine = answer(EngineProcess, arguments=json.loads(sys.argv[1]))
    if engine is None:
        return 1
    table = {
        name.removeprefix("do_"): getattr(engine, name) for name in dir(engine) if name.startswith("do_")
    }
    while True:
        command = pending.get()
        name = command.pop("command")
        answer(table[name], **command)
        if name == "close":
            return 0


if __name__ == "__main__":
    sys.exit(main())
