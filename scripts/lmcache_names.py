"""Prints docs/lmcache-names.md, made from the table of LMCache's names.

python scripts/lmcache_names.py > docs/lmcache-names.md
"""

from lmcache_client.contract.migration import MISSING, NO_EFFECT, NOT_NEEDED, SAME, table

HEAD = """# LMCache's names

`python scripts/lmcache_names.py` generates this page from `lmcache_client/contract/lmcache.json`, and a test
keeps it up to date. It has every flag of LMCache's server and every key of its connector, in version 0.5.6
(and the flags of 0.5.7rc3), and what they are here. [Coming from LMCache](coming-from-lmcache.md) has the
steps.
"""
SECTIONS = {
    "Flags of the server": (
        "flags",
        "The server does not start with a flag that is not *the same* here. Its error says what to do.",
    ),
    "Keys": (
        "keys",
        """These are keys of `kv_connector_extra_config`. A key with *no effect* is ignored, with one line in
the log. Any other key that is not *the same* here stops vLLM before it loads the weights. The last line of
its log says what to do.""",
    ),
    "Environment": (
        "variables",
        """The server reads a variable for each of its flags, such as `LMCACHE_L1_SIZE_GB`: see [command
line](command-line.md). It warns about every variable that begins with `LMCACHE_` and that it does not know.
`PYTHONHASHSEED` does not matter, and `DO_NOT_TRACK` is not needed.""",
    ),
    "Commands": ("commands", ""),
}


def row(names: list[str], here: str, why: str) -> str:
    shown = here if here in (SAME, MISSING, NOT_NEEDED, NO_EFFECT) else f"`{here}`"
    return f"| {', '.join(f'`{name}`' for name in names)} | {shown} | {why} |".replace("|  |", "| |")


def section(heading: str, kind: str, text: str) -> str:
    rows = ["| LMCache | lmcache-mp | |", "|---|---|---|", *(row(*each) for each in table(kind))]
    return "\n\n".join(filter(None, [f"## {heading}", text, "\n".join(rows)])) + "\n"


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([HEAD, *(section(heading, *each) for heading, each in SECTIONS.items())])


if __name__ == "__main__":
    print(page(), end="")
