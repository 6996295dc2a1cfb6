"""Compares vLLM with surface.json, which lists everything that the connector uses from it.

vLLM's connector interface is not stable, and its surroundings are not public. An engine calls `missing()` at
startup and runs uncached if a name is gone; a test calls it for every supported version. Names that the
connector imports from vLLM are not repeated there, because a failed import has the same effect.
"""

import inspect
import json
import pkgutil
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any


def used() -> dict[str, list[str]]:
    """For each class or function, as `module:name`, what the connector uses of it: names, and their arguments
    where vLLM passes or receives any."""
    table: dict[str, list[str]] = json.loads(Path(__file__).with_name("surface.json").read_text())
    return table


def missing() -> list[str]:
    """What this vLLM lacks, as `Class.name(arguments)`."""
    return [
        f"{place.partition(':')[2]}{'' if name.startswith('(') else '.'}{name}"
        for place, names in used().items()
        for name in names
        if not _has(_owner(place), name)
    ]


def caller(attribute: str) -> Any:
    """The nearest object on the stack, as `self`, that has this attribute; None if there is none. It knows
    what vLLM does not tell its connectors."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if inspect.getattr_static(found, attribute, None) is not None:
            return found
        frame = frame.f_back
    return None


def _owner(place: str) -> Any:
    try:
        return pkgutil.resolve_name(place)
    except (ImportError, AttributeError):
        return object


def _has(owner: Any, used: str) -> bool:
    name, is_function, arguments = used.rstrip(")").partition("(")
    function = owner
    if name:
        try:
            function = inspect.getattr_static(owner, name)
        except AttributeError:
            return name in _fields(owner)
    if not is_function:
        return True
    function = getattr(function, "__func__", function)  # of a class method
    actual = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    expected = re.findall(r"\w+", arguments)
    return actual[: len(expected)] == expected


def _fields(owner: Any) -> set[str]:
    """The attributes that only instances have: annotated fields and names that `__init__` assigns."""
    names: set[str] = set()
    for ancestor in owner.__mro__:
        names.update(vars(ancestor).get("__annotations__", ()))
        code = getattr(vars(ancestor).get("__init__"), "__code__", None)
        names.update(code.co_names if code is not None else ())
    return names
