"""Gets the programs that some tests need and PyPI does not have, on Debian and its derivatives.

Prometheus is unpacked below .cache/tools, not installed: its package would start a daemon. So are the
libraries that Mooncake needs. Chromium has too many dependencies for that, so root installs it. Azurite comes
from npm, where there is npm. The script prints a line for each program and never fails: a test without its
program says so itself (tests/support/harness/tools.py).
"""

import ctypes.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(os.environ.get("LMCACHE_TEST_CACHE") or ROOT / ".cache") / "tools"
LIBRARIES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200", "libnuma1")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 900


def run(*command: str, directory: Path = ROOT) -> None:
    """Raises OSError, or subprocess.SubprocessError with the command's output."""
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
    """Run apt-get. If it fails, root tries again after `apt-get update`: new machines lack package lists."""
    command = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120", *arguments)
    try:
        run(*command, directory=directory)
    except subprocess.CalledProcessError:
        if os.getuid() != 0:
            raise
        run("apt-get", "-qq", "update")
        run(*command, directory=directory)


def has(*names: str) -> bool:
    places = (str(TOOLS / "usr" / "bin"), str(TOOLS / "azurite" / "node_modules" / ".bin"), None)
    return any(shutil.which(name, path=place) for name in names for place in places)


def unpack_prometheus() -> str:
    with tempfile.TemporaryDirectory() as download:
        apt_get("download", "prometheus", directory=Path(download))
        package = next(Path(download).glob("*.deb"))
        TOOLS.mkdir(parents=True, exist_ok=True)
        run("dpkg", "-x", str(package), str(TOOLS))
    return f"unpacked below {TOOLS}"


def unpack_libraries() -> str:
    with tempfile.TemporaryDirectory() as download:
        apt_get("download", *LIBRARIES, directory=Path(download))
        TOOLS.mkdir(parents=True, exist_ok=True)
        for package in Path(download).glob("*.deb"):
            run("dpkg", "-x", str(package), str(TOOLS))
    return f"unpacked below {TOOLS}"


def has_libraries() -> bool:
    return bool(ctypes.util.find_library("ibverbs")) or any(TOOLS.glob("usr/lib/*/libibverbs.so.1"))


def install_chromium() -> str:
    if os.getuid() != 0:
        return "not installed: run `apt-get install chromium` as root"
    apt_get("install", "-y", "--no-install-recommends", "chromium")
    return "installed"


def install_azurite() -> str:
    if not has("npm"):
        return "not installed: there is no npm"
    run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(TOOLS / "azurite"), "azurite@3")
    return f"installed in {TOOLS / 'azurite'}"


def main() -> None:
    for program, is_there, install in (
        ("the libraries of Mooncake", has_libraries(), unpack_libraries),
        ("prometheus", has("prometheus") and has("promtool"), unpack_prometheus),
        ("azurite", has("azurite-blob"), install_azurite),
        ("chromium", has(*BROWSERS), install_chromium),
    ):
        if is_there:
            continue
        try:
            print(f"{program}: {install()}", flush=True)
        except (OSError, subprocess.SubprocessError) as error:
            output = (getattr(error, "stdout", "") or str(error)).strip().splitlines()
            reason = output[-1] if output else error
            print(f"{program}: could not be installed: {reason}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
