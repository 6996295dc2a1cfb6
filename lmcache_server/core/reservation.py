"""Frames that are being written."""

import enum
from dataclasses import dataclass

from lmcache_server.core.index import Chunk
from lmcache_server.core.pool import Runs


class NotReserved(enum.Enum):
    """Why an object is not to be stored."""

    PRESENT = "present"
    BUSY = "busy"
    NO_ROOM = "no room"


@dataclass(frozen=True, eq=False)
class Reservation:
    """Frames that one session is writing `num_bytes` of payload to; ends with commit or abort."""

    chunk: Chunk
    bit: int
    runs: Runs
    num_blocks: int
    num_bytes: int
    parent: bytes
