"""docs/geometries.md is what vLLM plans for the published models, and what a server accepts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm import __version__ as VLLM_VERSION

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "geometries.py"
PAGE = ROOT / "docs" / "geometries.md"

pytestmark = pytest.mark.skipif(not VLLM_VERSION.startswith("0.32."), reason="the page is that of vLLM 0.32")


def printed(*names: str) -> str:
    """In a process of its own, in which vLLM plans as on a GPU."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *names],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT}/kernels:{ROOT}/tests/support",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rows_of_the_page_are_what_vllm_plans_and_the_server_stores() -> None:
    rows = printed("NVIDIA-Nemotron-3-Nano-30B-A3B").splitlines()
    assert len(rows) == 1
    assert set(rows) <= set(PAGE.read_text(encoding="utf-8").splitlines())


@pytest.mark.long
def test_the_whole_page_is_what_the_script_prints() -> None:
    is_equal = printed() == PAGE.read_text(encoding="utf-8")
    assert is_equal, "run: python scripts/geometries.py > docs/geometries.md"
