"""The process in which the native client of a store runs:
`python -m lmcache_server.options.tiers.helper CLIENT SETTINGS DESCRIPTOR…`.

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
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from lmcache_server.options.tiers.helper_messages import MAX_BYTES, Part, Reply, Request
from lmcache_server.options.tiers.mooncake import Memory, Mooncake

_PR_SET_PDEATHSIG = 1
CLIENTS = {"mooncake": Mooncake}


class _Area(NamedTuple):
    mapping: mmap.mmap
    address: int
    num_bytes: int


class Helper:
    """Answers what comes in on the channels. Any exception of the client is a call that failed."""

    def __init__(self, client: Mooncake) -> None:
        self._client = client
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
        client, names = self._client, request.names
        if request.call == "share":
            (part,), (descriptor,) = request.parts, descriptors
            self._share(part, descriptor)
        elif request.call == "present":
            return client.present(names)
        elif request.call == "read":
            return [client.read(names[0], self._memory(request.parts))]
        elif request.call == "write":
            return [client.write(names[0], self._memory(request.parts))]
        elif request.call == "remove":
            client.remove(names)
        else:
            client.clear(names[0])
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


def main(client: str, settings: str, *descriptors: str) -> None:
    """The first reply on the first channel says whether the client could be opened."""
    # A client that hangs may keep the other threads from seeing that the server is gone.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server ends it
    channels = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
    reply = Reply()
    try:
        helper = Helper(CLIENTS[client](**msgspec.json.decode(settings)))
    except Exception as error:  # any failure is an answer
        reply.error = str(error) or type(error).__name__
    channels[0].send(msgspec.msgpack.encode(reply))
    if reply.error:
        os._exit(1)

    def work(channel: socket.socket) -> None:
        with contextlib.suppress(OSError):
            helper.serve(channel)
        os._exit(0)  # without the destructors of the client, which may hang

    for channel in channels[1:]:
        threading.Thread(target=work, args=(channel,), daemon=True).start()
    work(channels[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
