"""What takes bytes, and decisions taken from bytes, so that whoever makes the bytes decides."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lmcache_client.contract import codec

NUMBERS = (
    0, 1, 2, 15, 16, 17, 39, 40, 255, 256, 257, 512, 768, (1 << 16) - 1, 1 << 16, 1 << 22, (1 << 31) - 1,
    1 << 31, (1 << 32) - 1, 1 << 32, 1 << 53, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, -1,
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 1.5, "", "full", "e0", "x" * 300, b"", bytes(16), bytes(32), [], [[]],
)  # fmt: skip


class Target:
    """Takes what anybody may have made. `run` raises when something breaks; `outcomes` counts what came of
    the inputs, and `seeds` are those to start from."""

    seeds: Sequence[bytes]

    def __init__(self) -> None:
        self.inputs = 0
        self.outcomes: Counter[str] = Counter()

    def run(self, data: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


class Choices:
    """Bytes that are used up; then every choice is the first."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def left(self) -> bool:
        return self._position < len(self._data)

    def below(self, count: int) -> int:
        """A number from 0 to count - 1, at most 255."""
        if not self.left:
            return 0
        self._position += 1
        return self._data[self._position - 1] % count

    def take(self, count: int) -> bytes:
        self._position += count
        return self._data[self._position - count : self._position]

    def rest(self) -> bytes:
        return self.take(max(0, len(self._data) - self._position))


def bend(fields: Any, choices: Choices, times: int = 1) -> None:
    """In `fields` (lists, and plain values in them), replaces one value somewhere, so many times."""
    for _ in range(times):
        where = fields
        while isinstance(where, list) and where:
            index = choices.below(len(where))
            if not isinstance(where[index], list) or not choices.below(4):
                where[index] = _other(where[index], choices)
                break
            where = where[index]


def frame_of(fields: Any, choices: Choices, *, flip: bool = False, cut: bool = False) -> bytes:
    """The fields as they go over the wire, with a byte changed, or cut; nothing if they cannot go."""
    try:
        frame = codec.pack(fields)
    except (OverflowError, ValueError, TypeError):
        return b""
    at = choices.below(256) % len(frame) if flip or cut else len(frame)
    return frame[:at] + (choices.take(1) + frame[at + 1 :] if flip else b"")


def _other(value: Any, choices: Choices) -> Any:
    if isinstance(value, list) and choices.below(4):
        return (value[1:], value * 2, value[:1] * 300, [*value, *value[:1]], value[::-1])[choices.below(5)]
    if isinstance(value, int) and choices.below(4):
        near = (value + 1, max(value - 1, 0), value * 2)
        return near[choices.below(3)] if choices.below(2) else NUMBERS[choices.below(len(NUMBERS))]
    if isinstance(value, bytes) and choices.below(4):
        return (value[1:], value + b"x", bytes(len(value)), choices.take(len(value)))[choices.below(4)]
    return (ODD + NUMBERS)[choices.below(len(ODD) + len(NUMBERS))]
