"""Names everything in vLLM's configuration that can change a byte of a page.

account.json has each field of vLLM's configuration and each variable that vLLM reads. It says which of them
are in the name, and of each other one why it cannot change a byte. A field that is not there, because vLLM is
newer, is in the name.
"""

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic.fields import FieldInfo

MAX_TEXT = 1024
"""Of a longer value, the digest is in the name."""
VARIABLES = "environment variables"
OF_FILE = "named by the content of the file"
PLAIN = (str, bytes, int, float, type(None), torch.dtype)


@cache
def account() -> dict[str, dict[str, Any]]:
    """Of each class: its `parts`, which are configurations themselves, the fields that are `named`, those
    `named by the content of the file`, and for each reason those that are `not named, because` of it."""
    table: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("account.json").read_text())
    return table


def unnamed(kind: str) -> frozenset[str]:
    reasons = account().get(kind, {}).get("not named, because", {})
    return frozenset(name for names in reasons.values() for name in names)


def named(config: Any, own: str, at: str = "") -> Iterator[tuple[str, str]]:
    """(place, text) of each named field that differs from vLLM's default; `own` stands for a value of which
    nobody can tell whether another process has the same."""
    kind = next((each.__name__ for each in type(config).__mro__ if each.__name__ in account()), "")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in unnamed(kind):
            continue
        if field.name in account().get(kind, {}).get("parts", ()):
            if value is not None:
                yield from named(value, own, f"{at}{field.name}.")
        elif value != (default := _default(field)) or type(value) is not type(default):
            yield at + field.name, _said(kind, field.name, value, own)


def variables(known: Iterable[str], own: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each named variable that is set; `known` are those that vLLM reads."""
    for name in sorted(known):
        if name in os.environ and name not in unnamed(VARIABLES):
            yield name, _said(VARIABLES, name, os.environ[name], own)


def content(path: str, own: str) -> str:
    """The digest of a file."""
    try:
        return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()
    except OSError:
        return own


def text(value: Any, own: str) -> str:
    """The same for equal values in all processes, and another for others; or `own`."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = ", ".join(f"{name}={said}" for name, said in named(value, own))
        return f"{type(value).__name__}({fields})"
    if isinstance(value, dict):
        pairs = sorted(f"{text(key, own)}: {text(each, own)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(text(each, own) for each in value))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(text(each, own) for each in value)}]"
    return own


def _said(kind: str, name: str, value: Any, own: str) -> str:
    if name in account().get(kind, {}).get(OF_FILE, ()):
        return content(value, own) if value else ""
    said = text(value, own)
    return said if len(said) <= MAX_TEXT else f"sha256 {hashlib.sha256(said.encode()).hexdigest()}"


def _default(field: "dataclasses.Field[Any]") -> Any:
    default = field.default
    if isinstance(default, FieldInfo):  # vLLM's configurations are dataclasses of pydantic
        return default.get_default(call_default_factory=True)
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return default
