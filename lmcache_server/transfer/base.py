"""The types that copies share: a mapping is one worker's memory, a job is one copy, an outcome its result."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lmcache_server.transfer.plan import Pieces


class CopyError(Exception):
    """A copy failed, and may have been made in part; the message says why."""


class NoAccessError(CopyError):
    """The server may not read and write the worker's memory; the message says what to change."""


class Outcome(NamedTuple):
    """How a copy ended: `error` is None if every byte was copied; `num_bytes` is how many were at least."""

    error: Exception | None
    num_bytes: int


class Opened(NamedTuple):
    """How opening a worker's memory ended: an error, or the bytes at each place where the nonce should be."""

    error: Exception | None
    nonces: list[bytes]


class CopyJob(Protocol):
    """A load (L1 to engine) or a store (engine to L1). Both methods run in the copy thread and may raise."""

    @property
    def load(self) -> bool:
        """True for a load, False for a store."""

    def build(self) -> Pieces:
        """Returns the pieces to copy."""

    def after(self) -> None:
        """Called when every byte has been copied."""


class Mapping(Protocol):
    """A worker's memory, used by the one thread that copies it."""

    @property
    def bases(self) -> Sequence[int]:
        """The addresses of its buffers for a copy, once it is open."""

    @property
    def lost(self) -> bool:
        """Whether no copy can succeed any more."""

    def open(self) -> list[bytes]:
        """Makes the memory accessible; returns the bytes at each place where the nonce should be. Raises
        CopyError."""

    def copy(self, pieces: Pieces, *, load: bool) -> None:
        """Copies the pieces, or only starts to. Raises CopyError."""

    def finish(self, *, load: bool) -> None:
        """Waits until every copy in this direction has ended. Raises CopyError."""

    def close(self) -> None:
        """Gives back what `open` took. Never raises."""
