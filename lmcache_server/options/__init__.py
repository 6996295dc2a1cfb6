"""The table of options: parts of the server that can be taken away, each a folder here and a line below.

The base reads the table and imports no option. The folder of an option may have three modules. `server` has
`Server`, which meets the base at the seams of service/option.py; `flags` has `FLAGS`, further options of
`lmcache server`; `command` has `COMMAND`, one more command of `lmcache`.
"""

import importlib
import importlib.util
from typing import Any

NAMES: tuple[str, ...] = (
    "planner",
)  # fmt: skip


def parts(module: str, name: str) -> list[Any]:
    """What each option calls `name` in this module, of those that have the module."""
    paths = (f"{__name__}.{option}.{module}" for option in NAMES)
    return [getattr(importlib.import_module(path), name) for path in paths if importlib.util.find_spec(path)]
