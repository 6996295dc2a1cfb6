"""Stands in for vLLM and what comes with it, where they are not installed: the connector's worker side can
be tested there.

It has the modules and names that the connector imports, which it reads from the connector's own source, and
what surface.json says that the connector uses of them. A class has no behaviour and a function cannot be
called, except for the few below that the worker side runs through.
"""

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import itertools
import logging
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.paths import ROOT

from lmcache_client.connector import vllm_surface
from lmcache_client.contract.version import NEWEST_VLLM

PACKAGES = ("vllm", "huggingface_hub", "pydantic")
SOURCES = ROOT / "lmcache_client"
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class KVConnectorBase_V1:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def _get_connector_metadata(self) -> Any:
        return self._connector_metadata


@dataclass
class KVConnectorTransferResults:
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


BEHAVIOUR: dict[str, Any] = {
    f"{V1}.base:KVConnectorBase_V1": KVConnectorBase_V1,
    f"{V1}.base:KVConnectorTransferResults": KVConnectorTransferResults,
    f"{V1}.metrics:KVConnectorStats": KVConnectorStats,
    "vllm.logger:init_logger": logging.getLogger,
    "vllm:__version__": ".".join(map(str, (*NEWEST_VLLM, 0))),
}


def used(sources: Path = SOURCES) -> dict[str, set[str]]:
    """What the files there use of these packages: for each `module:name`, what they use of it."""
    table: dict[str, set[str]] = {place: {*names} for place, names in vllm_surface.used().items()}
    for path in sources.rglob("*.py"):
        places, nodes = {}, [*ast.walk(ast.parse(path.read_text()))]
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                places.update({each.asname or each.name: f"{node.module}:{each.name}" for each in node.names})
        for place in places.values():
            table.setdefault(place, set())
        for node in nodes:
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in places
            ):
                table[places[node.value.id]].add(node.attr)
    modules = {place.partition(":")[0] for place in table}
    for place in [each for each in table if each.replace(":", ".") in modules]:
        for name in table.pop(place):
            table.setdefault(f"{place.replace(':', '.')}:{name}", set())
    return table


def _uncallable(place: str, arguments: str) -> Any:
    def function(*_args: Any, **_named: Any) -> Any:
        raise NotImplementedError(f"{place} is not installed")

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(each, kind) for each in arguments.split(", ") if each]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def _made(place: str, members: set[str]) -> Any:
    """What stands for `module:name`, with what is used of it."""
    name = place.partition(":")[2]
    if name[0].islower() and (not members or min(members).startswith("(")):
        made: Any = _uncallable(place, "".join(members).strip("()"))
    else:
        made = type(name, (), {})
    made = BEHAVIOUR.get(place, made)
    for each in members if isinstance(made, type) else ():
        member, calls, arguments = each.rstrip(")").partition("(")
        if calls and member not in vars(made):
            setattr(made, member, _uncallable(f"{place}.{member}", arguments))
        elif not calls and not hasattr(made, member):
            setattr(made, member, None)
    return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str] = PACKAGES) -> None:
        self.modules: dict[str, dict[str, Any]] = {}
        for place, members in used().items():
            module, _, name = place.partition(":")
            if module.split(".")[0] not in packages:
                continue
            for parent in itertools.accumulate(module.split("."), "{}.{}".format):
                self.modules.setdefault(parent, {})
            self.modules[module][name] = _made(place, members)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        known = fullname in self.modules
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self.modules[module.__name__])


def install() -> None:
    sys.meta_path.append(Finder([each for each in PACKAGES if importlib.util.find_spec(each) is None]))
