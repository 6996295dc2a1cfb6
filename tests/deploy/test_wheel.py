"""What an installation is: our three packages and their command, typed, needing what it declares and no more,
and gone without a trace when it is uninstalled."""

import importlib.metadata
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from functools import partial
from pathlib import Path

import pytest
from harness import tools
from harness.paths import ROOT
from harness.waiting import wait_until

from deploy import programs
from lmcache_client.contract.version import VERSION

ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "LANG", "HOME") if name in os.environ}
run = partial(programs.run, env=ENVIRONMENT)
PACKAGES = {"lmcache_client", "lmcache_kernels", "lmcache_server"}
ROOMS = {"lmcache_client", "kernels", "lmcache_server"}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
USER_PROGRAM = """
from lmcache_client.contract.keys import chunk_key
from lmcache_kernels.driver import load
from lmcache_server.config import Config
reveal_type(chunk_key)
reveal_type(load)
reveal_type(Config.l1_size_gb)
"""
ALL = """
import json, sys
from importlib.metadata import entry_points
import lmcache_server.app, lmcache_server.commands.cli
import lmcache_server.commands.bench.run, lmcache_server.commands.doctor.examine
import lmcache_client.connector.plugin
print(json.dumps([entry.value for entry in entry_points(group="vllm.general_plugins")]))
print(json.dumps(sorted(name for name in ("torch", "vllm", "cupy") if name in sys.modules)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist alone, the sdist from a copy of the tree."""
    pytest.importorskip("setuptools")
    directory = tmp_path_factory.mktemp("dist")
    tree = directory / "tree"
    wanted = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=wanted)
    run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('..')", cwd=tree)
    sdist = next(directory.glob("*.tar.gz"))
    options = ["--no-deps", "--no-index", "--no-build-isolation"]
    run(*PIP, "wheel", *options, "-w", directory, sdist)
    return next(directory.glob("*.whl"))


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that has the dependencies which the package declares (those that are installed
    here) and nothing else."""
    directory = tmp_path_factory.mktemp("empty")
    venv.create(directory, with_pip=False, symlinks=True)
    packages = next(directory.glob("lib/python3*/site-packages"))
    for requirement in importlib.metadata.requires("lmcache-mp") or ():
        if ";" not in requirement:
            distribution = importlib.metadata.distribution(re.split(r"[^\w-]", requirement)[0])
            for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
                (packages / top).symlink_to(distribution.locate_file(top))
    return directory


def files(environment: Path) -> set[Path]:
    """Everything in it but compiled modules; its dependencies are links and count as one each."""
    return {path for path in environment.rglob("*") if "__pycache__" not in path.parts}


def test_the_wheel_has_our_packages_typed_the_kernel_the_page_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"lmcache_kernels/page_copy.cu", "lmcache_server/admin/page.html"} <= set(names)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_sdist_has_no_more_than_it_needs(wheel: Path) -> None:
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2].split("/")[0] for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", *ROOMS} <= names
    assert not names & {"tests", "benchmarks", "docs", "scripts", "deploy"}


def test_installed_it_serves_is_typed_and_uninstalled_it_is_gone(
    wheel: Path, empty: Path, tmp_path: Path
) -> None:
    before = files(empty)
    release = runpy.run_path(str(ROOT / "scripts" / "release.py"))
    with pytest.raises((SystemExit, FileNotFoundError)):
        release["serve"](empty / "bin")  # nothing is installed there
    # Not --no-deps: what it declares must be enough.
    run(*PIP, "--python", empty / "bin/python", "install", "--no-index", wheel)
    # What a release checks of an installed wheel.
    assert release["serve"](empty / "bin").startswith(f"installed and asked: lmcache server {VERSION}, pid ")
    environment = {**ENVIRONMENT, "LMCACHE_RUNTIME_DIR": str(tmp_path / "run"), "LMCACHE_HTTP_PORT": "0"}
    here = {"env": environment, "cwd": tmp_path}
    lmcache = empty / "bin/lmcache"
    assert "doctor" in run(lmcache, "--help", **here)
    assert run(empty / "bin/lmcache-mp", "--help", **here) == run(lmcache, "--help", **here)
    plugins, heavy = map(json.loads, run(empty / "bin/python", "-c", ALL, **here).splitlines())
    assert (plugins, heavy) == (["lmcache_client.connector.plugin:register"], [])
    with subprocess.Popen(
        [lmcache, "server", "--l1-size-gb", "0.02"], stderr=subprocess.DEVNULL, **here
    ) as server:
        try:
            ping = lambda: subprocess.run([lmcache, "ping"], capture_output=True, check=False, **here)  # noqa: E731
            wait_until(lambda: ping().returncode == 0, 20.0, "the installed server answers")
            run(lmcache, "bench", "--only", "store,load", "--requests", "1", "--layers", "1", **here)
            assert "ok    server: " in run(lmcache, "doctor", **here)
        finally:
            server.terminate()
    (tmp_path / "program.py").write_text(USER_PROGRAM)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", empty / "bin/python"]
    told = run(*mypy, "--cache-dir", ROOT / ".mypy_cache/installed", "program.py", cwd=tmp_path)
    types = re.findall(r'Revealed type is "(.*)"', told)
    assert len(types) == 3
    assert not [each for each in types if "Any" in each]
    run(*PIP, "--python", empty / "bin/python", "uninstall", "--yes", "lmcache-mp")
    assert files(empty) == before
    none_left = "from importlib.metadata import *; print(len(entry_points(group='vllm.general_plugins')))"
    assert run(empty / "bin/python", "-c", none_left, **here) == "0\n"


def test_beside_lmcache_the_second_name_of_the_command_stays_ours(
    wheel: Path, empty: Path, tmp_path: Path
) -> None:
    """As LMCache does, another package installs a command `lmcache`, before ours or after it."""
    (tmp_path / "lmcache").mkdir()
    (tmp_path / "lmcache" / "__init__.py").write_text("def main(): print('another')\n")
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "lmcache"\nversion = "0"\nscripts = { lmcache = "lmcache:main" }\n'
        '[tool.setuptools]\npackages = ["lmcache"]\n'
    )
    run(*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", tmp_path, tmp_path)
    theirs = next(tmp_path.glob("*.whl"))
    install = [*PIP, "--python", empty / "bin/python", "install", "--no-index"]
    uninstall = [*PIP, "--python", empty / "bin/python", "uninstall", "--yes"]
    ask = {"env": ENVIRONMENT, "capture_output": True, "text": True, "cwd": tmp_path / "lmcache"}
    for first, last in ((theirs, wheel), (wheel, theirs)):
        run(*install, first)
        run(*install, last)
        said = subprocess.run([empty / "bin/lmcache", "--version"], **ask, check=False).stdout
        assert (said == "another\n") == (last == theirs), "the last package that is installed has the command"
        doctor = subprocess.run([empty / "bin/lmcache-mp", "doctor"], **ask, check=False)
        assert doctor.stderr.startswith("lmcache: LMCache is in this Python environment, too")
        assert "warn  command: LMCache is here, too" in doctor.stdout
        run(*uninstall, "lmcache")
        assert not (empty / "bin/lmcache").exists(), "whoever had it"
        assert "doctor" in run(empty / "bin/lmcache-mp", "--help")
        if first == wheel:
            run(*install, "--force-reinstall", "--no-deps", wheel)
            assert "doctor" in run(empty / "bin/lmcache", "--help")
        run(*uninstall, "lmcache-mp")


def test_a_release_has_the_chart_and_says_what_this_machine_cannot_build(monkeypatch, tmp_path) -> None:
    tools.module("helm_python")
    release = runpy.run_path(str(ROOT / "scripts" / "release.py"))
    monkeypatch.setitem(release["chart"].__globals__, "DIST", tmp_path)
    name = release["chart"](ROOT)
    with tarfile.open(tmp_path / name) as packed:
        assert "lmcache-mp/templates/daemonset.yaml" in packed.getnames()
    monkeypatch.setitem(sys.modules, "helm_python.chart", None)
    assert release["chart"](ROOT).startswith("chart: not packaged: pip install")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither docker nor podman works here" in release["images"](ROOT, VERSION)


def test_the_release_workflow_runs_what_exists() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    script = "\n".join(step.get("run", "") for step in steps)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"test", "release"} <= set(re.findall(r"make ([a-z-]+)", script)) <= targets
    files = re.findall(r"-f (\S+)|(?<= )([\w/]+\.(?:py|md))\b", script)
    assert len(files) >= 3
    assert all((ROOT / (first or second)).exists() for first, second in files)
    assert all(re.search(r"@\S*v\d", step["uses"]) for step in steps if "uses" in step)
    (tested,) = [step["with"]["python-version"] for step in steps if "python" in step.get("uses", "")]
    shipped = re.findall(r"PYTHON_IMAGE=python:([\d.]+)-", (ROOT / "deploy/docker/Dockerfile").read_text())
    assert shipped == [tested]
    (version_step,) = [step["run"] for step in steps if "VERSION = " in step.get("run", "")]
    here = {"GITHUB_REF_NAME": f"v{VERSION}", "PATH": os.environ["PATH"]}
    run("bash", "-c", version_step, cwd=ROOT, env=here)
    with pytest.raises(AssertionError):
        run("bash", "-c", version_step, cwd=ROOT, env=here | {"GITHUB_REF_NAME": "v9.9"})


def test_nobody_is_told_to_install_from_an_index_what_no_index_has() -> None:
    """A name that is not registered is a stranger's on the day that somebody takes it."""
    told = re.compile(r"(pip|uv) install[^\n`]*(?<![/\w.-])lmcache-mp(?![-\w/])")
    places = ("lmcache_client", "lmcache_server", "kernels", "docs", "deploy", "scripts")
    paths = [path for place in places for path in (ROOT / place).rglob("*")]
    files = [path for path in paths if path.suffix in {".py", ".md", ".json", ".html"}]
    files += [*ROOT.glob("*.md"), ROOT / "Makefile", *(ROOT / "deploy").rglob("Dockerfile*")]
    assert len(files) > 100
    assert not [(str(path), found[0]) for path in files if (found := told.search(path.read_text()))]


def test_transformers_does_not_take_the_directory_kernels_for_a_package():
    """It looks for one of that name, and `python -m vllm…` in this directory finds a directory."""
    asked = "from transformers.utils import is_kernels_available\nprint(is_kernels_available())"
    assert run(sys.executable, "-c", asked, cwd=ROOT).strip() == "False"
