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
ROUTERS, MOONCAKE, SUFFIX, NIXL = (CACHE / each for each in ("routers", "mooncake", "suffix", "nixl"))
"""Python packages of other projects, which `make test` installs."""
