"""The table of options: parts of the server that can be taken away, each a folder here and a line below.

The base reads the table and imports no option. The folder of an option may have these modules:

* server: `Server`, which meets the base at the seams of service/option.py; `backing`, what L1 lies in, made
  from the values of all flags and the bytes of L1.
* flags: `FLAGS`, further flags of `lmcache server`, whose values are text. A flag may have `parse`, which
  raises for a wrong text, and `fit`, what errors call a right one. `OF_DOCTOR`, those that `lmcache doctor`
  has; `VARIABLES`, which it reads itself; `check`, `shares_l1`, `backs_l1`, which get all values.
* command: `COMMANDS`, more commands of `lmcache`.
* text: `REPORT`, the types of its fields in /status, and `lines`, what `lmcache status` says of them.
* doctor: `checks`, made from the values of the flags, and from those of the running server.
"""

import importlib.util
from typing import Any

NAMES: tuple[str, ...] = (
    "kv_events",
    "max_age",
    "miss_reasons",
    "pins",
    "planner",
    "quotas",
    "retention",
    "tiers",
    "warm_restart",
)  # fmt: skip


def parts(module: str, name: str) -> list[Any]:
    """What each option calls `name` in this module, of those that have it."""
    paths = (f"{__name__}.{option}.{module}" for option in NAMES)
    found = [importlib.import_module(path) for path in paths if importlib.util.find_spec(path)]
    return [getattr(each, name) for each in found if hasattr(each, name)]
