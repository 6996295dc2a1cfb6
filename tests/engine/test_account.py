"""The account of what is in the name of the bytes: complete for this version of vLLM, and true."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config
from hypothesis import given
from hypothesis import strategies as st
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as specs

from lmcache_client.connector import account as module
from lmcache_client.connector import translate
from lmcache_client.connector.account import OF_FILE, VARIABLES, account, named, text, variables

OWN = "of engine 1"
REASONS = "not named, because"
SPECS = [
    each
    for each in vars(specs).values()
    if isinstance(each, type) and issubclass(each, specs.KVCacheSpec) and dataclasses.is_dataclass(each)
]
CONFIGS = [
    getattr(vllm.config, name, None) or getattr(specs, name)
    for name in account()
    if name not in (VARIABLES, "KVCacheSpec")
]


def entries(kind: str) -> dict[str, list[str]]:
    """How the table treats each field of a class: the lists and reasons that name it."""
    found: dict[str, list[str]] = {}
    lists = {how: names for how, names in account()[kind].items() if how != REASONS}
    for how, names in {**lists, **account()[kind].get(REASONS, {})}.items():
        for name in names:
            found.setdefault(name, []).append(how)
    return found


def kind_of(cls: type) -> str:
    return "KVCacheSpec" if cls in SPECS else cls.__name__


def with_defaults(cls: type) -> Any:
    """An instance in which each field has vLLM's default."""
    made = object.__new__(cls)
    for field in dataclasses.fields(cls):
        object.__setattr__(made, field.name, module._default(field))
    return made


FIELDS = [(cls, field.name) for cls in (*CONFIGS, *SPECS) for field in dataclasses.fields(cls)]


def test_every_field_of_this_vllm_is_accounted_for_once() -> None:
    """One that is missing is new. If it can change a byte of a page, write it under "named", otherwise below
    the sentence that says why it cannot."""
    assert {VllmConfig, specs.MambaSpec} <= {cls for cls, _ in FIELDS}
    assert len(FIELDS) > 300
    assert len(envs.environment_variables) > 200
    missing = [f"{cls.__name__}.{name}" for cls, name in FIELDS if name not in entries(kind_of(cls))]
    missing += sorted(set(envs.environment_variables) - set(entries(VARIABLES)))
    assert not missing
    twice = {(kind, name): how for kind in account() for name, how in entries(kind).items() if len(how) > 1}
    assert not twice


FOUND = {
    "ModelConfig": ("dtype", "quantization", "quantization_config", "model_impl", "model_class_overrides"),
    "DeviceConfig": ("device_type",),
    "CacheConfig": ("cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
    "MultiModalConfig": ("mm_processor_kwargs", "video_pruning_rate", "video_pruning_method"),
    "AttentionConfig": ("backend",),
    "ParallelConfig": ("decode_context_parallel_size", "cp_kv_cache_interleave_size"),
    "KVCacheSpec": ("dtype", "dtypes", "shapes", "head_size", "kv_quant_mode", "dcp_sharded"),
    VARIABLES: ("VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_KV_CACHE_LAYOUT"),
}
"""Where engines were seen, or are known, to have other bytes."""


def test_the_table_is_well_formed_and_names_what_was_seen_to_change_bytes() -> None:
    for kind, names in FOUND.items():
        for name in names:
            assert set(entries(kind)[name]) <= {"named", OF_FILE}, f"{kind}.{name}"
    for reason in {reason for each in account().values() for reason in each.get(REASONS, {})}:
        assert reason.endswith("."), reason
        assert len(reason.split()) > 4, reason
    # Every part is a configuration of which the table has the fields.
    for cls in CONFIGS:
        for part in account()[cls.__name__].get("parts", ()):
            kind = "".join(word.title() for word in part.split("_")).replace("Lora", "LoRA")
            assert kind.replace("Multimodal", "MultiModal") in account(), part


def test_a_field_changes_the_name_if_and_only_if_it_is_named() -> None:
    for cls, name in FIELDS:
        if name in account()[kind_of(cls)].get("parts", ()):
            continue
        config = with_defaults(cls)
        before = dict(named(config, OWN))
        is_file = OF_FILE in entries(kind_of(cls)).get(name, ())
        for value in ("another",) if is_file else ("another", ["a", 1], 77.5):
            object.__setattr__(config, name, value)
            after = dict(named(config, OWN))
            has_changed = after != before
            is_named = set(entries(kind_of(cls)).get(name, ["named"])) <= {"named", OF_FILE}
            assert has_changed == is_named, f"{cls.__name__}.{name}"


def test_a_field_of_a_part_and_one_that_the_table_does_not_know_are_named() -> None:
    config = with_defaults(VllmConfig)
    config.model_config = with_defaults(vllm.config.ModelConfig)
    config.model_config.multimodal_config = with_defaults(vllm.config.MultiModalConfig)
    config.model_config.multimodal_config.video_pruning_rate = 0.5
    assert dict(named(config, OWN))["model_config.multimodal_config.video_pruning_rate"] == "0.5"

    @dataclasses.dataclass
    class CacheConfig:
        block_size: int = 1
        brand_new: int = 2

    assert dict(named(CacheConfig(3, 2), OWN)) == {}
    assert dict(named(CacheConfig(3, 4), OWN)) == {"brand_new": "4"}


def test_a_variable_changes_the_name_if_and_only_if_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in envs.environment_variables:
        monkeypatch.delenv(name, raising=False)
    assert not list(variables(envs.environment_variables, OWN))
    file = tmp_path / "file"
    file.write_text("content")
    for name in envs.environment_variables:
        monkeypatch.setenv(name, str(file))
        is_named = set(entries(VARIABLES)[name]) <= {"named", OF_FILE}
        assert len(list(variables(envs.environment_variables, OWN))) == is_named, name
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_BRAND_NEW", "1")
    assert dict(variables([*envs.environment_variables, "VLLM_BRAND_NEW"], OWN)) == {"VLLM_BRAND_NEW": "'1'"}


def test_of_a_file_the_content_counts_and_not_the_place(tmp_path: Path) -> None:
    def said(path: Path) -> dict[str, str]:
        config = with_defaults(vllm.config.MultiModalConfig)
        config.mm_encoder_fp8_scale_path = str(path)
        return dict(named(config, OWN))

    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    other.write_text("1")
    assert said(one) == said(other) != {}
    other.write_text("2")
    assert said(one) != said(other)
    assert said(tmp_path / "nothing") == {"mm_encoder_fp8_scale_path": OWN}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """Python takes 1, 1.0 and True for equal."""
    if isinstance(value, dict):
        return {name: typed(each) for name, each in value.items()}
    return [typed(each) for each in value] if isinstance(value, list) else (type(value), str(value))


@given(values, values)
def test_only_equal_values_have_one_text(one: Any, other: Any) -> None:
    assert (text(one, OWN) == text(other, OWN)) == (typed(one) == typed(other))


def test_the_order_of_a_set_or_of_entries_does_not_count() -> None:
    for order in itertools.permutations(["a", "b", "c"]):
        assert text(dict.fromkeys(order), OWN) == text(dict.fromkeys("abc"), OWN)
        assert text(set(order), OWN) == text(frozenset("abc"), OWN)


def test_of_a_long_value_the_digest_is_named_and_one_that_nobody_can_compare_is_the_engines_own() -> None:
    config = with_defaults(VllmConfig)
    names = set()
    for long in ("a" * 5000, "a" * 5001):
        config.additional_config = {"x": long}
        said = dict(named(config, OWN))["additional_config"]
        assert len(said) < 100
        names.add(said)
    assert len(names) == 2
    config = with_defaults(vllm.config.ModelConfig)
    config.quantization_config = object()
    assert dict(named(config, OWN)) == {"quantization_config": OWN}
    assert OWN in text({"a": [object()]}, OWN)


def configured() -> Any:
    config = with_defaults(VllmConfig)
    for part in ("model", "parallel", "device", "cache", "load"):
        cls = getattr(vllm.config, f"{part.title()}Config")
        setattr(config, f"{part}_config", with_defaults(cls))
    config.device_config.device_type = "cpu"
    config.model_config.model, config.model_config.dtype = "model", torch.bfloat16
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"layers": 2})
    return config


Change = Callable[[pytest.MonkeyPatch, Any], object]
SURROUNDINGS: dict[str, Change] = {
    "configuration": lambda _, config: setattr(
        config.model_config, "hf_config", SimpleNamespace(to_dict=lambda: {"layers": 3})
    ),
    "vllm": lambda patch, _: patch.setattr(translate, "VLLM_VERSION", "0.99"),
    "library": lambda patch, _: patch.setattr(translate, "_loaded_library", lambda: "_C_other"),
    "processor": lambda patch, _: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER"),
    "fp8": lambda patch, _: patch.setattr(
        type(current_platform), "fp8_dtype", classmethod(lambda _cls: torch.float8_e5m2)
    ),
    "adapters": lambda _, config: setattr(config, "lora_config", adapters(target_modules=["q_proj"])),
    "adapters ": lambda _, config: setattr(config, "lora_config", adapters(lora_dtype=torch.float32)),
    "quantization_config_file": lambda _, config: setattr(
        config.model_config, "hf_overrides", {"quantization_config_file": "/nowhere"}
    ),
}


def adapters(**changed: Any) -> Any:
    config = with_defaults(vllm.config.LoRAConfig)
    for name, value in changed.items():
        setattr(config, name, value)
    return config


def test_what_no_configuration_says_changes_the_name() -> None:
    before = dict(translate.model_tag(configured()).details)
    for detail, change in SURROUNDINGS.items():
        config = configured()
        with pytest.MonkeyPatch.context() as patch:
            change(patch, config)
            after = dict(translate.model_tag(config).details)
        assert before.get(detail.strip()) != after[detail.strip()], detail


def test_the_length_of_the_context_counts_where_a_rotary_embedding_depends_on_it() -> None:
    tags = set()
    for embedding, length in itertools.product(("default", "longrope"), (1024, 4096)):
        config = configured()
        config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"layers": 2}, rope=embedding)
        config.model_config.max_model_len = length
        tags.add(translate.model_tag(config))
    assert len(tags) == 3
