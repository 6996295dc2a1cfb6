"""The process in which the native client of a store runs, and what the server says to it over sockets:
`python -m lmcache_server.options.tiers.helper DESCRIPTOR…`.

Each descriptor is a channel, with a thread of its own. When one closes, the process ends.

The server survives a client that crashes or hangs. But the client can write anywhere in L1, which it maps.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from lmcache_server.options.tiers.mooncake import Memory, Mooncake

Call = Literal["open", "share", "present", "read", "write", "remove", "clear"]
L1 = 0
"""The number of the area that all channels share. The others are 1 + the number of a channel."""
MAX_BYTES = 160 << 10
"""Of a message: below what a socket takes by default."""
MAX_NAMES = 512
"""Of a message; each has some 200 bytes at most."""
_PR_SET_PDEATHSIG = 1


class Part(NamedTuple):
    """Bytes of a record: `num_bytes` at `offset` of an area."""

    area: int
    offset: int
    num_bytes: int


class Request(msgspec.Struct, array_like=True):
    """The first is `open`, with the client's `settings`. With `share` comes the descriptor of a file, and
    `parts` says where the area lies in it."""

    call: Call
    names: list[str] = []
    parts: list[Part] = []
    settings: dict[str, Any] = {}


class Reply(msgspec.Struct, array_like=True):
    """What the call found or whether it could, or why it failed."""

    found: list[bool] = []
    error: str = ""


class _Area(NamedTuple):
    mapping: mmap.mmap
    address: int
    num_bytes: int


class Helper:
    """Answers what comes in on the channels. Any exception of the client is a call that failed."""

    _client: Mooncake

    def __init__(self, make: Callable[..., Mooncake] = Mooncake) -> None:
        self._make = make
        self._areas: dict[int, _Area] = {}

    def serve(self, channel: socket.socket) -> None:
        """Returns when the channel closes."""
        while True:
            content, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, 1)
            if not content:
                return
            reply = Reply()
            try:
                reply.found = self._answer(msgspec.msgpack.decode(content, type=Request), descriptors)
            except Exception as error:  # any failure is an answer
                reply.error = str(error) or type(error).__name__
            channel.send(msgspec.msgpack.encode(reply))

    def _answer(self, request: Request, descriptors: Sequence[int]) -> list[bool]:
        names = request.names
        if request.call == "open":
            self._client = self._make(**request.settings)
        elif request.call == "share":
            (part,), (descriptor,) = request.parts, descriptors
            self._share(part, descriptor)
        elif request.call == "present":
            return self._client.present(names)
        elif request.call == "read":
            return [self._client.read(names[0], self._memory(request.parts))]
        elif request.call == "write":
            return [self._client.write(names[0], self._memory(request.parts))]
        elif request.call == "remove":
            self._client.remove(names)
        else:
            self._client.clear(names[0])
        return []

    def _share(self, part: Part, descriptor: int) -> None:
        mapping = mmap.mmap(descriptor, part.offset + part.num_bytes, flags=mmap.MAP_SHARED)
        os.close(descriptor)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + part.offset
        if (old := self._areas.pop(part.area, None)) is not None:
            self._client.unshare(old.address, old.num_bytes)
            with contextlib.suppress(BufferError):  # its address was taken, and that counts as a user
                old.mapping.close()
        self._client.share(address, part.num_bytes)
        self._areas[part.area] = _Area(mapping, address, part.num_bytes)

    def _memory(self, parts: Sequence[Part]) -> Memory:
        memory = []
        for part in parts:
            area = self._areas[part.area]
            if part.offset < 0 or part.num_bytes < 0 or part.offset + part.num_bytes > area.num_bytes:
                raise ValueError(f"{part} is outside of its area")
            memory.append((area.address + part.offset, part.num_bytes))
        return memory


def main(*descriptors: str) -> None:
    # A client that hangs may keep the other threads from seeing that the server is gone.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server ends it
    helper = Helper()

    def work(channel: socket.socket) -> None:
        with contextlib.suppress(OSError):
            helper.serve(channel)
        os._exit(0)  # without the destructors of the client, which may hang

    first, *others = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
    for channel in others:
        threading.Thread(target=work, args=(channel,), daemon=True).start()
    work(first)


if __name__ == "__main__":
    main(*sys.argv[1:])
