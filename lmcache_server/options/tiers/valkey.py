"""A tier in Valkey, or in what speaks its protocol, through valkey-glide: one key for each record."""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import glide_sync as glide

from lmcache_server.options.tiers.base import TierError, checked_name
from lmcache_server.options.tiers.pieces import first, fits, gather, size, spread

logger = logging.getLogger(__name__)

PREFIX = "lmc1:"
TIMEOUT_MS = 1000
"""Of every request. The client connects again by itself if its connection ends."""
TIMEOUTS = 3
"""After so many in a row a new client is made: the old one never gives up a silent connection."""
CONNECT_MS = 1000
BATCH, MAX_SIZES = 512, 1 << 16
"""Keys in a request, and keys whose sizes are known."""
FULL_S = 10.0
"""So long nothing is written after the server had no room: glide prints each refusal on stderr."""


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), CONNECT_MS / 1000):
        return True
    return False


class Valkey:
    """Keeps records in a Valkey server, or with `cluster` in a cluster, of which `addresses` are some nodes.

    The server evicts, so it should have `maxmemory` and an `allkeys-` policy; a warning says if it has not.
    A call fails at its deadline, one second for each request. Raises TierError if nobody answers.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        cluster: bool = False,
        tls: bool = False,
        username: str | None = None,
        password: str | None = None,
    ) -> None:
        self._where = "Valkey at " + ",".join(f"{host}:{port}" for host, port in addresses)
        self._cluster, self._full_until_s = cluster, 0.0
        self._hint = ", and whether this machine trusts its certificate" if tls else ""
        self._scratch = threading.local()
        self._sizes: dict[str, int] = {}
        """Of values that were there when somebody asked, until they are read."""
        self._lock = threading.Lock()
        self._timeouts, self._demoted = 0, False
        self._requests: Counter[Any] = Counter()
        """How many requests run, by client: to close one meanwhile would free memory that they use."""
        glide.Logger.set_logger_config(glide.LogLevel.OFF)
        prefix = "GlideCluster" if cluster else "Glide"
        advanced = "AdvancedGlideClusterClient" if cluster else "AdvancedGlideClient"
        self._create = getattr(glide, f"{prefix}Client").create
        self._addresses = addresses
        self._configuration = getattr(glide, f"{prefix}ClientConfiguration")(
            [glide.NodeAddress(host, port) for host, port in addresses],
            use_tls=tls,
            credentials=glide.ServerCredentials(password, username) if password else None,
            request_timeout=TIMEOUT_MS,
            advanced_config=getattr(glide, f"{advanced}Configuration")(connection_timeout=CONNECT_MS),
        )
        self._client = self._new_client()
        try:
            self._check_settings()
        except BaseException:
            self._client.close()
            raise

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        sizes: list[int] = []
        for start in range(0, len(names), BATCH):
            batch = (glide.ClusterBatch if self._cluster else glide.Batch)(is_atomic=False)
            for name in names[start : start + BATCH]:
                batch.strlen(_key(name))  # unlike EXISTS, this counts as a use of the value
            with self._asked() as client:
                send = client.exec
                sizes += send(batch, raise_on_error=True)
        if len(self._sizes) + len(names) > MAX_SIZES:
            self._sizes.clear()
        self._sizes.update(each for each in zip(names, sizes, strict=True) if each[1])
        return [num_bytes > 0 for num_bytes in sizes]

    def read(self, name: str, pieces: Sequence[memoryview]) -> int:
        buffer, key, num_bytes = self._contiguous(pieces), _key(name), self._sizes.pop(name, 0)
        with self._asked() as client:
            # `get` reads a longer value into memory before it compares the sizes. But a question for the size
            # waits behind the values that others read.
            if not fits(num_bytes, pieces) and not fits(int(client.strlen(key)), pieces):
                return 0
            num_bytes = int(client.get(key, buffer=buffer) or 0)
        if not fits(num_bytes, pieces):
            return 0
        if len(pieces) > 1:
            spread(buffer, first(pieces, num_bytes))
        return num_bytes

    def write(self, name: str, pieces: Sequence[memoryview]) -> bool:
        key, buffer = _key(name), self._contiguous(pieces)
        if time.monotonic() < self._full_until_s:
            return False
        if len(pieces) > 1:
            gather(pieces, buffer)
        try:
            with self._asked() as client:
                client.set(key, buffer)
        except TierError as error:
            if str(error.__cause__).startswith("OOM"):
                self._full_until_s = time.monotonic() + FULL_S
                return False
            raise
        return True

    def remove(self, names: Sequence[str]) -> None:
        self._full_until_s = 0.0
        for start in range(0, len(names), BATCH):
            with self._asked() as client:
                client.unlink([_key(name) for name in names[start : start + BATCH]])

    def clear(self, prefix: str) -> None:
        self._full_until_s = 0.0
        # No character of a name has a meaning in a pattern.
        pattern = f"{PREFIX}{prefix}*"
        cursor: Any = glide.ClusterScanCursor() if self._cluster else b"0"
        while True:
            with self._asked() as client:
                cursor, keys = client.scan(cursor, match=pattern, count=1000)
                for start in range(0, len(keys), BATCH):
                    client.unlink(keys[start : start + BATCH])
            if cursor.is_finished() if self._cluster else cursor == b"0":
                return

    def close(self) -> None:
        self._client.close()

    def _contiguous(self, pieces: Sequence[memoryview]) -> memoryview:
        """The only piece, or memory of this thread for all of them."""
        if len(pieces) == 1:
            return pieces[0]
        num_bytes = size(pieces)
        scratch: memoryview | None = getattr(self._scratch, "memory", None)
        if scratch is None or scratch.nbytes < num_bytes:
            scratch = self._scratch.memory = memoryview(bytearray(num_bytes))
        return scratch[:num_bytes]

    def _check_settings(self) -> None:
        """Raises TierError if `cluster` is wrong; warns of settings under which the server evicts nothing."""
        with self._asked() as client:
            answer = client.info()
        for info in answer.values() if isinstance(answer, dict) else [answer]:
            fields = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
            if fields.get("cluster_enabled") == "1" and not self._cluster:
                raise TierError(f"{self._where} is part of a cluster: add cluster=1")
            policy = fields.get("maxmemory_policy", "")
            if fields.get("maxmemory") == "0":
                advice = "grows without limit: set maxmemory there, and maxmemory-policy to allkeys-lru"
            elif policy and not policy.startswith("allkeys"):
                advice = f"never evicts records ({policy}): set maxmemory-policy there to allkeys-lru"
            else:
                continue
            logger.warning("%(tier)s %(advice)s", {"tier": self._where, "advice": advice})
            return

    def _new_client(self) -> Any:
        # A client that cannot connect stays in memory for ever: it registers itself for forks.
        if not any(_listens(*address) for address in self._addresses):
            raise TierError(f"{self._where} does not answer: nothing accepts connections there")
        with self._explained():
            return self._create(self._configuration)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[Any]:
        """Yields the client for requests. Its errors become a TierError."""
        with self._lock:
            renew, self._demoted = self._demoted or self._timeouts >= TIMEOUTS, False
            self._timeouts *= not renew
        if renew:
            self._client = self._new_client()
        with self._lock:
            self._requests[client := self._client] += 1
        try:
            with self._explained():
                yield client
            self._timeouts = 0
        except TierError as error:
            self._timeouts += isinstance(error.__cause__, glide.TimeoutError)
            # A client asks only when it is made which of its servers is the primary.
            self._demoted |= "ReadOnly" in str(error.__cause__)
            raise
        finally:
            with self._lock:
                self._requests[client] -= 1
                for silent in [each for each in self._requests if each is not self._client]:
                    if not self._requests[silent]:
                        del self._requests[silent]
                        silent.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the client become a TierError that says what to do."""
        try:
            yield
        except glide.GlideError as error:
            text = " ".join(str(error).split())
            if isinstance(error, glide.TimeoutError) or "timed out" in text or "FatalReceiveError" in text:
                reason = f"gave no answer in time: see whether it runs, is reachable and not busy{self._hint}"
            elif "WRONGPASS" in text or "NOAUTH" in text or "AuthenticationFailed" in text:
                reason = "refuses the login: set LMCACHE_VALKEY_PASSWORD, or LMCACHE_VALKEY_USERNAME too"
            elif "NOPERM" in text or "PermissionDenied" in text:
                needed = "INFO, STRLEN, GET, SET, UNLINK, SCAN, and CLUSTER in a cluster"
                reason = f"forbids this user what a tier needs ({needed}): {text:.200}"
            elif "ReadOnly" in text or "No primary" in text:
                reason = "is a replica, which takes no records: add the address of its primary"
            else:
                reason = f"failed: {text:.300}"
            raise TierError(f"{self._where} {reason}") from error


def _key(name: str) -> str:
    return PREFIX + checked_name(name)
