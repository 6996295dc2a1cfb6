"""Where things are, and where generated things go."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
STUBS = TESTS / "stubs"
CACHE = Path(os.environ.get("LMCACHE_TEST_CACHE") or ROOT / ".cache")
MODELS = CACHE / "models"
LOGS = CACHE / "logs"
