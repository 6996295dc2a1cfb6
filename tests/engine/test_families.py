"""Every model family of vLLM that is not plain attention has a line that says how it is served.

It runs with each supported version of vLLM; the page is that of the version in between.
"""

import sys
from pathlib import Path

import pytest
from harness.models import configs
from vllm import __version__ as VLLM_VERSION

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "scripts"))

import hybrid_families as script  # noqa: E402

REGISTRY = '_MODELS = {{\n    "{0}": ("{1}", "{0}"),\n}}\n'


def test_no_family_of_this_vllm_is_unclassified() -> None:
    assert script.unclassified(script.vllm_root()) == []


def test_the_page_is_that_of_vllms_registry() -> None:
    version = VLLM_VERSION.partition("+")[0]
    if not version.startswith("0.32."):
        pytest.skip(f"the page is that of vLLM 0.32, and this is {version}")
    expected = script.page(script.vllm_root(), version)
    is_equal = (ROOT / "docs" / "families.md").read_text(encoding="utf-8") == expected
    assert is_equal, "run: python scripts/hybrid_families.py > docs/families.md"


def test_what_is_called_tested_has_a_tiny_model_in_the_matrix() -> None:
    cases = (ROOT / "tests" / "engine" / "test_models.py").read_text(encoding="utf-8")
    in_matrix = {
        architecture
        for name, config in configs().items()
        if f'"{name}": {{' in cases
        for architecture in config["architectures"]
    }
    for module, architectures in script.found(script.vllm_root()).items():
        is_tested = script.FAMILIES[module].state == script.TESTED
        assert is_tested == bool(in_matrix & set(architectures)), module


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("class New(nn.Module, HasInnerState, IsHybrid):\n", True),
        ("from .old import Old as Base\nclass New(\n    Base,\n    SupportsPP,\n):\n", True),
        (
            "class New(nn.Module):\n    def get_kv_cache_spec(self):\n        return NewSpec(block_size=1)\n",
            True,
        ),
        ("class New(nn.Module):\n    pass\n", False),
    ],
)
def test_a_new_family_is_found_and_the_message_says_what_to_do(
    tmp_path: Path, code: str, is_found: bool
) -> None:
    models = tmp_path / "model_executor" / "models"
    models.mkdir(parents=True)
    (models / "registry.py").write_text(REGISTRY.format("New", "new"))
    (models / "old.py").write_text("class Old(IsHybrid):\n    pass\n")
    (models / "new.py").write_text(code)
    problems = script.unclassified(tmp_path)
    assert len(problems) == is_found
    assert all(each.startswith("new (New) has") and "add a line to FAMILIES" in each for each in problems)
