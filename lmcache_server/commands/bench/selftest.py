"""Tests a server from an engine's side: stores a few pages, looks them up, loads them into other blocks and
compares.

`python -m lmcache_server.commands.bench.selftest ADDRESS [CHUNK_SIZE]` prints a JSON object: `ok`, the
seconds of each step and, if one failed, its name as `failed` and the reason as `error`. With `gpus` as the
last argument, the pages are on each GPU in turn, and `gpus` has such an object for each. It leaves nothing in
the cache.
"""

import json
import secrets
import signal
import sys
import time
from itertools import pairwise
from typing import Any

from lmcache_client.contract.chunk_size import AUTO_CHUNK_TOKENS
from lmcache_client.contract.messages import Done, Found, Stored
from lmcache_kernels.driver import CudaError
from lmcache_server.commands.bench.client import LOOKUP_WAIT_S, Client, Workload, chain, driver_here
from lmcache_server.errors import CommandError
from lmcache_server.service.requests_of_tests import SELFTEST

DEADLINE_S, GPUS_DEADLINE_S = 8, 90
CHUNKS = 2


def selftest(address: str, chunk_size: int | None, gpu: int | None = None) -> dict[str, Any]:
    """The object that the module prints. `chunk_size` is the server's in tokens (None: auto). The pages are
    in host memory or on GPU number `gpu`."""
    # A hybrid workload, with words and keys that nobody else has used.
    number = secrets.randbits(22)
    model = SELFTEST + secrets.token_hex(8)
    workload = Workload(model, chunk_size or AUTO_CHUNK_TOKENS, True, 2, 4096, CHUNKS, 1)
    keys = chain(number, 0, CHUNKS)
    begun = [("register", time.perf_counter())]

    def begin(step: str) -> None:
        begun.append((step, time.perf_counter()))

    try:
        with Client(address, workload, number, gpu) as client:
            begin("store")
            store = client.store_message(keys)
            if client.ask(client.worker, store, Stored).stored < len(store.objects):
                raise CommandError("the server dropped the store: all of L1 is in use, or the copy failed")
            begin("lookup")
            hit = client.ask(client.scheduler, client.lookup_message(keys), Found, LOOKUP_WAIT_S)
            if hit.resume_tokens < CHUNKS * workload.chunk_size:
                raise CommandError("the server does not find the pages that it has just stored")
            begin("load")
            load = client.load_message(hit, keys[-1], 0)
            client.ask(client.worker, load, Done)
            begin("compare")
            client.check(load)
            begin("goodbye")
            client.release(hit)
        begin("")
        result: dict[str, Any] = {"ok": True}
    except (CommandError, CudaError) as error:
        result = {"ok": False, "failed": begun[-1][0], "error": str(error)}
    return result | {f"{step}_s": round(end - start, 6) for (step, start), (_, end) in pairwise(begun)}


def on_gpus(address: str, chunk_size: int | None) -> dict[str, Any]:
    """The object that the module prints if it tests GPUs; `failed` and `error` are of the first failure."""
    try:
        driver = driver_here()
    except CommandError as error:
        return {"ok": False, "failed": "gpus", "error": str(error)}
    reports = {driver.pci_bus_id(n): selftest(address, chunk_size, n) for n in range(driver.num_devices())}
    for gpu, report in reports.items():
        if not report["ok"]:
            reason = f"GPU {gpu}: {report['error']}"
            return {"ok": False, "failed": report["failed"], "error": reason, "gpus": reports}
    return {"ok": True, "gpus": reports}


def main() -> None:
    address, *others = sys.argv[1:]
    test, deadline_s = (on_gpus, GPUS_DEADLINE_S) if others[-1:] == ["gpus"] else (selftest, DEADLINE_S)
    chunk_size = next((int(each) for each in others if each.isdecimal()), None)

    def late(*_: object) -> None:
        raise CommandError(f"the server did not finish within {deadline_s} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(deadline_s)
    print(json.dumps(test(address, chunk_size)))


if __name__ == "__main__":
    main()
