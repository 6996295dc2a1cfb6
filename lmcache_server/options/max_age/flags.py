"""What this option adds to the flags of `lmcache server`."""

from lmcache_server.core.named_limits import Limits, positive

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def ages_s(text: str) -> Limits:
    """How long chunks may be kept, by model and namespace: `7d, some/model=24h`. Raises ValueError."""

    def seconds(age: str) -> float:
        if (unit := age[-1:]) not in UNITS:
            raise ValueError("an age has a unit")
        return positive(age[:-1]) * UNITS[unit]

    return Limits.parse(text, seconds)


FLAGS = {
    "max_age": {
        "parse": ages_s,
        "fit": "an age with its unit (s, m, h or d), such as 7d, or 7d,some/model=24h",
        "metavar": "AGES",
        "help_text": "Forget a chunk when it is this old, even if it is used or pinned: 7d, 24h, 90m or 45s. "
        "With 7d,some/model=24h, that model has another limit; instead of its name you may give the first "
        "digits (8 or more) of a namespace. Cannot be combined with --tier.",
    }
}
