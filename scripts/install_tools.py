"""Bring the programs that some tests need and PyPI does not have, on Debian and what descends from it.

Prometheus is unpacked below .cache/tools, not installed: its package would start a daemon. Chromium, of many
parts, is installed, if this is root. Says in a line what it did or could not do and never fails: a test
that misses a program says so itself (tests/support/harness/tools.py).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(os.environ.get("LMCACHE_TEST_CACHE") or ROOT / ".cache") / "tools"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 900


def run(*command: str, directory: Path = ROOT) -> None:
    """Raises OSError, or subprocess.SubprocessError with what the command said."""
    subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )


def apt_get(*arguments: str, directory: Path = ROOT) -> None:
    """If it fails, and this is root, once more after `apt-get update`: new machines have no package lists."""
    command = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120", *arguments)
    try:
        run(*command, directory=directory)
    except subprocess.CalledProcessError:
        if os.getuid() != 0:
            raise
        run("apt-get", "-qq", "update")
        run(*command, directory=directory)


def has(*names: str) -> bool:
    places = (str(TOOLS / "usr" / "bin"), None)
    return any(shutil.which(name, path=place) for name in names for place in places)


def unpack_prometheus() -> str:
    with tempfile.TemporaryDirectory() as download:
        apt_get("download", "prometheus", directory=Path(download))
        package = next(Path(download).glob("*.deb"))
        TOOLS.mkdir(parents=True, exist_ok=True)
        run("dpkg", "-x", str(package), str(TOOLS))
    return f"unpacked below {TOOLS}"


def install_chromium() -> str:
    if os.getuid() != 0:
        return "not installed, which takes root: apt-get install chromium"
    apt_get("install", "-y", "--no-install-recommends", "chromium")
    return "installed"


def main() -> None:
    for what, is_there, bring in (
        ("prometheus", has("prometheus") and has("promtool"), unpack_prometheus),
        ("chromium", has(*BROWSERS), install_chromium),
    ):
        if is_there:
            continue
        try:
            print(f"{what}: {bring()}", flush=True)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stdout", "") or str(error)).strip().splitlines()
            print(f"{what}: could not be had: {said[-1] if said else error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
