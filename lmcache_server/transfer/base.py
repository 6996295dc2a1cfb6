"""What the hands agree on: a mapping is one worker's memory, a job is one copy, an outcome is how it went."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lmcache_server.transfer.plan import Pieces


class CopyError(Exception):
    """A copy that did not happen, or only in part; the message says why."""


class NoAccessError(CopyError):
    """The server may not read and write the worker's memory; the message says what to change."""


class Outcome(NamedTuple):
    """How a copy ended: `error` is None when every byte was copied; `num_bytes` were copied in any case."""

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
        """Whether bytes go to the engine."""

    def build(self) -> Pieces:
        """The pieces to copy."""

    def after(self) -> None:
        """What follows when every byte was copied."""


class Mapping(Protocol):
    """A worker's memory, for the one thread that copies it."""

    @property
    def bases(self) -> Sequence[int]:
        """Where its buffers are for a copy, once it is open."""

    @property
    def lost(self) -> bool:
        """No copy will ever succeed any more."""

    def open(self) -> list[bytes]:
        """Make it accessible; returns the bytes where the nonce should be. Raises CopyError."""

    def copy(self, pieces: Pieces, *, load: bool) -> None:
        """Copy, or only begin to. Raises CopyError."""

    def finish(self, *, load: bool) -> None:
        """Return when everything that was begun in this direction has ended. Raises CopyError."""

    def close(self) -> None:
        """Give back what `open` took. Never raises."""
