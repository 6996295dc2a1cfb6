"""What `lmcache status` says of pins."""

from typing import Any

from lmcache_server.commands.control import json_object
from lmcache_server.host.units import size

REPORT = {"pins": list[json_object("name", "chunks bytes")]}  # type: ignore[misc]


def lines(report: dict[str, Any]) -> list[str]:
    return [
        f"pinned as {pin['name']!r}: {pin['chunks']} chunks, {size(pin['bytes'])}" for pin in report["pins"]
    ]
