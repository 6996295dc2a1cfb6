"""What a lookup, a load and a store take of the server's event loop: the real router in this process, whose copies end
at once. All engines of a server share this one loop.
"""

import asyncio
import time
from typing import Any

from fuzz import targets
from section import Section, median, micros

CHUNKS, BLOCKS = 60, 16
"""Of a request of 15,360 tokens, with blocks of 16."""
targets.L1_FRAMES = 400

from desk import Desk, HeldCopies, _turns, identity, key  # noqa: E402
from fuzz.messages import BLOCKS as ENGINE_BLOCKS  # noqa: E402
from fuzz.messages import CHUNK_SIZE  # noqa: E402

from lmcache_client.contract.codec import packed  # noqa: E402
from lmcache_client.contract.keys import ROOT_KEY  # noqa: E402
from lmcache_client.contract.messages import (  # noqa: E402
    Done,
    Found,
    Load,
    Lookup,
    Memory,
    Message,
    Release,
    Store,
    Stored,
    StoreObject,
    decode_reply,
    encode_request,
)
from lmcache_server.core.packed import DIGEST_BYTES  # noqa: E402
from lmcache_server.transfer.base import Opened  # noqa: E402
from lmcache_server.transfer.host import HostMapping  # noqa: E402
from lmcache_server.transfer.jobs import CopyJob, StoreJob  # noqa: E402

ROUNDS = 200
MAX_LOAD_US, MAX_STORE_US = 270, 14
TOKENS = CHUNKS * CHUNK_SIZE


def blocks(first: int, count: int) -> bytes:
    return packed([1 + (first + at) % (ENGINE_BLOCKS - 1) for at in range(count)])


def store(prompt: int) -> Store:
    keys = [key(1000 * prompt + chunk) for chunk in range(CHUNKS)]
    parents = [ROOT_KEY, *keys]
    return Store(
        tuple(
            StoreObject(keys[chunk], parents[chunk], chunk, 0, blocks(BLOCKS * chunk, BLOCKS))
            for chunk in range(CHUNKS)
        )
    )


class Copies(HeldCopies):
    """Also gives the digests of what is stored."""

    def submit(self, job: CopyJob) -> "asyncio.Future[Any]":
        if isinstance(job, StoreJob):
            job.digests[:] = [bytes(DIGEST_BYTES)] * len(job.objects)
        return super().submit(job)


class Loop:
    """One engine that has stored prompt 0, and the times of what it sends then."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._ids, self._sent = desk, iter(range(1_000_000, 2_000_000)), list[bytes]()
        desk.target.system.copier = self._copier  # type: ignore[method-assign,assignment]
        desk.join(0)
        desk.target.router._send = lambda _who, frame: self._sent.append(frame)  # type: ignore[method-assign]
        self.empty_s = median([self._timed(None) for _ in range(ROUNDS)])

    def _copier(self, _name: str, memory: Memory, _alive: object) -> Copies:
        self._desk.copies.append(Copies(Opened(None, HostMapping(memory).open()), self._desk.target.loop))
        return self._desk.copies[-1]  # type: ignore[return-value]

    def asked(self, message: Message) -> tuple[Message, float]:
        """The answer, and the seconds of the loop without what turns of an idle loop take."""
        took_s = self._timed(encode_request(next(self._ids), message)) - self.empty_s
        (frame,) = self._sent
        self._sent.clear()
        return decode_reply(frame)[2], took_s

    def _timed(self, frame: bytes | None) -> float:
        """Processor seconds of this thread."""
        start = time.thread_time()
        self._desk.target.loop.run_until_complete(self._received(frame))
        return time.thread_time() - start

    async def _received(self, frame: bytes | None) -> None:
        if frame is not None:
            self._desk.target.router.receive(identity(0), frame)
        await _turns()
        for copy in self._desk.copies:
            copy.end()
        await _turns()


def measured(loop: Loop) -> dict[str, float]:
    keys, times = tuple(map(key, range(CHUNKS))), dict[str, list[float]]()

    def ask(message: Message, kind: type) -> Any:
        answer, took_s = loop.asked(message)
        assert isinstance(answer, kind), answer
        times.setdefault(type(message).__name__.lower(), []).append(took_s)
        return answer

    ask(store(0), Stored)
    for _ in range(ROUNDS):
        found = ask(Lookup("request", keys, 0, TOKENS, TOKENS + 1), Found)
        assert found.resume_tokens == TOKENS
        ask(Load("request", found.lease_id, keys[-1], TOKENS, 0, (blocks(0, CHUNKS * BLOCKS),)), Done)
        ask(Release((found.lease_id,), keys, "request"), Done)
    times["store"] = []
    for number in range(ROUNDS):
        assert ask(store(1 + number), Stored).stored == CHUNKS
    return {name: median(each) for name, each in times.items()}


def main() -> None:
    section = Section(
        "loop",
        "The server's event loop",
        f"Processor time of the loop for requests of {CHUNKS} chunks of {BLOCKS} blocks, the median of {ROUNDS}, with "
        "`--checksums`. Other threads copy, and are not in it; nor are the sockets.",
    )
    with targets.owner() as (pid, address):
        desk = Desk(pid, address)
        took = measured(Loop(desk))
        asyncio.set_event_loop(desk.target.loop)
        desk.target.close()
    rows = [[name, micros(took_s), f"{took_s / CHUNKS * 1e6:.1f} µs"] for name, took_s in took.items()]
    section.table("", ["request", "the loop", "a chunk"], rows)
    load_s, store_s = took["load"], took["store"] / CHUNKS
    bar = f"a load of {CHUNKS} chunks: at most {MAX_LOAD_US} µs for each rank"
    section.bar(bar, micros(load_s), load_s <= MAX_LOAD_US / 1e6)
    bar = f"a store: at most {MAX_STORE_US} µs an object"
    section.bar(bar, f"{store_s * 1e6:.1f} µs", store_s <= MAX_STORE_US / 1e6)
    section.save()


main()
