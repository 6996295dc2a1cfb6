"""docs/errors.md has every exception class of the product, under the class that it derives from."""

import ast
import builtins
import re
from pathlib import Path

from harness.house import FILES
from harness.paths import ROOT

PAGE = ROOT / "docs" / "errors.md"
BRANCH = re.compile(r"^((?:│   |    )*)(├── |└── )?(\w+)$")


def is_python_exception(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def classes(path: Path) -> dict[str, list[str]]:
    """The classes of a file, each with the names of its bases."""
    return {
        node.name: [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }


def in_the_code() -> set[tuple[str, str]]:
    """Every exception class of the product, with the class that it derives from."""
    bases = [(name, base) for path in FILES for name, all_of in classes(path).items() for base in all_of]
    found: set[tuple[str, str]] = set()
    while True:
        names = {name for name, _ in found}
        more = {(name, base) for name, base in bases if base in names or is_python_exception(base)}
        if more == found:
            return found
        found = more


def in_the_tree() -> set[tuple[str, str]]:
    """The branches of the page's tree, each with the one above it."""
    block = re.search(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    above: list[str] = []
    found: set[tuple[str, str]] = set()
    for line in block[1].splitlines():
        branch = BRANCH.match(line)
        assert branch is not None, line
        depth = (len(branch[1]) // 4 + 1) if branch[2] else 0
        above[depth:] = [branch[3]]
        if depth:
            found.add((branch[3], above[depth - 1]))
    return found


def test_the_tree_has_the_exceptions_of_the_code_and_a_table_says_what_each_means() -> None:
    ours = {(name, base) for name, base in in_the_tree() if not is_python_exception(name)}
    assert ours == in_the_code()
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted({name for name, _ in ours})
    for name, cells in rows:
        assert all(cell.strip() for cell in cells.split("|")), name
