"""Tiny random models: a directory that vLLM can serve, made once per configuration.

Run as a script it makes one: `python models.py NAME DIRECTORY`.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parent.parent / "tiny_models.json"
RECIPE = 1
"""To be raised when the weights of a given configuration change."""
WEIGHT_STD = 0.15
NEEDS_TORCHVISION = frozenset({"qwen35"})
"""Models whose code in vLLM imports torchvision, which the stub in tests/support/stubs then stands in for."""


def configs() -> dict[str, dict[str, Any]]:
    models = json.loads(CONFIGS.read_text())["models"]
    return {name: entry["config"] for name, entry in models.items()}


def model_path(name: str) -> Path:
    """The directory of the tiny model `name`; made when it is missing (some 15 s), always the same."""
    from harness.forks import forked_by_any
    from harness.paths import MODELS

    config = json.dumps([RECIPE, configs()[name]], sort_keys=True)
    path = MODELS / f"tiny-{name}-{hashlib.sha256(config.encode()).hexdigest()[:10]}"
    if path.is_dir():
        return path
    MODELS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODELS) as scratch:
        made = Path(scratch) / "model"
        with tempfile.TemporaryFile() as output:
            process = forked_by_any("engine", [name, str(made)], output.fileno()) or subprocess.Popen(
                [sys.executable, __file__, name, str(made)],
                env={**os.environ, "PYTHONPATH": "", "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            if process.wait() != 0:
                output.seek(0)
                raise RuntimeError(f"making the tiny model {name} failed:\n{output.read().decode()}")
        try:
            made.rename(path)
        except OSError:  # another process made it meanwhile
            if not path.is_dir():
                raise
    return path


def text_model_path(name: str) -> Path:
    """The tiny model `name`, or a directory, with a tokenizer: each byte of a text is a token. A directory
    that has one stays as it is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = Path(name) if os.path.isabs(name) else model_path(name)
    if (path / "tokenizer_config.json").exists():
        return path
    with_text = path.with_name(f"{path.name}-text")
    if not with_text.is_dir():
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            for file in path.iterdir():
                (made / file.name).symlink_to(Path("..") / path.name / file.name)
            letters = sorted(pre_tokenizers.ByteLevel.alphabet())
            tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.save(str(made / "tokenizer.json"))
            kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": letters[0]}
            (made / "tokenizer_config.json").write_text(json.dumps(kind))
            made.rename(with_text)
    return with_text


def make(name: str, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory.mkdir()
    config_file = directory / "config.json"
    config_file.write_text(json.dumps(configs()[name], indent=1))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            # A constant matrix would make the output independent of what passes through it.
            if parameter.ndim >= 2 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.normal_(0.0, WEIGHT_STD)
    model.save_pretrained(directory)
    config_file.write_text(json.dumps(configs()[name], indent=1))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
