"""What an installation puts on the path: our three packages, the kernel's source, the status page."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_wheel_has_the_kernel_the_page_and_no_other_top_level_names(tmp_path):
    pytest.importorskip("setuptools")
    tree = tmp_path / "tree"
    wanted = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=wanted)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", tmp_path, tree], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert {"lmcache_kernels/page_copy.cu", "lmcache_server/page.html"} <= set(names)
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"lmcache_client", "lmcache_kernels", "lmcache_server"}


def test_no_directory_here_hides_a_package_of_the_name_kernels():
    # transformers looks for one, and `python -m vllm…` in this directory would find a directory instead.
    assert not (ROOT / "kernels").exists()
    assert not (ROOT / "tests" / "kernels").exists()
