"""Frames that a session or a tier is writing; `reserve` of cache.py gives them out, or says why not."""

import enum
from dataclasses import dataclass

from lmcache_server.core.index import Chunk
from lmcache_server.core.pool import Runs


class NotReserved(enum.Enum):
    """Why an object is not stored; the values are labels of lmcache_objects_total."""

    PRESENT = "present"
    BUSY = "busy"
    NO_ROOM = "no_room"
    ONCE = "once"
    """The prompt will not come back, and storing it would evict chunks that may be asked for again."""
    QUOTA = "quota"
    """Its tenant is at its quota, and has too little that can be evicted."""


@dataclass(frozen=True, eq=False)
class Reservation:
    """Frames into which one session writes `num_bytes` of payload. It ends with a commit or an abort."""

    chunk: Chunk
    bit: int
    runs: Runs
    num_blocks: int
    num_bytes: int
    parent: bytes
