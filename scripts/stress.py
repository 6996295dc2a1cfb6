"""`make stress FILE=…`: runs a file of tests 20 times beside a load of eight busy processes.

    python scripts/stress.py tests/server/test_x.py [PYTEST ARGUMENTS]

Exits with 1 if any run failed, and prints the end of what the first failure said.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMES, LOAD = 20, 8


def main() -> int:
    if len(sys.argv) < 2:
        sys.exit("name a file: make stress FILE=tests/server/test_sessions.py")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOAD)]
    failures = []
    try:
        for number in range(TIMES):
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", *sys.argv[1:]],
                cwd=ROOT,
                env={**os.environ, "PYTHONHASHSEED": str(number)},
                capture_output=True,
                text=True,
                check=False,
            )
            last = done.stdout.strip().rpartition("\n")[2]
            print(f"{number + 1:2} of {TIMES}: {last}", flush=True)
            if done.returncode:
                failures.append(done.stdout)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    if failures:
        print(failures[0][-6000:])
    print(f"{len(failures)} of {TIMES} runs failed")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
