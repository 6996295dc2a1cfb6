"""Limits that users write as text: one for all, and others for what they name."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_CHARS = 12
NAME_DIGITS = 8
"""A shorter name cannot be the beginning of a digest's digits."""


@dataclass(frozen=True)
class Limits:
    """One limit for all, inf if there is none, and others for named ones."""

    default: float = math.inf
    named: dict[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, read: Callable[[str], float]) -> "Limits":
        """Reads a text such as `7` or `7, name=3`. Raises ValueError."""
        limits = [part.rpartition("=") for part in text.split(",")] if text else []
        named = {name.strip(): read(limit.strip()) for name, _, limit in limits}
        if len(named) < len(limits):
            raise ValueError("a name has one limit")
        return cls(named.pop("", math.inf), named)

    def of(self, digest: bytes, name: str | None = "") -> float:
        """The smallest limit whose name is `name` or the first digits of `digest`, else the one for all. If
        nobody knows the name (None), the smallest of all limits."""
        if name is None:
            return min([*self.named.values(), self.default])
        digits = digest.hex()
        own = [
            limit
            for key, limit in self.named.items()
            if key == name or (len(key) >= NAME_DIGITS and digits.startswith(key.lower()))
        ]
        return min(own, default=self.default)


def is_tenant(name: str) -> bool:
    """Whether a text can name tenants: the first digits of what `tenant_id` returns."""
    return len(name) >= NAME_DIGITS and not name.lower().strip("0123456789abcdef")


def positive(text: str) -> float:
    """A number above 0. Raises ValueError."""
    is_number = text.isascii() and text.replace(".", "", 1).isdecimal() and len(text) <= MAX_CHARS
    if not is_number or not (number := float(text)):
        raise ValueError("a limit is a number above 0")
    return number
