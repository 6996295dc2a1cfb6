"""What the connector takes from an engine's step in which requests only decode: both sides, called as vLLM calls
them, with a real server. One token of each request is computed in each step. And what it takes from a batch of
prompts that the server does not have, from their arrival to their end.
"""

import os
import time
from itertools import count
from typing import Any

from harness.rawclient import RawEngine, group
from harness.served import step_output
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S, wait_until
from section import Section, median, micros
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from lmcache_client.connector.metadata import StepMetadata, WorkerReport
from lmcache_client.connector.offers import Offers
from lmcache_client.connector.scheduler import SchedulerSide
from lmcache_client.connector.settings import Settings
from lmcache_client.connector.worker import WorkerSide

BLOCK, CHUNK = 16, 256
PROMPT = 4_096 + BLOCK
BLOCKS = 512
STEPS = 2 * CHUNK
"""Each request completes two chunks in them."""
REQUESTS = (1, 8, 64, 256)
MAX_US = {64: 50, 256: 80}
PROMPTS, PROMPT_TOKENS, BATCHES, MAX_BATCH_US = 8, 300, 60, 650
ONE_TOKEN = SamplingParams(max_tokens=1)
ANSWERED_S = 0.02
"""Early lookups are answered before vLLM asks."""
_names = count()


class Engine:
    """The connector of an engine with one worker, between one server and `requests` requests that decode."""

    def __init__(self, server: LMCacheServer, requests: int) -> None:
        raw = RawEngine(server.address, [group(block_size=BLOCK)], num_blocks=BLOCKS)
        settings = Settings(port=server.port)
        self.worker = WorkerSide(settings, f"steps-{requests}", 0, raw.model, raw.geometry, raw.export)
        wanted = {"handover": True, "hints": True}
        self.side = SchedulerSide(
            settings, f"steps-{requests}", Offers(raw.groups), 1, True, True, wanted=wanted
        )
        self.side.bind(BlockPool(BLOCKS, enable_caching=False, hash_block_size=BLOCK))
        for each in (self.worker, self.side):
            each.start()
            wait_until(lambda each=each: each.channel.ready, PATIENCE_S)  # type: ignore[misc]
        # All have the same blocks: their bytes are of no interest.
        self.tables = {
            f"request {next(_names)}": (list(range(1, 1 + (PROMPT + STEPS) // BLOCK)),)
            for _ in range(requests)
        }
        self.requests = list[Request]()
        for number, name in enumerate(self.tables):
            prompt = [number] * PROMPT
            self.requests.append(Request(name, prompt, SamplingParams(max_tokens=STEPS), None))
            self.side.new_request(self.requests[-1])
        self.step(
            step_output(
                dict.fromkeys(self.tables, PROMPT), new=[(n, 0) for n in self.tables], tables=self.table
            )
        )
        self.settle()

    def table(self, name: str) -> Any:
        return self.tables[name]

    def decode(self, number: int) -> tuple[float, float]:
        for request in self.requests:
            request.append_output_token_ids(number % 1000)
        names, before = list(self.tables), PROMPT + number
        cached = [(name, before) for name in names]
        return self.step(step_output(dict.fromkeys(names, 1), cached=cached, tables=self.table))

    def step(self, output: Any) -> tuple[float, float]:
        """CPU seconds that the scheduler's side and the worker's took."""
        start = time.thread_time()
        metadata: StepMetadata = self.side.step(output)
        between = time.thread_time()
        self.worker.submit(metadata.loads)
        self.worker.submit(metadata.stores)
        results = self.worker.collect(metadata.idle)
        told = KVConnectorOutput(
            kv_connector_worker_meta=WorkerReport(results.settled) if results.settled else None
        )
        self.worker.stats.take()
        after = time.thread_time()
        self.side.worker_output(told)
        self.side.take_stats()
        return between - start + time.thread_time() - after, after - between

    def batch(self, number: int) -> float:
        """CPU seconds of the scheduler's side for prompts that nobody has computed before."""
        requests = [
            Request(f"prompt {number} {index}", [number, index] * (PROMPT_TOKENS // 2), ONE_TOKEN, None)
            for index in range(PROMPTS)
        ]
        names = [request.request_id for request in requests]
        self.tables |= dict.fromkeys(names, (list(range(1, 2 + PROMPT_TOKENS // BLOCK)),))
        output = step_output(
            dict.fromkeys(names, PROMPT_TOKENS), new=[(name, 0) for name in names], tables=self.table
        )
        start = time.thread_time()
        for request in requests:
            self.side.new_request(request)
        time.sleep(ANSWERED_S)
        for request in requests:
            while self.side.matched_tokens(request, 0)[0] is None:
                self.side.lookups.may_wait = True  # as in the next step
            self.side.allocated(request, None, 0)  # type: ignore[arg-type]
        metadata = self.side.step(output)
        between = time.thread_time()
        self.worker.submit(metadata.stores)
        after = time.thread_time()
        for request in requests:
            self.side.finished(request)
        used_s = between - start + time.thread_time() - after
        assert len(metadata.stores) > 0, "they are computed and stored"
        self.settle()
        return used_s

    def settle(self) -> None:
        def settled() -> bool:
            self.step(step_output({}))
            return not self.side.has_work()

        wait_until(settled, PATIENCE_S)

    def close(self) -> None:
        self.settle()
        self.side.channel.close()
        self.worker.close()


def main() -> None:
    section = Section(
        "steps",
        "Steps of decoding requests",
        f"CPU of the connector in one step, {STEPS} steps in which each request computes one token. In two of them "
        "each request completes a chunk; the mean has those, too.",
    )
    rows = []
    with LMCacheServer(chunk_size=CHUNK, l1_size_gb=0.5) as server:
        os.environ["LMCACHE_RUNTIME_DIR"] = server.runtime_dir
        for requests in REQUESTS:
            engine = Engine(server, requests)
            found = [engine.decode(number) for number in range(STEPS)]
            engine.close()
            whole = [scheduler + worker for scheduler, worker in found]
            parts = [median([each[side] for each in found]) for side in (0, 1)]
            mean = sum(whole) / len(whole)
            rows.append((str(requests), *map(micros, parts), micros(median(whole)), micros(mean)))
            if requests in MAX_US:
                limit = MAX_US[requests]
                took = median(whole)
                bar = f"{requests} requests: at most {limit} µs a step"
                section.bar(bar, micros(took), took <= limit / 1e6, top=True)
        engine = Engine(server, 0)
        taken = [engine.batch(number) for number in range(BATCHES)]
        engine.close()
    section.table("", ["requests", "scheduler", "worker", "both, median", "both, mean"], rows)
    took = median(taken)
    columns = ["prompts", "tokens of each", "scheduler, median", "least"]
    row = [str(PROMPTS), str(PROMPT_TOKENS), micros(took), micros(min(taken))]
    section.table(
        "A batch of prompts that the server does not have, from their arrival to their end:", columns, [row]
    )
    bar = f"a batch of {PROMPTS} prompts that miss: at most {MAX_BATCH_US} µs"
    section.bar(bar, micros(took), took <= MAX_BATCH_US / 1e6)
    section.save()


main()
