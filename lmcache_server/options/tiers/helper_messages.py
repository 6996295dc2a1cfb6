"""What the server and a helper process say to each other, over a socket that keeps messages apart."""

from typing import Literal, NamedTuple

import msgspec

Call = Literal["share", "present", "read", "write", "remove", "clear"]
L1 = 0
"""The number of the area that all channels share. The others are 1 + the number of a channel."""
MAX_BYTES = 160 << 10
"""Of a message: below what a socket takes by default."""
MAX_NAMES = 512
"""Of a message; each has some 200 bytes at most."""


class Part(NamedTuple):
    """Bytes of a record: `num_bytes` at `offset` of an area."""

    area: int
    offset: int
    num_bytes: int


class Request(msgspec.Struct, array_like=True):
    """With `share` comes the descriptor of a file. Its `parts` is where the area lies in the file."""

    call: Call
    names: list[str] = []
    parts: list[Part] = []


class Reply(msgspec.Struct, array_like=True):
    """What the call found or whether it could, or why it failed."""

    found: list[bool] = []
    error: str = ""
