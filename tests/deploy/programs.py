"""Programs that must succeed."""

import subprocess
from typing import Any


def run(*command: object, **options: Any) -> str:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    done = subprocess.run(list(map(str, command)), text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + (done.stderr or "")
    return done.stdout
