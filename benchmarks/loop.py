"""What a lookup, a load and a store take of the server's event loop: the real router in this process, whose copies end
at once. All engines of a server share this one loop.
"""

import asyncio
import time
from collections.abc import Sequence

from fuzz import targets
from section import Section, median, micros

CHUNKS, BLOCKS = 60, 16
"""Of a request of 15,360 tokens, with blocks of 16."""
targets.L1_FRAMES = 400

from desk import Desk, _turns, identity, key  # noqa: E402
from fuzz.messages import BLOCKS as ENGINE_BLOCKS  # noqa: E402
from fuzz.messages import CHUNK_SIZE  # noqa: E402

from lmcache_client.contract.codec import packed  # noqa: E402
from lmcache_client.contract.keys import ROOT_KEY  # noqa: E402
from lmcache_client.contract.messages import (  # noqa: E402
    Done,
    Found,
    Load,
    Lookup,
    Message,
    Store,
    Stored,
    StoreObject,
    encode_request,
)

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


class Loop:
    """One engine that has stored prompt 0, and the times of what it sends then."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        desk.join(0)
        desk.ask(0, store(0))
        desk.end_copies()
        self._ids = iter(range(1_000_000, 2_000_000))
        self.empty_s = median([self._timed(None) for _ in range(ROUNDS)])

    def took_s(self, sent: Sequence[Message], answer: type) -> float:
        """The median of these messages, without what a turn of an idle loop takes."""
        times = [self._timed(encode_request(next(self._ids), message)) for message in sent]
        assert isinstance(self._desk.last, answer), self._desk.last
        return median(times) - self.empty_s

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


def main() -> None:
    section = Section(
        "loop",
        "The server's event loop",
        f"Processor time of the loop for requests of {CHUNKS} chunks of {BLOCKS} blocks, the median of {ROUNDS}, with "
        "`--checksums`. Copies are made by other threads and are not in it.",
    )
    keys = tuple(key(chunk) for chunk in range(CHUNKS))
    question = Lookup("request", keys, 0, TOKENS, TOKENS + 1)
    with targets.owner() as (pid, address):
        desk = Desk(pid, address)
        loop = Loop(desk)
        found = desk.ask(0, question)
        assert isinstance(found, Found)
        assert found.resume_tokens == TOKENS
        load = Load("request", found.lease_id, keys[-1], TOKENS, 0, (blocks(0, CHUNKS * BLOCKS),))
        took = {
            "lookup": loop.took_s([question] * ROUNDS, Found),
            "load": loop.took_s([load] * ROUNDS, Done),
            "store": loop.took_s([store(1 + number) for number in range(ROUNDS)], Stored),
        }
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
