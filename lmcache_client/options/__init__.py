"""The table of options: parts of the connector that can be taken away. Each has a file here and a line below.

The base loads options through this table only. Each file has `OPTION`, a class of connector/option.py. An
option that has a part in the server, too, has the same name there (lmcache_server/options).
"""

import importlib
from typing import Any

NAMES: tuple[str, ...] = (
    "kv_events",
    "handover",
    "hints",
    "retention",
    "spans",
)  # fmt: skip


def classes() -> dict[str, Any]:
    """The class of each option, by its name."""
    paths = {name: f"{__name__}.{name}" for name in NAMES}
    return {name: importlib.import_module(path).OPTION for name, path in paths.items()}
