"""A tier in an object store (S3, Azure Blob Storage, Google Cloud Storage) by obstore: an object a record."""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from lmcache_server.options.tiers.base import CREDENTIALS, TierError, checked_name
from lmcache_server.options.tiers.pieces import first, fits, spread

CONNECT_S, SILENCE_S, ATTEMPT_S = 1.0, 2.0, 10.0
"""An attempt fails without a connection after CONNECT_S, without a byte for SILENCE_S, and after ATTEMPT_S in
any case. There are two attempts."""
ABSENT_S, MAX_ABSENT = 10.0, 1 << 16
"""How long, and for how many names, the server remembers that there was no record."""
FEW = 32
"""So many names are each asked for."""
PROBES = 8
"""Requests that ask for presence at the same time."""
_STORES = {"s3": S3Store, "az": AzureStore, "gs": GCSStore}
_DELETED_AT_ONCE = 1000


class Objects:
    """Keeps records below `prefix` in a bucket (for `az`, a container). `scheme` is s3, az or gs.

    Credentials, and with them an Azure account, come from the environment variables that obstore reads.
    The store expires records, by a lifecycle rule of the bucket. Payloads are not signed: TLS protects them,
    and without TLS nothing would. Nothing is asked at the start. Google's is untested.

    Presence: more than FEW names are taken for a chain, in which a record is there only if those before it
    are. So only some 20 of 512 are asked for. Of a set that is no chain the answer may then be too small.
    """

    def __init__(
        self, scheme: str, bucket: str, prefix: str = "", *, allow_http: bool = False, **options: Any
    ) -> None:
        """`options` are obstore's own: endpoint and region."""
        self._scheme, self._where = scheme, f"{scheme}://{bucket}"
        # A clear must not reach what others keep in the bucket.
        self._prefix = f"{prefix.strip('/')}/lmcache-mp/".lstrip("/")
        self._absent: OrderedDict[str, float] = OrderedDict()
        """Names, and until when they count as absent; the oldest first."""
        self._lock = threading.Lock()
        if scheme == "s3":
            options |= {"unsigned_payload": True, "virtual_hosted_style_request": False}
        client = {
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "read_timeout": timedelta(seconds=SILENCE_S),
            "timeout": timedelta(seconds=ATTEMPT_S),
            "allow_http": allow_http,
        }
        retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=ATTEMPT_S)}
        with self._explained():
            self._store = _STORES[scheme](bucket, client_options=client, retry_config=retries, **options)
        self._probers = ThreadPoolExecutor(PROBES, "tier-probe")

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        now_s = time.monotonic()
        with self._lock:
            absent = [number for number, name in enumerate(names) if self._absent.get(name, 0.0) > now_s]
        if len(names) <= FEW:
            some = [name for number, name in enumerate(names) if number not in absent]
            answers = self._probers.map(self._is_there, some)
            there = {name for name, found in zip(some, answers, strict=True) if found}
            return [name in there for name in names]
        high = min(absent, default=len(names))
        # Everything before `low` is there, nothing from `high` on. Most chains have not even their first.
        low, asked = 0, [0]
        while low < high:
            found = list(self._probers.map(self._is_there, [names[number] for number in asked]))
            high = next((number for number, there in zip(asked, found, strict=True) if not there), high)
            low = max((number + 1 for number in asked if number < high), default=low)
            asked = sorted({low + (high - low) * part // PROBES for part in range(PROBES)})
        return [True] * low + [False] * (len(names) - low)

    def read(self, name: str, pieces: Sequence[memoryview]) -> int:
        path = self._path(name)
        with self._explained():
            try:
                found = obstore.get(self._store, path)
                num_bytes = int(found.meta["size"])
                if not fits(num_bytes, pieces):
                    # Maybe another host answered: delete nothing. The next store replaces the record.
                    self._remember_absent(name)
                    return 0
                content = memoryview(found.bytes())
            except FileNotFoundError:
                self._remember_absent(name)
                return 0
        if content.nbytes != num_bytes:
            return 0
        spread(content, first(pieces, num_bytes))
        return num_bytes

    def write(self, name: str, pieces: Sequence[memoryview]) -> bool:
        path = self._path(name)
        # In one request: the parts of an unfinished upload would cost money for ever.
        with self._explained():
            obstore.put(self._store, path, iter(pieces), use_multipart=False)
        with self._lock:
            self._absent.pop(name, None)
        return True

    def remove(self, names: Sequence[str]) -> None:
        self._delete([self._path(name) for name in names])

    def clear(self, prefix: str) -> None:
        folder, beginning = self._path(f"{prefix}f").rpartition("/")[0], self._path(f"{prefix}f")[:-1]
        with self._explained():
            for found in obstore.list(self._store, folder or None, chunk_size=_DELETED_AT_ONCE):
                self._delete([entry["path"] for entry in found if entry["path"].startswith(beginning)])

    def close(self) -> None:
        self._probers.shutdown()

    def _delete(self, paths: list[str]) -> None:
        for start in range(0, len(paths), _DELETED_AT_ONCE):
            with self._explained(), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, paths[start : start + _DELETED_AT_ONCE])

    def _is_there(self, name: str) -> bool:
        with self._explained():
            try:
                obstore.head(self._store, self._path(name))
            except FileNotFoundError:
                self._remember_absent(name)
                return False
        return True

    def _remember_absent(self, name: str) -> None:
        with self._lock:
            self._absent[name] = time.monotonic() + ABSENT_S
            self._absent.move_to_end(name)
            if len(self._absent) > MAX_ABSENT:
                self._absent.popitem(last=False)

    def _path(self, name: str) -> str:
        """Stores do not take every path: its parts must be neither empty nor dots."""
        parts = checked_name(name).split("/")
        return self._prefix + "/".join(part if part.strip(".") else f"~{part}" for part in parts)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the store become a TierError that says what to do."""
        try:
            yield
        except (exceptions.BaseError, OSError, ValueError) as error:
            text = " ".join(str(error).partition("Debug source")[0].split())
            if isinstance(error, FileNotFoundError) or "NoSuchBucket" in text:
                reason = "does not exist: create it"
            elif isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
                reason = f"refuses the credentials: set {' and '.join(CREDENTIALS[self._scheme])}"
            elif "kind: Connect," in str(error):
                reason = "cannot be reached: see whether it runs, and check endpoint="
            elif "kind: Timeout," in str(error):
                reason = "gave no answer in time: see whether it is overloaded or hangs"
            else:
                reason = f"failed: {text:.300}"
            raise TierError(f"{self._where} {reason}") from error
