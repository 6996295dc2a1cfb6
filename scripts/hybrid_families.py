"""Writes docs/families.md: each model family of vLLM that keeps more than the keys and values of attention,
and whether the tests serve it.

    python scripts/hybrid_families.py > docs/families.md

vLLM is read, never imported: its registry names the module of each architecture, and the module says whether
its layers are recurrent or ask for a KV cache of their own. A module without a line in FAMILIES is an error.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import util
from pathlib import Path
from typing import NamedTuple

RECURRENT = frozenset({"IsHybrid", "IsAttentionFree", "HasInnerState"})
"""The marks of vLLM's interfaces.py on a class whose model has recurrent layers."""
ENTRY = re.compile(r'"(\w+)": \(\s*"([\w.]+)",\s*"(\w+)",?\s*\)')
CLASS = re.compile(r"^class (\w+)\((.*?)\):", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^from ([\w.]+) import (\([^)]*\)|[^\n(]+)", re.MULTILINE)
SPECS = re.compile(r"^    def get_kv_cache_spec\(.*?(?=^    (?:def|@)|^\S|\Z)", re.MULTILINE | re.DOTALL)

TESTED, SAME, STORED, REFUSED, NO_CPU = "tested", "same layers", "stored bytes", "not cached", "not run"
MEANING = {
    TESTED: "A tiny random model of this family is served in a real engine, bit for bit.",
    SAME: "The layers that have a cache are those of a tested family. This family itself has not run.",
    STORED: "Tests compare bytes, not answers, because vLLM cannot resume this kind of attention on the "
    "processors of the tests. The connector caches it on GPUs. Check it with `lmcache verify` first.",
    REFUSED: "The connector does not cache it. The engine runs without a cache.",
    NO_CPU: "vLLM's CPU backend cannot run it, so nothing has been tested. The connector caches it, because "
    "vLLM manages its layers as those of tested families. Check it with `lmcache verify` first.",
}
KDA = "Its layers (KDA) need the Triton kernel `chunk_kda`, which has no CPU version."
LEFT_OUT = "hybrid-models.md#groups-of-one-request"
GPU = "vLLM has this model for GPUs only."
RING = (
    f"{GPU} Its ring of keys that are not compressed yet is [left out]({LEFT_OUT}). "
    "Only tiny models with such a ring have run."
)

V3 = (
    "Engines store V2 as it was computed. The indexer's keys of V3.2 are further pages of the same group; no "
    "engine has run it with the cache."
)
V4 = (
    "Its pages are found and its windows resume as in vLLM's own code. No engine has run it with the cache: "
    "on CPUs it needs AMX."
)
V41 = (
    f"{GPU} Its ring and its replayed windows are [left out]({LEFT_OUT}). "
    "Only a tiny model with such groups has run."
)


class Family(NamedTuple):
    title: str
    layers: str
    state: str
    why: str = ""


FAMILIES: dict[str, Family] = {
    "alice_ai": Family("Alice AI", "KDA, full", NO_CPU, KDA),
    "bailing_moe_linear": Family(
        "Bailing 2.5", "linear attention, MLA", NO_CPU, "It needs vLLM's Triton kernels for linear attention."
    ),
    "bailing_moe_v3": Family("Bailing 3", "KDA, MLA", NO_CPU, KDA),
    "bailing_moe_v3_vl": Family("Bailing 3 VL", "KDA, MLA", NO_CPU, KDA),
    "clef_flash": Family("Clef Flash", "Gated DeltaNet, full", SAME, "As Qwen3.5."),
    "colbert": Family("ColBERT on LFM2", "short convolution, full", SAME, "As LFM2. It makes embeddings."),
    "colqwen3_5": Family("ColQwen 3.5", "Gated DeltaNet, full", SAME, "As Qwen3.5. It makes embeddings."),
    "deepseek_v2": Family("DeepSeek-V2, V3, V3.2", "MLA, indexer of V3.2", STORED, V3),
    "extract_hidden_states": Family(
        "hidden states", "hidden states as a cache", REFUSED, "Groups of type `HiddenStateCacheSpec`."
    ),
    "falcon_h1": Family("Falcon-H1", "Mamba-2, full", TESTED),
    "granitemoehybrid": Family("Granite 4", "Mamba-2, full", TESTED),
    "interns2_mobius": Family("Intern-S2 Mobius", "Gated DeltaNet, full", SAME, "As Qwen3.5."),
    "interns2_preview": Family("Intern-S2", "Gated DeltaNet, full", SAME, "As Qwen3.5."),
    "jamba": Family(
        "Jamba", "Mamba, full", NO_CPU, "It needs the kernel `selective_scan_fwd`, which has no CPU version."
    ),
    "lfm2": Family("LFM2", "short convolution, full", TESTED),
    "lfm2_moe": Family("LFM2 MoE", "short convolution, full", TESTED),
    "lfm2_vl": Family("LFM2-VL", "short convolution, full", SAME, "As LFM2."),
    "mamba": Family("Mamba, Falcon-Mamba", "Mamba", NO_CPU, "As Jamba."),
    "mamba2": Family("Mamba-2", "Mamba-2", TESTED),
    "minicpm_ocr": Family("MiniCPM-OCR", "Gated DeltaNet, full", SAME, "As Qwen3.5."),
    "minicpmv4_6": Family("MiniCPM-V 4.6", "Gated DeltaNet, full", SAME, "As Qwen3.5."),
    "minicpmv4_7": Family("MiniCPM-V 4.7", "Gated DeltaNet, full", SAME, "As Qwen3.5."),
    "nano_nemotron_vl": Family("Nemotron Nano VL", "Mamba-2, full", SAME, "As Nemotron-H."),
    "nemotron_h": Family("Nemotron-H", "Mamba-2, full", TESTED, "Without its MoE layers: they need a GPU."),
    "olmo_hybrid": Family(
        "OLMo Hybrid",
        "Gated DeltaNet, full",
        NO_CPU,
        "Its own Gated DeltaNet needs Triton (`set_allocator`).",
    ),
    "qwen3_5": Family("Qwen3.5", "Gated DeltaNet, full", TESTED),
    "qwen3_next": Family("Qwen3-Next", "Gated DeltaNet, full", TESTED),
    "terratorch": Family("Terratorch", "none", REFUSED, "It generates no text and has no KV cache."),
    "zamba2": Family("Zamba2", "Mamba-2, full", TESTED),
    "models.deepseek_v4": Family("DeepSeek-V4", "MLA (compressed), windows of MLA", STORED, V4),
    "models.deepseek_v41": Family("DeepSeek-V4.1", "as V4, replayed windows, ring", NO_CPU, V41),
    "models.glm5next": Family("GLM-5 Next", "recurrent, MLA, ring", NO_CPU, RING),
    "models.inkling": Family("Inkling", "sliding window, full", NO_CPU, GPU),
    "models.kimi_k3": Family("Kimi Linear, Kimi K3", "KDA, MLA", NO_CPU, KDA),
    "models.minimax_m3": Family("MiniMax-M3", "full, indexer", NO_CPU, GPU),
    "models.qwen4_exp": Family("Qwen4 Exp", "Gated DeltaNet, full, ring", NO_CPU, RING),
    "models.step5": Family("Step 5", "full, ring", NO_CPU, RING),
}


def vllm_root() -> Path:
    spec = util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


class _Module:
    """What the files of a module below vllm/ say; a package has one file for each maker of GPUs."""

    def __init__(self, root: Path, name: str) -> None:
        path = root.joinpath(*name.split("."))
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        self.classes: dict[str, set[str]] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        self.specs: set[str] = set()
        for file in filter(Path.is_file, files):
            text = file.read_text(encoding="utf-8")
            package = file.relative_to(root).parts[:-1]
            for name, bases in CLASS.findall(text):
                self.classes.setdefault(name, set()).update(re.findall(r"\w+", bases))
            for source, names in IMPORT.findall(text):
                dots = len(source) - len(source.lstrip("."))
                above = ".".join(package[: len(package) + 1 - dots]) + "." if dots else ""
                full = (above + source.lstrip(".")).removeprefix("vllm.")
                for original, alias in re.findall(r"(\w+)(?: as (\w+))?", re.sub(r"#.*", "", names)):
                    self.imports[alias or original] = full, original
            for body in SPECS.findall(text):
                self.specs.update(re.findall(r"\b\w+Spec(?=\()", body))


@cache
def _module(root: Path, name: str) -> _Module:
    return _Module(root, name)


def registered(root: Path) -> Iterator[tuple[str, str, str]]:
    """Architecture, module below vllm/ and class of each entry in vLLM's registry."""
    text = (root / "model_executor" / "models" / "registry.py").read_text(encoding="utf-8")
    for architecture, module, name in ENTRY.findall(text):
        is_full = module.startswith("vllm.")
        yield (
            architecture,
            module.removeprefix("vllm.") if is_full else f"model_executor.models.{module}",
            name,
        )


def is_recurrent(root: Path, module: str, name: str) -> bool:
    """Whether a class or one of its bases carries one of vLLM's marks."""
    bases = _module(root, module).classes.get(name, set())
    origins = (_module(root, module).imports.get(base, (module, base)) for base in bases - {name})
    return bool(bases & RECURRENT) or any(is_recurrent(root, *origin) for origin in origins)


def found(root: Path) -> dict[str, list[str]]:
    """The modules that need a line in FAMILIES, with their architectures."""
    result: dict[str, list[str]] = {}
    for architecture, module, name in registered(root):
        if is_recurrent(root, module, name) or _module(root, module).specs:
            result.setdefault(module.removeprefix("model_executor.models."), []).append(architecture)
    return result


def unclassified(root: Path) -> list[str]:
    """One sentence for each module that has no line in FAMILIES; it says what to do."""
    return [
        f"{module} ({', '.join(architectures)}) has recurrent layers or a KV cache of its own: add a tiny "
        "configuration of it to tests/support/tiny_models.json and a line to CASES in "
        "tests/engine/test_models.py, see whether vLLM runs it on a CPU, and add a line to FAMILIES in "
        "scripts/hybrid_families.py"
        for module, architectures in sorted(found(root).items())
        if module not in FAMILIES
    ]


def page(root: Path, version: str) -> str:
    rows = dict.fromkeys(MEANING, "")
    for module, architectures in sorted(
        found(root).items(), key=lambda each: FAMILIES[each[0]].title.lower()
    ):
        title, layers, state, why = FAMILIES[module]
        names = ", ".join(f"`{each}`" for each in sorted(set(architectures)))
        rows[state] += f"| {title} | {layers} | {names} | {why} |\n"
    intro = (
        f"This page lists each model family of vLLM {version} that has recurrent layers or a KV cache of its "
        "own. All other families have full attention, MLA, sliding windows or chunked-local attention: "
        "[What was tested](tested.md#models) says how these are tested. "
        "`scripts/hybrid_families.py` writes this page from vLLM's registry, and a test fails when a new "
        "version of vLLM has a family that is missing here."
    )
    parts = [f"# Model families\n\n{textwrap.fill(intro, 118)}\n"]
    for state, meaning in MEANING.items():
        if rows[state]:
            head = "| family | layers | architectures | remark |\n|---|---|---|---|\n"
            parts.append(f"\n## {state.capitalize()}\n\n{textwrap.fill(meaning, 118)}\n\n{head}{rows[state]}")
    return "".join(parts)


def main() -> None:
    if missing := unclassified(vllm_root()):
        sys.exit("\n".join(missing))
    from importlib import metadata

    (name,) = set(metadata.packages_distributions()["vllm"])
    sys.stdout.write(page(vllm_root(), metadata.version(name).partition("+")[0]))


if __name__ == "__main__":
    main()
