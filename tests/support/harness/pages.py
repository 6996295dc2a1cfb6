"""The pages for readers, and what is in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.paths import ROOT

SHELL = frozenset({"sh", "bash", "shell", "console"})
DATA = frozenset({"text", "json", "yaml", "toml", "python", "promql", "ini", "http"})
NEEDS = {
    "gpu": r"GPU",
    "kubernetes": r"Kubernetes|cluster",
    "docker": r"Docker|Compose",
    "root": r"root",
    "rdma": r"RDMA",
}
"""What a block may need that tests do not have, by its mark, and the word that must say so to the reader."""

_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- needs: (.*?) -->\n\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block. `before` is the text between the heading above and it; `opens_terminal` tells whether
    what follows the block before speaks of a terminal."""

    where: str
    language: str
    needs: str
    before: str
    text: str
    opens_terminal: bool

    @property
    def is_shell(self) -> bool:
        return self.language in ("", *SHELL)

    @property
    def is_executed(self) -> bool:
        return self.is_shell and not self.needs

    def commands(self) -> Iterator[str]:
        """Its commands, those of several lines as one text."""
        command = ""
        for line in self.text.splitlines():
            command += line + "\n"
            if not line.endswith("\\") and _is_whole(command):
                if shlex.split(command, comments=True):
                    yield command.strip()
                command = ""
        assert not command, f"{self.where}: a quotation mark is missing"


def _is_whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def pages() -> list[Path]:
    """README.md, everything below docs/, and the README of deploy/."""
    deploy = [path for path in (ROOT / "deploy" / "README.md",) if path.exists()]
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *deploy]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found, end, before = [], 0, ""
    for fence in _FENCE.finditer(text):
        indent, language, body = fence.groups()
        between = text[end : fence.start()]
        mark = _MARK.search(between)
        before = re.split(r"^#.*\n", before + between, flags=re.MULTILINE)[-1]
        found.append(
            Block(
                where=f"{name(page)}:{text[: fence.start()].count(chr(10)) + 1}",
                language=language.strip(),
                needs=mark.group(1) if mark else "",
                before=re.sub(r"<!--.*?-->", "", before),
                text=re.sub(rf"^{indent}", "", body, flags=re.MULTILINE),
                opens_terminal=bool(re.search(r"\bterminal\b", between)),
            )
        )
        end = fence.end()
    return found


def without_blocks(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site and GitHub name them."""
    headings = re.findall(r"^#+ +(.*)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
