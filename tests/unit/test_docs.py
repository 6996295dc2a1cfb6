"""The documents are true: links lead somewhere, and commands, flags, keys and targets exist."""

import importlib.util
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from harness import pages
from harness.pages import DATA, NEEDS, SHELL
from harness.paths import ROOT

from lmcache_client.connector import settings
from lmcache_server.commands.cli import cli

FOR_READERS = pages.pages()
PAGES = sorted({*FOR_READERS, *ROOT.glob("*.md")})
each_page = pytest.mark.parametrize("page", PAGES, ids=map(pages.name, PAGES))
COMMAND = re.compile(
    r"^ *(make [a-z-]+"
    r"|(lmcache [a-z]+|vllm serve|pip install|docker|kubectl|helm|curl|python)( [-./'{].*)?)$"
    r"|^ {4,}(make|lmcache|vllm|pip|docker|kubectl|helm|curl|python3?|systemctl) ",
    re.MULTILINE,
)
ONLY_NAMES = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    text = pages.without_blocks(page)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[\w+\]: (\S+)$", text, re.MULTILINE)
    for target in targets:
        if "://" in target:
            url = urlsplit(target)
            assert url.scheme == "https", target
            assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", url.netloc), target
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in pages.anchors(file), target


@pytest.mark.parametrize("page", FOR_READERS, ids=map(pages.name, FOR_READERS))
def test_blocks_say_what_they_are_and_what_they_need(page: Path) -> None:
    for block in pages.blocks(page):
        assert block.language in SHELL | DATA, f"{block.where}: say what the block is, sh or text or …"
        assert not block.needs or block.is_shell, f"{block.where}: only commands are marked"
        assert block.is_shell or not COMMAND.search(block.text), f"{block.where}: a command is sh, not output"
        for need in filter(None, block.needs.split(", ")):
            assert re.search(NEEDS[need], block.before), f"{block.where}: tell readers that it needs {need}"
    assert not COMMAND.search(pages.without_blocks(page)), "a command outside of a fenced block is not tested"


def test_files_that_are_named_exist() -> None:
    named = {
        path.rstrip(".")
        for page in PAGES
        for path in re.findall(r"(?<![\w/.])(?:deploy|scripts|tests|docs)/[\w./-]*\w", page.read_text())
    }
    assert len(named) >= 10
    assert not [path for path in named if not (ROOT / path).exists()]


def test_alerts_are_those_that_are_explained() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()
    sections = (ROOT / "docs" / "alerts.md").read_text().split("\n## ")[1:]
    assert [each.partition("\n")[0] for each in sections] == re.findall(r"alert: (\w+)", rules)
    assert all("\n1. " in each for each in sections), "each says what to do"


def commands(page: Path) -> list[list[str]]:
    """Every command of a block, and every `lmcache …` and `vllm …` between backticks."""
    lines = re.findall(r"`((?:lmcache|vllm) [^`\n…]+)`", pages.without_blocks(page))
    for block in pages.blocks(page):
        lines += block.commands() if block.is_shell else []
    return [shlex.split(re.sub(r"\\\n", " ", line), comments=True) for line in lines]


def flags_of(arguments: list[str]) -> set[str]:
    return {each.partition("=")[0] for each in arguments if re.match("--[a-z]", each)}


@each_page
def test_commands_of_lmcache_and_their_flags_exist(page: Path) -> None:
    for words in commands(page):
        first = next(i for i, word in enumerate(words) if "=" not in word)
        if words[first].rpartition("/")[2] != "lmcache":
            continue
        name, *arguments = words[first + 1 :]
        if name.startswith("-") or name == "COMMAND":
            assert {name, *arguments} <= {"--help", "--version", "COMMAND"}
            continue
        known = {flag for each in cli.commands[name].params for flag in (*each.opts, *each.secondary_opts)}
        end = next((i for i, each in enumerate(arguments) if each in ("|", "||", "&&", ";")), None)
        assert flags_of(arguments[:end]) <= known | {"--help"}, words


def vllm_flags() -> set[str]:
    """The options of vLLM's server, read from its sources: importing them takes ten seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    home = Path(spec.origin or "").parent
    text = "".join(
        (home / each).read_text() for each in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
    )
    fields = re.findall(r"^    ([a-z][a-z0-9_]+): ", text, re.MULTILINE)
    return {*re.findall(r'"(--[a-z0-9-]+)"', text), *("--" + each.replace("_", "-") for each in fields)}


def test_flags_of_vllm_and_the_connectors_keys_exist() -> None:
    known, checked = vllm_flags(), 0
    for words in (words for page in PAGES for words in commands(page)):
        if not ("vllm" in words or "vllm.entrypoints.openai.api_server" in words):
            continue
        assert flags_of(words) <= known, words
        for config in (json.loads(each) for each in words if each.startswith("{")):
            settings.parse(config.get("kv_connector_extra_config", {}))
            checked += 1
    assert checked >= 3


def test_requirements_are_the_same_wherever_they_are_named() -> None:
    """The server and the connector run on each version that the package names. The clone needs vLLM's CPU
    build, too, which needs a newer one."""
    project = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', project)
    oldest, newest = named[0], named[-1]
    assert named == [str(minor) for minor in range(int(oldest), int(newest) + 1)]
    assert f'requires-python = ">=3.{oldest}"' in project
    assert f"Python 3.{oldest} to 3.{newest}" in " ".join((ROOT / "README.md").read_text().split())
    makefile = (ROOT / "Makefile").read_text()
    needed, below = re.findall(r"\(3, (\d+)\) <= sys.version_info < \(3, (\d+)\)", makefile)[0]
    assert int(below) == int(newest) + 1
    named_alone = {f"3.{oldest}", f"3.{needed}"}
    clone = f"Python 3.{needed} to 3.{newest}"
    assert makefile.count(clone) == 2
    for page in ("README.md", "docs/laptop.md", "CONTRIBUTING.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert f"Linux on x86-64, {clone}, `make`, " in text, page
        assert re.search(r"\b5 GB of disk and 8 GB of memory", text), page
        versions = set(re.findall(r"Python (3\.\d+(?: to 3\.\d+)?)", text))
        assert versions <= {f"3.{needed} to 3.{newest}", f"3.{oldest} to 3.{newest}", *named_alone}, page


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named: set[str] = set()
    for page in PAGES:
        named |= {words[1] for words in commands(page) if words[0] == "make"}
        named |= set(re.findall(r"`make ([a-z-]+)[^`]*`", pages.without_blocks(page)))
    assert {"demo", "test"} <= named <= targets


def test_the_command_line_page_is_what_the_commands_say() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "command_line.py"))
    assert (ROOT / "docs" / "command-line.md").read_text() == script["page"](), (
        f"run: {sys.executable} scripts/command_line.py > docs/command-line.md"
    )


def test_what_is_said_to_users_of_lmcache_is_true() -> None:
    """The middle column has this server's flags and metrics."""
    pages_of_it = ("coming-from-lmcache.md", "lmcache-names.md")
    text = "".join((ROOT / "docs" / page).read_text() for page in pages_of_it)
    cells = [row.split("|")[2] for row in re.findall(r"^\| (?:`|none \|).*\|$", text, re.MULTILINE)]
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    known = {flag for each in cli.commands["server"].params for flag in (*each.opts, *each.secondary_opts)}
    assert sum(bool(ONLY_NAMES.search(cell)) for cell in cells) >= 4
    for cell in cells:
        assert set(ONLY_NAMES.findall(cell)) <= known, cell
        assert all(f"`{name}`" in metrics for name in re.findall(r"`(lmcache_[a-z0-9_]+)", cell)), cell


def test_the_tests_that_pages_name_exist() -> None:
    """A name that ends with … stands for one that begins so; a file that is … is the one before it."""
    checked = 0
    for page in FOR_READERS:
        tests = ""
        named = re.findall(r"`(?:tests/)?([\w/]+/test_\w+\.py|…)(?:::(test_\w+?)(_?…)?)?`", page.read_text())
        for file, name, cut in named:
            tests = tests if file == "…" else (ROOT / "tests" / file).read_text()
            if name:
                end = r"\w*" if cut else r"\b"
                assert re.search(rf"def {name}{end}\(", tests), f"{pages.name(page)}: {file}::{name}"
            checked += 1
    assert checked > 60


def test_what_is_said_of_the_simulation_is_so() -> None:
    text = " ".join((ROOT / "docs" / "failures.md").read_text().split())
    tests = (ROOT / "tests" / "simulation" / "test_simulation.py").read_text()
    (seeds,) = map(int, re.findall(r"^SEEDS = (\d+)$", tests, re.MULTILINE))
    assert f"`make test` runs {2 * seeds} seeds" in text
    assert f"(`.ci/run`), {seeds} of the {2 * seeds} are others in each run" in text
    assert "SIMULATION_FIRST=$(($(date" in (ROOT / ".ci" / "run").read_text()
    bugs = "".join((ROOT / f"tests/simulation/{each}.py").read_text() for each in ("bugs", "bugs_of_tiers"))
    (number,) = re.findall(r"must also find each of (\d+) deliberate bugs", text)
    assert int(number) == len(re.findall(r'^    "\w+": \(\s*\d+,', bugs, re.MULTILINE))


def test_each_invariant_has_a_test_named_after_it() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    listed = design.partition("The code asserts these invariants.")[2].partition("\n## ")[0]
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*/test_*.py"))
    numbers = re.findall(r"^(\d)\. ", listed, re.MULTILINE)
    assert len(numbers) == 5
    assert set(re.findall(r"^def test_invariant_(\d)_", tests, re.MULTILINE)) == set(numbers)
