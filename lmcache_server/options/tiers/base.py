"""What every tier can do: keep records by name. Adapters block; the worker that calls them has threads."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "valkey": ("LMCACHE_VALKEY_USERNAME", "LMCACHE_VALKEY_PASSWORD"),
}
"""The environment variables with the name and the password, for each kind of store that needs them."""
_NAME = re.compile(r"[0-9a-f/_.-]{1,200}")


class TierError(Exception):
    """A call failed: no connection, a timeout, a full disk. The text says what a user can do."""


class Tier(Protocol):
    """A store of records by name. Every method blocks and may be called from several threads at once. Only
    TierError may be raised.

    A record is written and read in pieces: runs of page-aligned memory, each a multiple of 4 KiB, in order.
    A name is at most 200 characters of [0-9a-f/_.-].
    """

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        """Which records may be there. A hint: they may be gone when they are read."""

    def read(self, name: str, pieces: Sequence[memoryview]) -> int:
        """Fill the pieces with a record, from their start on. Its bytes; 0 if there is none, or none that
        fits, and what the pieces contain is then undefined."""

    def write(self, name: str, pieces: Sequence[memoryview]) -> bool:
        """Keep a record whole or not at all. False if the tier has no room for it."""

    def remove(self, names: Sequence[str]) -> None:
        """Forget records; unknown names are ignored."""

    def clear(self, prefix: str) -> None:
        """Forget all records whose names begin so."""

    def close(self) -> None:
        """Release everything. No other call runs or follows."""


class Usage(NamedTuple):
    """What a tier holds, of at most `capacity_bytes`; how many records it evicted since its start; and the
    time since the last use of the one that goes next."""

    used_bytes: int
    capacity_bytes: int
    records: int
    evicted_records: int
    oldest_age_seconds: int


def is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name))


def checked_name(name: str) -> str:
    """The name. Raises TierError if it is none: nothing else becomes a part of a path or a command."""
    if not is_name(name):
        raise TierError(f"{name!r:.250} cannot name a record")
    return name
