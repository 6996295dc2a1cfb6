"""The client's half of copies between host memories: it lets the server in and proves what is its own."""

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

    Needed under Yama (kernel.yama.ptrace_scope = 1, the default of Ubuntu and others); does nothing where
    Yama is absent. Raises OSError when the kernel refuses.
    """
    zero = ctypes.c_ulong(0)
    if _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(server_pid), zero, zero, zero):
        failure = ctypes.get_errno()
        # EINVAL: no Yama, or a server in another pid namespace. The server tries the access next, and
        # says what is wrong if it is refused.
        if failure != errno.EINVAL:
            raise OSError(failure, f"prctl(PR_SET_PTRACER): {os.strerror(failure)}")


class ProofBuffer:
    """NONCE_BYTES of this process's memory in which the server looks for the nonce that it sent."""

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
    """KV cache memory of this process on a CPU; `buffers` are (address, bytes). A step has been computed
    when its forward pass returns."""

    def __init__(self, buffers: tuple[tuple[int, int], ...]) -> None:
        self._buffers = buffers
        self._proof = ProofBuffer()

    def memory(self, pid: int) -> Memory:
        return Memory(pid, self._buffers, self._proof.address)

    @contextlib.contextmanager
    def proving(self, nonce: bytes) -> Iterator[None]:
        """While this lasts the nonce is where `memory` says."""
        self._proof.write(nonce)
        yield

    def after_compute(self, function: Callable[[], None]) -> None:
        """Call `function` when all that the engine has submitted so far has been computed: at once."""
        function()

    def close(self) -> None:
        """Nothing waits."""
