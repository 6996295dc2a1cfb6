"""A record of all lookups, for `lmcache plan --from`: numbers and shortened digests, but no text."""

import errno
import fcntl
import logging
import mmap
import os
import re
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lmcache_server.errors import CommandError, StartError

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
"""A file of this size is renamed to FILE.1, which takes the place of an earlier one."""
KEY_BYTES = 8
"""The bytes of a key that are recorded."""
EventKind = Literal["lookup", "end"]
_EVENT = re.compile(rb'\[[0-9.e+]+,"(lookup|end)",')
"""How the line of an event begins."""

_Number = Annotated[int, Meta(ge=0, lt=1 << 40)]
_Positive = Annotated[int, Meta(gt=0, lt=1 << 40)]


class Event(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A lookup, or the end of a request. One line of the record: a JSON list of these fields.

    `sparse` says that the model has windows or states, too, and `states` that it has states. `keys` has 16
    hex digits of each key.
    """

    time_s: Annotated[float, Meta(ge=0, lt=1 << 40)]
    kind: EventKind
    namespace: str
    chunk_size: _Positive
    chunk_frames: _Positive
    sparse: bool
    states: bool
    computed_tokens: _Number
    limit_tokens: _Number
    keys: Annotated[str, Meta(pattern="^([0-9a-f]{16})*$")]

    def names(self) -> tuple[bytes, ...]:
        """The shortened keys."""
        digits = bytes.fromhex(self.keys)
        return tuple(digits[start : start + KEY_BYTES] for start in range(0, len(digits), KEY_BYTES))


def shortened(keys: tuple[bytes, ...]) -> str:
    """The keys as an Event has them."""
    return "".join(key[:KEY_BYTES].hex() for key in keys)


class Recorder:
    """Appends events to a file, which only its owner can read. Raises StartError if it cannot be opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ended = False
        try:
            self._open()
        except OSError as error:
            raise StartError(f"cannot use --record {path}: {error.strerror}; name another file") from error

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "ab", buffering=1 << 16)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "another server records there") from None
        if os.fstat(descriptor).st_size:
            with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
                if not _EVENT.match(content):
                    raise OSError(errno.EEXIST, "it is no record of a server")
                whole_bytes = content.rfind(b"\n") + 1
            os.ftruncate(descriptor, whole_bytes)  # a full disk may have left a part of a line
        self._size = self._file.tell()

    def add(self, event: Event) -> None:
        self._write(msgspec.json.encode(event) + b"\n")

    def flush(self) -> None:
        """Makes what was added visible to readers of the file."""
        self._write(b"", flush=True)

    def _write(self, line: bytes, flush: bool = False) -> None:
        """A file that cannot be written ends the record, with one line in the log."""
        if self._ended:
            return
        try:
            self._size += self._file.write(line)
            if flush:
                self._file.flush()
            if self._size >= MAX_BYTES:
                self._file.close()
                os.replace(self._path, f"{self._path}.1")
                self._open()
        except OSError as error:
            self._ended = True
            logger.warning("recording to %(path)s ended: %(reason)s", {"path": self._path, "reason": error})


def read(path: str) -> Iterator[Event]:
    """The events of a record. Raises CommandError if the file cannot be read or is no record."""
    decoder, lines = msgspec.json.Decoder(Event), 0
    try:
        with open(path, "rb") as file:
            for line in file:
                lines += 1
                yield decoder.decode(line)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise CommandError(f"line {lines} of {path} is no event of a record: {error}") from error
