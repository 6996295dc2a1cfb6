"""Programs and packages that a few tests need and that not every machine has.

`make test` brings them where it can (scripts/install_tools.py, the extra `deploy`). A test that misses one
skips and says so; where the variable CI is set it fails, so that nothing is skipped unseen.
"""

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from harness.paths import CACHE

_TOOLS = CACHE / "tools"
_PLACES = (_TOOLS / "usr/bin", _TOOLS / "azurite/node_modules/.bin", Path(sys.executable).parent)


def find(*names: str, get: str = "run scripts/install_tools.py") -> Path:
    places = (*map(str, _PLACES), None)
    found = next(filter(None, (shutil.which(name, path=place) for name in names for place in places)), None)
    if found is None:
        missing(f"needs {names[0]}, which is not installed: {get}")
    return Path(found)


def module(name: str, extra: str = "deploy") -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        missing(f"needs {name}, which is not installed: pip install -e '.[{extra}]'")


def missing(reason: str) -> NoReturn:
    """Skip this test; fail it in CI."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
