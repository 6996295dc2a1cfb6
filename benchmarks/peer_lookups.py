"""A client of LMCache's server, run in LMCache's environment: see open_loop.py.

    peer_lookups.py fill|ask|copy NUMBER RPC_URL HTTP_URL PROMPTS CHUNKS SECONDS

`fill` stores all prompts and stays registered. `ask` asks for them at each rate that it reads, and writes the times.
`copy` loads and stores for as long as its input is open. Each says when it is ready.
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
_names = itertools.count()


def say(answer: Any) -> None:
    """LMCache may write lines of its own."""
    print("answer", json.dumps(answer), flush=True)


def started(number: int, rpc_url: str, http_url: str, chunks: int) -> ServerBenchClient:
    helpers._INSTANCE_ID_BASE += 100 * number
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
    client.lookup(request)
    stored = client.store(request, 0, request.num_full_tokens)
    assert stored is not None
    assert stored.succeeded
    client.end_session(request)


def load(client: ServerBenchClient, sequence: int, turn: int) -> None:
    request = client.create_request(sequence, f"load-{sequence}-{turn}", "warm")
    assert request is not None
    if client.lookup(request).is_full_hit:
        loaded = client.retrieve(request, 0, request.num_full_tokens)
        assert loaded is not None
        assert loaded.succeeded
    client.end_session(request)


def copy(client: ServerBenchClient, number: int, prompts: int) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    turn = 0
    while not ended.is_set():
        start_s = time.perf_counter()
        load(client, (number + turn) % prompts, 1000 * number + turn)
        store(client, prompts * (1 + turn) + number)
        turn += 1
        time.sleep(time.perf_counter() - start_s)


class Asking:
    """One question. LMCache answers in two steps: it takes the question, and is then asked for what it has found."""

    def __init__(self, client: Any, key: Any) -> None:
        self.client, self.key = client, key
        self.reply, self.is_found, self.not_before_s = client.lookup(key, 1), False, 0.0

    def wait(self, seconds: float) -> None:
        if self.reply.query():
            time.sleep(min(seconds, STATUS_PAUSE_S))
        else:
            self.reply.wait(seconds)

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
    role, number, rpc_url, http_url, prompts, chunks, seconds = sys.argv[1:]
    own = int(number), int(prompts), int(chunks)
    if role == "ask":
        client = RequestClientFactory.create(rpc_url)
        say("ready")
        for line in sys.stdin:
            say(ask_at(client, float(line), *own, float(seconds)))
        return
    registered = started(own[0], rpc_url, http_url, own[2])
    if role == "fill":
        for sequence in range(own[1]):
            store(registered, sequence)
    say("ready")
    if role == "copy":
        copy(registered, *own[:2])
    else:
        sys.stdin.read()
    registered.close()


if __name__ == "__main__":
    main()
