"""The deletion test: an option is taken away from server and connector, its files and its line in the table.
The rest still works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.paths import CACHE, ROOT

from lmcache_client import options as of_connector
from lmcache_server import options as of_server

HISTORIES = 10
NAMES = sorted({*of_server.NAMES, *of_connector.NAMES})
# Pages describe the whole product, with every option. The stand-in of a driver uses nothing of the server.
# The demo, and the longest tests of the contract and the core, are about files that see no option.
NOT_OF_THE_BASE = (
    "tests/service/test_fuzz.py::test_fuzzing_guided_by_coverage_runs",
    "tests/service/test_standin.py",
    "tests/service/test_standin_order.py",
    "tests/unit/test_cache_model.py",
    "tests/unit/test_contract_codec.py",
    "tests/unit/test_contract_keys.py",
    "tests/unit/test_demo.py",
    "tests/unit/test_docs.py",
    "tests/unit/test_errors_page.py",
    "tests/unit/test_metrics.py::test_the_document_is_up_to_date",
    "tests/unit/test_lmcache_names.py::test_what_is_named_instead_exists",
    "tests/unit/test_mutants.py",
)


@pytest.fixture
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of what git has of this tree, without some options."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    for option in request.param:
        shutil.rmtree(tmp_path / "tests/options" / option, ignore_errors=True)
        for options in (of_server, of_connector):
            if option in options.NAMES:
                take_away(tmp_path / Path(str(options.__file__)).relative_to(ROOT), option)
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", tmp_path / ".mypy_cache")
    return tmp_path


def take_away(table: Path, option: str) -> None:
    folder, file = table.parent / option, table.parent / f"{option}.py"
    if folder.is_dir():
        shutil.rmtree(folder)
    else:
        file.unlink()
    before, line, after = table.read_text().partition(f'    "{option}",\n')
    assert line, "an option has one line in the table"
    table.write_text(before + after)


def passes(tree: Path, *command: str) -> None:
    paths = os.pathsep.join(map(str, (tree, tree / "kernels", tree / "tests")))
    variables = {**os.environ, "PYTHONPATH": paths, "LMCACHE_TEST_CACHE": str(CACHE), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tree, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-6000:]}{done.stderr[-2000:]}"


EACH = [pytest.param([name], id=f"without {name}", marks=pytest.mark.long) for name in NAMES]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tree", [pytest.param(NAMES, id="the base alone"), *EACH], indirect=True)
def test_without_options_the_rest_passes_its_checks(tree: Path) -> None:
    passes(tree, "ruff", "check", ".")
    passes(tree, "mypy")
    without = [word for test in NOT_OF_THE_BASE for word in ("--deselect", test)]
    passes(
        tree,
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not long",
        *without,
        "tests/unit",
        "tests/service",
    )
    passes(tree, "simulation", "--seeds", str(HISTORIES), "--jobs", "1")
