"""What became of the flags, keys, variables and commands of LMCache 0.5.6: the one table for all errors.

`lmcache_names.json` has rows of names, of what they are here, and of the reason. docs/lmcache-names.md shows
the same rows.
"""

from pathlib import Path

MISSING = "missing"
NOT_NEEDED = "not needed"
NO_EFFECT = "no effect"
SAME = "the same"
PAGE = "docs/coming-from-lmcache.md"


def table(kind: str) -> list[tuple[list[str], str, str]]:
    """The rows of "flags", "keys", "variables" or "commands": names, what they are here, and why."""
    import json  # only for a name that is not this project's

    rows = json.loads(Path(__file__).with_name("lmcache_names.json").read_text())[kind]
    return [([names] if kind == "commands" else names.split(), here, why) for names, here, why in rows]


def row(kind: str, name: str) -> tuple[str, str]:
    """What `name` is here, and why; SAME for a name that LMCache does not have."""
    return next(((here, why) for names, here, why in table(kind) if name in names), (SAME, ""))


def advice(kind: str, name: str) -> str:
    """What a user of LMCache should do about `name`; empty for a name that LMCache does not have, and for one
    that means the same here."""
    here, why = row(kind, name)
    if here == SAME:
        return ""
    theirs = f"LMCache's command '{name}'" if kind == "commands" else f"LMCache's {name}"
    reason = f" ({why.replace('`', '')})" if why else ""
    if here == MISSING:
        return f"lmcache-mp has nothing like {theirs}{reason}: see {PAGE}"
    if here in (NOT_NEEDED, NO_EFFECT):
        return f"{theirs} is not needed here: remove it{reason}"
    return f"{theirs} is '{here}' here{reason}"
