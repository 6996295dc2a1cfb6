"""The house: who may import whom, what never crosses the wire, how big a file gets."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("lmcache_client", "lmcache_kernels", "lmcache_server")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
NATIVE = {"torch", "vllm", "cupy"}
MAY_IMPORT = {
    # Part of the house: (of this project, of others that matter). The longest prefix counts.
    "lmcache_client/contract": ({"lmcache_client.contract"}, {"msgpack"}),
    "lmcache_client/memory": ({"lmcache_client.contract", "lmcache_client.memory", "lmcache_kernels"}, set()),
    "lmcache_client/channel.py": ({"lmcache_client.contract", "lmcache_client.system"}, set()),
    "lmcache_client/system.py": ({"lmcache_client.contract", "lmcache_client.memory"}, {"zmq"}),
    "lmcache_client/bench": (
        {f"lmcache_client.{each}" for each in ("bench", "channel", "contract", "memory")},
        set(),
    ),
    "lmcache_client/verify": ({"lmcache_client.verify"}, set()),
    "lmcache_client/connector": ({"lmcache_client"}, {"torch", "vllm"}),
    "lmcache_kernels": ({"lmcache_kernels"}, {"cupy"}),
    "lmcache_server/core": ({"lmcache_client.contract", "lmcache_server.core"}, {"msgpack"}),
    "lmcache_server/transfer": (
        {
            "lmcache_client.contract",
            "lmcache_kernels",
            "lmcache_server.core.pool",
            "lmcache_server.machine",
            "lmcache_server.transfer",
        },
        set(),
    ),
    "lmcache_server/doctor": (
        {"lmcache_client.contract", "lmcache_client.memory.host", "lmcache_kernels", "lmcache_server"},
        set(),
    ),
    "lmcache_server/cli.py": (
        {"lmcache_client.bench", "lmcache_client.contract", "lmcache_client.verify", "lmcache_server"},
        set(),
    ),
    "lmcache_server": (
        {"lmcache_client.contract", "lmcache_server"},
        {"zmq", "msgpack", "asyncio", "threading"},
    ),
}
WATCHED = {"zmq", "msgpack", *NATIVE}
CORE_MUST_NOT = {"asyncio", "threading", "time", "os", "socket", "random", "zmq", "ctypes"}


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide where an arrow goes"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_run_one_way(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    rule = max((prefix for prefix in MAY_IMPORT if relative.startswith(prefix)), key=len, default=None)
    if rule is None:
        return
    own, others = MAY_IMPORT[rule]
    for name in imports(path):
        if any(within(name, package) for package in PACKAGES):
            assert any(within(name, each) for each in own), f"{relative} must not import {name}"
        top = name.partition(".")[0]
        assert top not in WATCHED - others, f"{relative} must not import {top}"


def test_the_core_does_no_io_and_reads_no_clock() -> None:
    for path in (ROOT / "lmcache_server/core").glob("*.py"):
        assert not {name.partition(".")[0] for name in imports(path)} & CORE_MUST_NOT


def test_nothing_executable_is_read_from_a_socket() -> None:
    forbidden = re.compile(
        r"\bpickle\b|\bmarshal\b|\beval\(|\bexec\(|import_module|__import__|recv_pyobj|shelve|yaml\.load"
    )
    for path in FILES:
        for line in path.read_text().splitlines():
            assert not forbidden.search(line), f"{path}: {line}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_one_concept(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
