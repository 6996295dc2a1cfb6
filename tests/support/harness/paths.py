"""Where things are, and where generated things go."""

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent.parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
STUBS = SUPPORT / "stubs"
CACHE = Path(os.environ.get("LMCACHE_TEST_CACHE") or ROOT / ".cache")
MODELS = CACHE / "models"
LOGS = CACHE / "logs"
ROUTERS, MOONCAKE, SUFFIX = CACHE / "routers", CACHE / "mooncake", CACHE / "suffix"
"""Python packages of other projects, which `make test` installs."""
