"""What is fuzzed, and what must hold whatever comes in."""

import asyncio
import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from harness.hostile import EXAMPLES
from harness.processes import ChildProcess

from fuzz.choices import Choices, Target, bend, frame_of
from fuzz.messages import BUFFER_BYTES, KINDS, Speaker, plain
from lmcache_client.contract import codec, messages
from lmcache_client.contract.codec import ProtocolError
from lmcache_client.contract.messages import Challenge, Found, Lookup, Memory
from lmcache_server.app import assemble
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.l1.memory import L1Memory
from lmcache_server.service.system import System
from lmcache_server.telemetry.metrics import Metrics
from lmcache_server.transfer import host
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.locked_memory import LockedMemory
from lmcache_server.transfer.plan import Pieces

L1_FRAMES = 24
CLIENTS = 4
PROOFS = 16
"""Places for nonces in the memory of the owner. Each client has its own, or shares it with every 16th."""
MAX_STEPS = 64
ANSWER_S = 10.0


class DecoderTarget(Target):
    """A frame is a message, which is the same after another journey, or ProtocolError; nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = [messages.encode_request(7, message) for message in EXAMPLES]
        self.seeds += [messages.encode_reply(bytes(16), 7, message) for message in EXAMPLES]

    def run(self, data: bytes) -> None:
        self.inputs += 1
        pairs: Any = (
            ("request", messages.decode_request, messages.encode_request),
            ("reply", messages.decode_reply, messages.encode_reply),
        )
        for name, decode, encode in pairs:
            try:
                decoded = decode(data)
            except ProtocolError:
                self.outcomes["unreadable"] += 1
                continue
            assert isinstance(decoded[-1], codec.Wire)
            assert decode(encode(*decoded)) == decoded
            self.outcomes[name] += 1


_OWNER = """
import ctypes, sys
memory = (ctypes.c_char * int(sys.argv[1]))()
print(ctypes.addressof(memory), flush=True)
sys.stdin.read()
"""


@contextmanager
def owner() -> Iterator[tuple[int, int]]:
    """(pid, address) of a process that owns BUFFER_BYTES and PROOFS places, and does nothing: what a lie
    makes the server write somewhere is written into it, and not into the fuzzer."""
    command = [sys.executable, "-c", _OWNER, str(BUFFER_BYTES + PROOFS * messages.NONCE_BYTES)]
    with ChildProcess("owner", command, pipes=True) as process:
        yield process.pid, int(process.stdout.readline())


class RouterTarget(Target):
    """A router over a real cache and real copies. `run` plays one sequence of frames of several clients,
    starting from nothing; what is stored stays for the next."""

    def __init__(self, pid: int, address: int) -> None:
        super().__init__()
        self.seeds = _router_seeds()
        self.loop = asyncio.new_event_loop()
        self.now_s = 0.0
        self._pid, self._address = pid, address
        self._speakers = {bytes([number]): Speaker(pid, self.memory_of(number)) for number in range(CLIENTS)}
        self._questions: dict[tuple[bytes, int], messages.Message] = {}
        self._expected: Counter[tuple[bytes, int]] = Counter()
        self._answered: Counter[tuple[bytes, int]] = Counter()
        self.l1, metrics, gpus = L1Memory(L1_FRAMES * FRAME_BYTES), Metrics(), Gpus()
        locked = LockedMemory(gpus, self.l1.base_address, self.l1.num_bytes, FRAME_BYTES)
        system = System(self.loop, gpus, locked)
        system.now_s = lambda: self.now_s  # type: ignore[method-assign]
        self.cache = Cache(FRAME_BYTES, self.l1.num_frames, lease_s=30.0)
        self.system, self.metrics = system, metrics
        config = Config(checksums=True)
        self.router, self.report = assemble(config, self.cache, self.l1, metrics, self._sent, system)

    def close(self) -> None:
        self.loop.run_until_complete(self._end())
        self.l1.close()
        self.loop.close()

    def run(self, data: bytes) -> None:
        self.loop.run_until_complete(asyncio.wait_for(self._play(Choices(data)), ANSWER_S))

    async def _play(self, choices: Choices) -> None:
        self._expected.clear()
        self._answered.clear()
        for number in range(MAX_STEPS):
            if not choices.left:
                break
            proves, waits, pauses = self._step(choices, number), choices.below(4), choices.below(8)
            if proves and waits:
                # Whoever does not wait for the answer is refused whatever it asks next.
                await self._all_answered()
            if not pauses:
                await asyncio.sleep(0)
        await self._all_answered()
        assert self._answered == self._expected, "every request that can be answered gets one reply"
        self._check()
        await self._end()
        self._check()
        assert self.cache.num_leases == self.cache.num_readers == self.cache.reserved_frames == 0
        assert not list(self.router.sessions.engines)
        assert not any(known["ephemeral"] for known in self.router.sessions.known.values())
        self._questions.clear()
        for speaker in self._speakers.values():
            speaker.promised.clear()

    async def _all_answered(self) -> None:
        while self._answered.total() < self._expected.total():
            await asyncio.sleep(0.0001)

    async def _end(self) -> None:
        self.router.sessions.close()
        self.router.sessions._closed = False
        assert await self.system.all_ended(ANSWER_S)

    def _check(self) -> None:
        self.cache.check_integrity()
        for session in self.router.sessions.by_identity.values():
            assert session.jobs == session.waiting_bytes == 0

    def _step(self, choices: Choices, number: int) -> bool:
        """One event; whether it was meant to prove a registration."""
        identity = bytes([choices.below(CLIENTS)])
        how = choices.below(16)
        if how == 5 and not choices.below(16):
            self.router.disconnected(identity)
            return False
        if how < 2:
            self.now_s += how * choices.below(256)
            self.router.tick()
            return False
        message = self._speakers[identity].message(choices)
        envelope = [messages.PROTOCOL_VERSION, number, plain(message)]
        bend(envelope[2], choices, how - 10)
        bend(envelope, choices, int(how == 2))
        self._receive(identity, frame_of(envelope, choices, flip=how == 3, cut=how == 4))
        return isinstance(message, messages.Prove)

    def _receive(self, identity: bytes, frame: bytes) -> None:
        self.inputs += 1
        with suppress(ProtocolError):
            try:
                request_id, message = messages.decode_request(frame)
                self._questions[identity, request_id] = message
            except messages.BadRequestError as error:
                request_id = error.request_id
            self._expected[identity, request_id] += 1
        self.router.receive(identity, frame)

    def _sent(self, identity: bytes, frame: bytes) -> None:
        _, request_id, reply = messages.decode_reply(frame)
        self._answered[identity, request_id] += 1
        self.outcomes[reply.code if isinstance(reply, messages.Refused) else type(reply).__name__] += 1
        assert not (isinstance(reply, messages.Refused) and reply.code == messages.INTERNAL), reply
        if isinstance(reply, Challenge):
            self._write(int.from_bytes(identity, "big"), reply.nonce)
        question = self._questions.get((identity, request_id))
        if isinstance(reply, Found) and isinstance(question, Lookup) and reply.lease_id:
            self._speakers[identity].promised.append((reply, question))

    def memory_of(self, client: int) -> Memory:
        end = self._address + BUFFER_BYTES
        proof = end + client % PROOFS * messages.NONCE_BYTES
        return Memory(self._pid, ((self._address, BUFFER_BYTES),), proof)

    def _write(self, client: int, nonce: bytes) -> None:
        """As the client does: into its memory, where it said that it would."""
        buffer = ctypes.create_string_buffer(nonce, len(nonce))
        place = (ctypes.addressof(buffer), self.memory_of(client).proof_address, len(nonce))
        host.copy(self._pid, Pieces(*(np.array([each], np.uint64) for each in place)), load=True)


def _life(client: int, engine: int, *said: str) -> list[bytes]:
    """What a client says, as it is: who, "not bent", the choices of its Speaker, "wait", "no pause"."""
    return [
        bytes([client, 5, 1, KINDS.index(name), engine, client if name == "hello" else 1, 0, 1, 0, 1, 1])
        for name in said
    ]


_GREETED = ("hello", "register", "prove", "join")
_USED = ("store", "lookup", "load", "release")
_WHOLE = (*_GREETED, *_USED, "goodbye")


def _router_seeds() -> list[bytes]:
    first, second, third = _life(0, 0, *_WHOLE), _life(1, 1, *_WHOLE), _life(2, 0, *_WHOLE)
    lives = (
        first,
        first[:-1] + first,
        [piece for pair in zip(first, second, strict=True) for piece in pair],
        first[:6] + second,
        first[:5] + third,
        _life(0, 0, *_GREETED, "pin", *_USED, "pin", "unpin", "goodbye"),
        _life(0, 0, *_GREETED, "store", "lookup", "follow", "inspect", "accept", "follow", "goodbye"),
    )
    return [b"".join(life) for life in lives]
