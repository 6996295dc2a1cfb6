"""A client of LMCache's server, run in LMCache's environment: see open_loop.py.

    peer_lookups.py fill|ask|copy NUMBER COUNT PROMPTS CHUNKS SECONDS RPC_URL HTTP_URL

`fill` stores all prompts and stays registered. `ask` asks for them at each rate that it reads, and writes the times.
`copy`, of which there are COUNT, loads and stores for as long as its input is open, and then says how many chunks it
has copied. Each says when it is ready.
"""

import itertools
import json
import random
import sys
import threading
import time
from typing import Any

from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from paced import paced

CHUNK_TOKENS, BLOCK_TOKENS = 256, 16
STATUS_PAUSE_S = 0.001
"""Its connector asks again in the next step of the engine."""
LONGEST_WAIT_S = 0.0005
"""Of several questions any may be answered."""
INSTANCES = {"fill": 0, "copy": 10_000}
"""Each registered client needs an instance id of its own."""
_names = itertools.count()


def say(answer: Any) -> None:
    """LMCache may write lines of its own."""
    print("answer", json.dumps(answer), flush=True)


def started(instance: int, rpc_url: str, http_url: str, chunks: int) -> ServerBenchClient:
    helpers._INSTANCE_ID_BASE += 100 * instance
    blocks = 2 * chunks * CHUNK_TOKENS // BLOCK_TOKENS
    shape = f"(2,{blocks},{BLOCK_TOKENS},1,256):bfloat16:1"
    tokens = chunks * CHUNK_TOKENS
    config = BenchConfig(
        rpc_url, http_url, "cpu", "lmcache_driven", 1, False, tokens, shape, blocks, BLOCK_TOKENS
    )
    client = ServerBenchClient(config, lambda _line: None)
    client.start()
    return client


def store(client: ServerBenchClient, sequence: int) -> None:
    request = client.create_request(sequence, f"store-{sequence}", "cold")
    assert request is not None
    stored = client.store(request, 0, request.num_full_tokens)
    assert stored is not None
    assert stored.succeeded
    client.end_session(request)


def load(client: ServerBenchClient, sequence: int, turn: int) -> int:
    """How many chunks were loaded; none unless all are there."""
    request = client.create_request(sequence, f"load-{sequence}-{turn}", "warm")
    assert request is not None
    is_whole = client.lookup(request).is_full_hit
    if is_whole:
        loaded = client.retrieve(request, 0, request.num_full_tokens)
        assert loaded is not None
        assert loaded.succeeded
    else:
        key = helpers._make_key(request.token_ids, request.request_id, start=0, end=request.num_full_tokens)
        client._req_client.free_lookup_locks(key, 1).result(helpers._DEFAULT_RPC_TIMEOUT_S)
    client.end_session(request)
    return request.total_chunks if is_whole else 0


def copy(client: ServerBenchClient, number: int, count: int, prompts: int, chunks: int) -> int:
    """How many chunks were loaded and stored. The clients begin far from each other, so that each prompt is loaded
    again before it is evicted."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    pick, first, turn, copied = random.Random(), number * prompts // count, 0, 0
    while not ended.is_set():
        start_s = time.perf_counter()
        copied += load(client, (first + turn) % prompts, pick.randrange(1 << 30))
        store(client, pick.randrange(prompts, 1 << 30))
        copied, turn = copied + chunks, turn + 1
        time.sleep(time.perf_counter() - start_s)
    return copied


class Asking:
    """One question. LMCache answers in two steps: it takes the question, and is then asked for what it has found."""

    def __init__(self, client: Any, key: Any) -> None:
        self.client, self.key = client, key
        self.reply, self.is_found, self.not_before_s = client.lookup(key, 1), False, 0.0

    def wait(self, seconds: float) -> None:
        if self.reply.query():
            time.sleep(min(seconds, STATUS_PAUSE_S))
        else:
            self.reply.wait(min(seconds, LONGEST_WAIT_S))

    def taken(self, chunks: int) -> bool:
        now_s = time.perf_counter()
        if now_s < self.not_before_s or not self.reply.query():
            return False
        found = self.reply.result(0)
        if not self.is_found or found is None:
            self.not_before_s = now_s + STATUS_PAUSE_S if self.is_found else 0.0
            self.reply, self.is_found = self.client.query_prefetch_status(self.key.request_id), True
            return False
        assert found == chunks, f"{found} of {chunks} chunks"
        self.client.free_lookup_locks(self.key, 1)
        self.client.end_session(self.key.request_id)
        return True


def ask_at(client: Any, rate: float, number: int, prompts: int, chunks: int, seconds: float) -> list[float]:
    pick, tokens = random.Random(number), chunks * CHUNK_TOKENS
    texts = [tuple(helpers._build_token_ids(each, tokens)) for each in range(prompts)]

    def ask() -> Asking:
        name = f"ask-{number}-{next(_names)}"
        return Asking(client, helpers._make_key(pick.choice(texts), name, start=0, end=tokens))

    return paced(rate, seconds, number, ask, Asking.wait, lambda asked: asked.taken(chunks))


def main() -> None:
    role, *numbers, rpc_url, http_url = sys.argv[1:]
    number, count, prompts, chunks, seconds = map(int, numbers)
    if role == "ask":
        client = RequestClientFactory.create(rpc_url)
        say("ready")
        for line in sys.stdin:
            say(ask_at(client, float(line), number, prompts, chunks, seconds))
        client.close()
        return
    registered = started(INSTANCES[role] + number, rpc_url, http_url, chunks)
    if role == "fill":
        for sequence in range(prompts):
            store(registered, sequence)
    say("ready")
    if role == "copy":
        say(copy(registered, number, count, prompts, chunks))
    else:
        sys.stdin.read()
    registered.close()


if __name__ == "__main__":
    main()
