"""A tier in a Mooncake Store. This file is for the helper process alone: the client is C++."""

import os
import re
import socket
from collections.abc import Sequence

ENVIRONMENT = {
    "MC_STORE_MEMCPY": "0",  # version 0.3.10 cut reads short with it
    "MC_RPC_TIMEOUT_MS": "1000",  # of the master; the library's own is 30 s
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_LOG_LEVEL": "ERROR",
}
"""What the client reads when it is imported, unless the user has set it."""
PREFIX = "lmc1:"
CONNECT_S = 1.0
Memory = Sequence[tuple[int, int]]
"""Addresses and sizes, in order."""
_NO_ROOM, _OTHER_SIZE, _NOT_THERE, _FAILED = -200, -600, -704, -800
_UNFINISHED = -703  # whoever wrote it has died, and the master forgets it later
_REASONS = {
    -707: "a read took longer than its lease: raise default_kv_lease_ttl of the master",
    _FAILED: "a transfer failed: see whether the machine that holds the record runs",
    -900: "the master does not answer: see whether it runs and is reachable",
    -901: "the master gave no answer in time: see whether it runs and is not busy",
}


class Mooncake:
    """A client of the master at `master`, for any number of threads. With `segment_bytes` it gives so much
    memory to the store. `host` is the address under which others reach this machine; empty for the one that
    leads to the master."""

    def __init__(
        self,
        master: str,
        protocol: str = "tcp",
        devices: str = "",
        metadata: str = "P2PHANDSHAKE",
        host: str = "",
        segment_bytes: int = 0,
    ) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mooncake.store import MooncakeDistributedStore

        own = _own_address(master)  # at once, if nobody listens there; the client would wait
        self._store = MooncakeDistributedStore()
        code = self._store.setup(host or own, metadata, segment_bytes, 0, protocol, devices, master)
        if code:
            raise OSError(f"it could not be opened ({code}): see whether the master runs and is reachable")

    def share(self, address: int, num_bytes: int) -> None:
        """From now on, calls name memory in there."""
        _checked(self._store.register_buffer(address, num_bytes))

    def unshare(self, address: int, num_bytes: int) -> None:
        _checked(self._store.unregister_buffer(address))

    def present(self, names: Sequence[str]) -> list[bool]:
        return [_checked(code) > 0 for code in self._store.batch_is_exist([PREFIX + name for name in names])]

    def read(self, name: str, memory: Memory) -> bool:
        """False if there is no record of exactly that size."""
        key, (addresses, sizes) = PREFIX + name, map(list, zip(*memory, strict=True))
        (code,) = self._store.batch_get_into_multi_buffers([key], [addresses], [sizes])
        # A record that is smaller fails as a broken connection does.
        if code in (_NOT_THERE, _OTHER_SIZE, _UNFINISHED) or (
            code == _FAILED and self._store.get_size(key) not in (_FAILED, sum(sizes))
        ):
            return False
        return bool(_checked(code) == sum(sizes))

    def write(self, name: str, memory: Memory) -> bool:
        """Keeps a record whole or not at all. False if there is no room."""
        addresses, sizes = map(list, zip(*memory, strict=True))
        (code,) = self._store.batch_put_from_multi_buffers([PREFIX + name], [addresses], [sizes])
        if code in (_NO_ROOM, _UNFINISHED):
            return False
        _checked(code)
        return True

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            # By force, or it would stay for as long as somebody may be reading it.
            if (code := self._store.remove(PREFIX + name, True)) != _NOT_THERE:
                _checked(code)

    def clear(self, prefix: str) -> None:
        _checked(self._store.remove_by_regex(f"^{PREFIX}{re.escape(prefix)}.*", True))


def _checked(code: int) -> int:
    if code < 0:
        raise OSError(_REASONS.get(code, f"it failed with the code {code}"))
    return code


def _own_address(master: str) -> str:
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise OSError(f"{_REASONS[-900]} ({error})") from error
