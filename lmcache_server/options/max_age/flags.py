"""What this option adds to the flags of `lmcache server`."""

from collections.abc import Mapping
from typing import Any

from lmcache_server.core.limits import Limits, positive
from lmcache_server.errors import StartError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
AN_AGE = "an age with its unit (s, m, h or d), such as 7d, or 7d,some/model=24h"
FLAGS = {
    "max_age": {
        "metavar": "AGES",
        "help_text": "Forget a chunk when it is this old, even if it is used or pinned: 7d, 24h, 90m or 45s. "
        "With 7d,some/model=24h, that model has another limit; instead of its name you may give the first "
        "digits (8 or more) of a namespace. Cannot be combined with --tier.",
    }
}


def ages_s(text: str) -> Limits:
    """How long chunks may be kept, by model and namespace: `7d, some/model=24h`. Raises ValueError."""

    def seconds(age: str) -> float:
        if (unit := age[-1:]) not in UNITS:
            raise ValueError("an age has a unit")
        return positive(age[:-1]) * UNITS[unit]

    return Limits.parse(text, seconds)


def check(values: Mapping[str, Any]) -> None:
    """Raises StartError if the value of the flag is none."""
    try:
        ages_s(values["max_age"])
    except ValueError:
        raise StartError(f"--max-age must be {AN_AGE}, not {values['max_age']!r}") from None
