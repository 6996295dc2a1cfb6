"""The client's half of copies between host memories: access for the server, and the proof of ownership."""

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator

from lmcache_client.contract.messages import NONCE_BYTES, Memory

_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)


def allow_tracer(server_pid: int) -> None:
    """Lets process `server_pid` of the same user copy from and to this process's memory.

    Yama requires this (kernel.yama.ptrace_scope = 1, the default of Ubuntu and others); without Yama it does
    nothing. Raises OSError if the kernel refuses.
    """
    zero = ctypes.c_ulong(0)
    if _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(server_pid), zero, zero, zero):
        failure = ctypes.get_errno()
        # EINVAL means no Yama, or a server in another pid namespace. The server tries the access next and
        # reports any refusal.
        if failure != errno.EINVAL:
            raise OSError(failure, f"prctl(PR_SET_PTRACER): {os.strerror(failure)}")


class ProofBuffer:
    """NONCE_BYTES of this process's memory where the server looks for the nonce that it sent."""

    def __init__(self) -> None:
        self._bytes = (ctypes.c_char * NONCE_BYTES)()

    @property
    def address(self) -> int:
        return ctypes.addressof(self._bytes)

    def write(self, nonce: bytes) -> None:
        """Raises ValueError unless `nonce` has NONCE_BYTES bytes."""
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        ctypes.memmove(self._bytes, nonce, NONCE_BYTES)


class HostExport:
    """KV cache memory of this process on a CPU; `buffers` are (address, bytes)."""

    failure = ""
    """See CudaExport.failure: here nothing waits, so nothing fails."""

    def __init__(self, buffers: tuple[tuple[int, int], ...]) -> None:
        self._buffers = buffers
        self._proof = ProofBuffer()

    def memory(self, pid: int) -> Memory:
        return Memory(pid, self._buffers, self._proof.address)

    @contextlib.contextmanager
    def proving(self, nonce: bytes) -> Iterator[None]:
        """Writes the nonce to the proof address of `memory`, where it stays until `take_back`."""
        self._proof.write(nonce)
        yield

    def take_back(self) -> None:
        """Ends what a server may do that has the proof: it looks at it before each slice of a copy."""
        self._proof.write(bytes(NONCE_BYTES))

    def after_compute(self, function: Callable[[], None]) -> None:
        """Calls `function` at once: on a CPU, a step has been computed when its forward pass returns."""
        function()

    def close(self) -> None:
        """Takes the memory back: a server that has not answered Goodbye may still copy."""
        self.take_back()
