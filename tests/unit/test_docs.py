"""The documents are true: links lead somewhere, commands and their flags exist."""

import re
import shlex
from pathlib import Path

import pytest

from lmcache_server.cli import cli

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
ids = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def commands(page: Path) -> list[list[str]]:
    """Every `lmcache …` in a code block or between backticks."""
    text = page.read_text()
    blocks = "".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))
    lines = [*blocks.splitlines(), *re.findall(r"`([^`\n]+)`", text)]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("lmcache ")]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_and_flags_exist(page: Path) -> None:
    for _, name, *arguments in commands(page):
        if name == "--help":
            continue
        command = cli.commands[name]
        known = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
        assert {each for each in arguments if each.startswith("--")} <= known | {"--help"}


def test_there_are_commands_to_check() -> None:
    assert sum(len(commands(page)) for page in PAGES) >= 5


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    readme = (ROOT / "README.md").read_text()
    targets = {*re.findall(r"^make ([a-z]+)$", readme, re.MULTILINE), *re.findall(r"`make ([a-z]+)`", readme)}
    assert targets >= {"demo", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
