"""The installed vLLM, changed as a later one might be: a directory to put on PYTHONPATH."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def other_vllm(directory: Path, version: str = "", replaced: Mapping[str, tuple[str, str]] = {}) -> Path:
    """A copy of vLLM in `directory`, with another version and with texts replaced: by file, below vllm/, or
    in every Python file for the name "*". Its files are links where nothing was changed."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).parent
    copy = directory / "vllm"
    shutil.copytree(source, copy, copy_function=_link)
    for name, (old, new) in replaced.items():
        for file in [copy / name] if name != "*" else copy.rglob("*.py"):
            text = file.read_text()
            if name == "*" and old not in text:
                continue
            assert old in text, f"{name} has no {old!r}"
            _rewrite(file, text.replace(old, new))
    if version:
        numbers = f"__version__ = version = {version!r}\n__version_tuple__ = (9, 9, 9)\n"
        _rewrite(copy / "_version.py", numbers)
    return directory


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _rewrite(file: Path, text: str) -> None:
    file.unlink()
    file.write_text(text)


def run_python(program: str, *first_on_path: Path) -> "subprocess.CompletedProcess[str]":
    """Run a program with these directories before all others on its path."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, first_on_path), *sys.path]),
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        },
        capture_output=True,
        text=True,
        check=False,
    )
