"""The types that copies share: a mapping is one worker's memory, a job is one copy, an outcome its result."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from lmcache_server.transfer.plan import Pieces


class CopyError(Exception):
    """A copy failed, and may have been made in part; the message says why."""


class NoAccessError(CopyError):
    """The server may not read and write the worker's memory; the message says what to change."""


class HandleError(NoAccessError):
    """CUDA does not open the worker's handle. What to change depends on the worker's process."""


class Outcome(NamedTuple):
    """How a copy ended: `error` is None if every byte was copied; `num_bytes` is how many were at least."""

    error: Exception | None
    num_bytes: int


class Opened(NamedTuple):
    """How opening a worker's memory ended: an error, or the bytes at each place where the nonce should be."""

    error: Exception | None
    nonces: list[bytes]


class Mapping(Protocol):
    """A worker's memory. It is used by one thread for each of its lanes, which are sets of directions: True
    stands for loads, False for stores. In a lane of one direction, copies go on when `copy` has returned."""

    @property
    def lanes(self) -> Sequence[Sequence[bool]]: ...

    @property
    def bases(self) -> Sequence[int]:
        """The addresses of its buffers for a copy, once it is open."""

    @property
    def lost(self) -> bool:
        """Whether no copy can succeed any more."""

    @property
    def may_pin(self) -> bool:
        """Whether copies may first have to pin memory, which takes long."""

    def open(self) -> list[bytes]:
        """Makes the memory accessible; returns the bytes at each place where the nonce should be. Raises
        CopyError."""

    def copies(self, whole: Pieces, *, load: bool) -> Iterable[tuple[int, Callable[[], object]]]:
        """What copies a job, slice by slice: the bytes of each slice, and a function that copies it, or only
        begins to. Both raise CopyError."""

    def begun(self, *, load: bool) -> Callable[[], object]:
        """Returns a function that waits until the copies begun so far in this direction have ended. It raises
        CopyError."""

    def close(self) -> None:
        """Gives back what `open` took. Never raises."""
