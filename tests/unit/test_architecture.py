"""The house: who may import whom, what never crosses the wire, how big files, functions and rooms may get."""

import ast
import re
from pathlib import Path

from harness import house
from harness.house import FILES, ROOT

NATIVE = {"torch", "vllm", "cupy", "zmq", "msgpack"}
MAY_IMPORT = {
    # Of the packages above; the longest prefix counts.
    "lmcache_client/contract": {"msgpack"},
    "lmcache_client/transport.py": {"zmq"},
    "lmcache_client/connector": {"torch", "vllm"},
    "lmcache_client/options": {"vllm"},
    "kernels": {"cupy"},
    "lmcache_server": {"zmq", "msgpack"},
    "lmcache_server/core": {"msgpack"},
    "lmcache_server/transfer": set(),
}
CORE_MAY_IMPORT = {
    # Of all other packages, Python's own too. To hash and to pack is no I/O.
    *("array", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "itertools", "math"),
    *("msgpack", "msgspec", "operator", "struct", "sys", "typing"),
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def test_arrows_go_to_rooms_of_a_lower_rank() -> None:
    for path in FILES:
        for other in house.arrows(path):
            lower = house.rank(other) < house.rank(path) or house.room(other) == house.room(path)
            assert lower, f"{house.name(path)} must not import {house.name(other)}"


def test_the_client_never_imports_the_server_and_the_server_only_the_clients_contract() -> None:
    allowed = ("lmcache_client/contract/", "lmcache_client/__init__", "lmcache_server/", "kernels/")
    for path in FILES:
        name, others = house.name(path), {house.name(other) for other in house.arrows(path)}
        if name.startswith("lmcache_client"):
            assert not [other for other in others if other.startswith("lmcache_server")], name
        elif house.room(path) != house.COMMANDS:
            assert not [other for other in others if not other.startswith(allowed)], name


def test_the_base_imports_no_option_and_an_option_no_other() -> None:
    for path in FILES:
        for other in map(house.name, house.arrows(path)):
            folder = "/".join(other.split("/")[:3])
            is_option = other.startswith((house.OPTIONS, house.CLIENT_OPTIONS)) and other not in house.TABLES
            assert not is_option or house.name(path).startswith(folder), f"{house.name(path)}: {other}"


def test_no_circle_of_files() -> None:
    assert house.circle() == []


def test_the_oldest_python_can_read_each_file() -> None:
    """mypy checks, for that version, what is called of Python's library."""
    project = (ROOT / "pyproject.toml").read_text()
    (minor,) = re.findall(r'^requires-python = ">=3\.(\d+)"', project, re.MULTILINE)
    for path in FILES:
        ast.parse(path.read_text(), house.name(path), feature_version=(3, int(minor)))
    assert f'\npython_version = "3.{minor}"\n' in project
    assert f'\ntarget-version = "py3{minor}"\n' in project


def test_packages_of_others_stay_in_their_rooms() -> None:
    for path in FILES:
        rules = [prefix for prefix in MAY_IMPORT if house.name(path).startswith(prefix)]
        foreign = NATIVE - MAY_IMPORT.get(max(rules, key=len, default=""), set())
        wrong = foreign & {name.partition(".")[0] for name in house.imports(path)}
        assert not wrong, f"{house.name(path)} must not import {wrong}"


def test_invariant_4_nothing_executable_crosses_the_wire() -> None:
    forbidden = re.compile(
        r"\bpickle\b|\bmarshal\b|\beval\(|\bexec\(|import_module|__import__|recv_pyobj|shelve|yaml\.load"
    )
    for path in FILES:
        # The tables of options import what they list themselves.
        known = "importlib.import_module(path)" if house.name(path) in house.TABLES else "-"
        for line in path.read_text().splitlines():
            assert not forbidden.search(line.replace(known, "")), f"{path}: {line}"


def test_invariant_5_the_core_does_no_io_reads_no_clock_and_starts_no_thread() -> None:
    """Nor does what it imports."""
    ways: list[Path] = list((ROOT / "lmcache_server/core").glob("*.py"))
    for path in ways:
        ways += house.arrows(path) - set(ways)
        others = {name.partition(".")[0] for name in house.imports(path)} - house.PACKAGES.keys()
        assert others <= CORE_MAY_IMPORT, f"{house.name(path)} must not import {others - CORE_MAY_IMPORT}"
        called = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not called & {"open", "print", "input"}, f"{house.name(path)} reads or writes"
    assert len(ways) > 10


def test_a_file_is_one_concept() -> None:
    for path in FILES:
        assert len(path.read_text().splitlines()) <= MAX_FILE_LINES, house.name(path)


def test_a_function_is_read_at_one_glance() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{house.name(path)}: {node.name} has {lines} lines"


def test_the_budgets_of_lines_are_kept() -> None:
    for budget, (most, _) in house.BUDGETS.items():
        assert house.lines(budget) <= most, budget


def test_time_of_the_wall_is_read_in_one_place_of_the_tests() -> None:
    """How long something takes depends on the machine: tests wait for events, in harness/waiting.py."""
    reads = re.compile(r"\btime\.(monotonic|perf_counter)\(")
    for folder in ("unit", "service", "server", "engine", "deploy", "gpu"):
        for path in sorted((ROOT / "tests" / folder).glob("*.py")):
            assert not reads.search(path.read_text()), f"{path.name}: use wait_until or timed"
