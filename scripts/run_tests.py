"""`make test`: runs all tests in two parallel lanes: engines mostly wait while everything else computes.

    python scripts/run_tests.py [PYTEST ARGUMENTS]

The output of the second lane follows that of the first. Exits with the code of the first failure.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINES = "tests/engine"
"""The tests of the documents start an engine, too, but only one."""


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", "--durations=25", *sys.argv[1:]]
    others = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").iterdir()
        if path.name != Path(ENGINES).name and any(path.rglob("test_*.py")) and path.name != "gpu"
    )
    started_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        second = subprocess.Popen([*pytest, *others], cwd=ROOT, stdout=output, stderr=output)
        try:
            first_code = subprocess.call([*pytest, ENGINES], cwd=ROOT)
            second_code = second.wait()
        except BaseException:
            second.terminate()
            second.wait()
            raise
        output.seek(0)
        sys.stdout.write(output.read().decode(errors="replace"))
    print(f"both lanes: {(time.monotonic() - started_s) / 60:.1f} minutes")
    return first_code or second_code


if __name__ == "__main__":
    sys.exit(main())
