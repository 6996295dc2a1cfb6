"""The rooms of the product: their ranks, the arrows between files, and how many lines they may have.

As a script it prints the budgets: `python tests/support/harness/house.py`.
"""

import ast
import functools
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {
    "lmcache_client": ROOT / "lmcache_client",
    "lmcache_kernels": ROOT / "kernels/lmcache_kernels",
    "lmcache_server": ROOT / "lmcache_server",
}
FILES = sorted(path for directory in PACKAGES.values() for path in directory.rglob("*.py"))

COMMANDS = "lmcache_server/commands"
OPTIONS = "lmcache_server/options"
CLIENT_OPTIONS = "lmcache_client/options"
TABLE = f"{OPTIONS}/__init__.py"
TABLES = (TABLE, f"{CLIENT_OPTIONS}/__init__.py")
OPTION_COMMANDS = ("command.py", "doctor.py", "text.py", "warm.py")
"""Modules of an option that belong to the commands."""

RANKS = (
    # Lowest first: an arrow between two rooms goes to a lower rank. The longest prefix names a file's room.
    (
        "kernels",
        "lmcache_client/contract",
        "lmcache_client/__init__.py",
        "lmcache_server/__init__.py",
        *TABLES,
    ),
    ("lmcache_client/memory", "lmcache_server/errors.py"),
    ("lmcache_client/transport.py", "lmcache_server/host"),
    ("lmcache_client/server_channel.py", "lmcache_server/core", "lmcache_server/telemetry"),
    ("lmcache_client/engine.py", "lmcache_server/transfer"),
    ("lmcache_client/servers.py", "lmcache_server/l1", "lmcache_server/config.py"),
    ("lmcache_client/connector",),
    ("lmcache_server/service", CLIENT_OPTIONS),
    (OPTIONS,),
    ("lmcache_server/net", "lmcache_server/admin"),
    ("lmcache_server/app.py",),
    (COMMANDS,),
    ("lmcache_server/__main__.py",),
)


class Budget(NamedTuple):
    lines: int
    what: str


FACES = (
    "lmcache_server/config.py",
    "lmcache_server/admin",
    "lmcache_server/telemetry",
    "lmcache_server/host",
    f"{OPTIONS}/planner/recording.py",
    TABLE,
)
TOOLS = (COMMANDS, "lmcache_server/__main__.py")
BUDGETS = {
    "base": Budget(12172, "what a byte or a decision goes through, without options"),
    "path": Budget(18255, "the same with every option"),
    "faces": Budget(1871, "what configures and watches it"),
    "tools": Budget(3484, "the command lmcache"),
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room(path: Path) -> str:
    if path.name in OPTION_COMMANDS and name(path).startswith(f"{OPTIONS}/"):
        return COMMANDS
    prefixes = (prefix for rank in RANKS for prefix in rank if f"{name(path)}/".startswith(f"{prefix}/"))
    return max(prefixes, key=len)


def rank(path: Path) -> int:
    return next(number for number, rooms in enumerate(RANKS) if room(path) in rooms)


def imports(path: Path) -> set[str]:
    """Modules and names, dotted, that a file imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide where an arrow goes"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def arrows(path: Path) -> frozenset[Path]:
    """The files of the product that a file imports."""
    found = {_file_of(name) for name in imports(path) if name.partition(".")[0] in PACKAGES}
    return frozenset(found - {None, path})  # type: ignore[arg-type]


def _file_of(dotted: str) -> Path | None:
    top, *rest = dotted.split(".")
    while True:
        place = PACKAGES[top].joinpath(*rest)
        for candidate in (place.with_suffix(".py"), place / "__init__.py"):
            if candidate in FILES:
                return candidate
        if not rest:
            return None
        rest.pop()


def circle() -> list[str]:
    """Files that import each other in a circle, in order; empty if there is none."""
    done: set[Path] = set()

    def visit(path: Path, way: list[Path]) -> list[str]:
        if path in way:
            return [name(each) for each in way[way.index(path) :]]
        if path in done:
            return []
        for other in sorted(arrows(path)):
            if found := visit(other, [*way, path]):
                return found
        done.add(path)
        return []

    return next((found for path in FILES if (found := visit(path, []))), [])


def lines(budget: str) -> int:
    def part(path: Path) -> str:
        is_in = lambda rooms: any(f"{name(path)}/".startswith(f"{each}/") for each in rooms)  # noqa: E731
        is_tool = room(path) == COMMANDS or is_in(TOOLS)
        is_face = is_in(FACES) or (path.name == "flags.py" and is_in([OPTIONS]))
        return (
            "tools"
            if is_tool
            else "faces"
            if is_face
            else "path"
            if is_in([OPTIONS, CLIENT_OPTIONS])
            else "base"
        )

    # The base is a part of the path.
    parts = ("base", "path") if budget == "path" else (budget,)
    return sum(len(path.read_text().splitlines()) for path in FILES if part(path) in parts)


if __name__ == "__main__":
    for each, (limit, what) in BUDGETS.items():
        print(f"{each:7} {lines(each):5} of {limit} lines: {what}")
