"""The name that weights have by their content: equal on every machine, and another if a tensor changes."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lmcache_client.connector import weights
from lmcache_client.connector.translate import _weights_mark
from lmcache_client.connector.weights import Adapters, fingerprint

SHAPES = {"embedding": (512, 64), "layer.q": (64, 64), "layer.k": (16, 64), "norm": (3,)}


def tensors(**changed: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: tensor + changed.get(name.replace(".", "_"), 0.0) for name, tensor in made.items()}


def model(directory: Path, **changed: float) -> Path:
    directory.mkdir()
    save_file(tensors(**changed), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text("{}")
    return directory


def test_a_copy_at_another_path_and_of_another_time_has_the_same_name(tmp_path: Path) -> None:
    one = model(tmp_path / "one")
    other = shutil.copytree(one, tmp_path / "other")
    os.utime(other / "model.safetensors", (1, 1))
    assert fingerprint(one) == fingerprint(other) != ""
    assert fingerprint(one / "model.safetensors") == fingerprint(other / "model.safetensors")


@pytest.mark.parametrize("tensor", [name.replace(".", "_") for name in SHAPES])
def test_each_tensor_that_changes_gives_another_name(tmp_path: Path, tensor: str) -> None:
    one, other = model(tmp_path / "one"), model(tmp_path / "other", **{tensor: 0.5})
    sizes = [(path / "model.safetensors").stat().st_size for path in (one, other)]
    assert sizes[0] == sizes[1]
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("suffix", [".bin", ".pth"])
def test_a_torch_file_has_another_name_if_one_number_changes(tmp_path: Path, suffix: str) -> None:
    names = []
    for number in range(2):
        made = {"a": torch.zeros(1 << 20), "b": torch.zeros(9)}
        made["a"][777_777] = number
        torch.save(made, tmp_path / f"model{suffix}")
        names.append(fingerprint(tmp_path))
    assert names[0] != names[1]


def test_each_of_very_many_tensors_is_read(tmp_path: Path) -> None:
    many = {f"layers.{number}": torch.full((1024,), 1.0 + number) for number in range(6000)}
    save_file(many, tmp_path / "model.safetensors")
    before = fingerprint(tmp_path)
    for changed in ("layers.0", "layers.3001", "layers.5999"):
        save_file(many | {changed: many[changed] * 1.01}, tmp_path / "model.safetensors")
        assert fingerprint(tmp_path) != before, changed


def test_rows_in_the_middle_of_a_large_tensor_are_not_all_read_but_pages_all_over_it(tmp_path: Path) -> None:
    large = torch.zeros(8 << 20)
    names = set()
    for changed in range(0, 8 << 20, 1 << 20):
        one = large.clone()
        one[changed : changed + (1 << 20)] = 1.0
        save_file({"embedding": one}, tmp_path / "model.safetensors")
        names.add(fingerprint(tmp_path))
    assert len(names) == 8


@pytest.mark.parametrize("name", ["modeling_x.py", "model.tensors", "preprocessor_config.json"])
def test_every_file_of_the_directory_counts_except_hidden_ones(tmp_path: Path, name: str) -> None:
    path = model(tmp_path / "one")
    (path / name).write_text("a")
    before = fingerprint(path)
    (path / name).write_text("b")
    assert fingerprint(path) != before
    (path / name).write_text("a")
    (path / ".cache").mkdir()
    (path / ".gitattributes").write_text("b")
    assert fingerprint(path) == before


@pytest.mark.parametrize(
    "content",
    [b"", b"\x05", b"\xff" * 100, (2).to_bytes(8, "little") + b"{}", (4).to_bytes(8, "little") + b"null",
     (9).to_bytes(8, "little") + b'{"a": {}}', (99).to_bytes(8, "little") + b"{"],
)  # fmt: skip
def test_a_damaged_file_still_has_a_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert len(fingerprint(tmp_path)) == 64


def test_without_files_there_is_no_name(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) == fingerprint(tmp_path / "nothing") == ""


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Adapters:
    """Of a process that begins a year from now, so that all files of the test are older."""
    started_ns = weights._process_started_ns()
    monkeypatch.setattr(weights, "_process_started_ns", lambda: started_ns + 365 * 86_400 * 10**9)
    return Adapters()


def test_an_adapter_is_known_by_its_content(tmp_path: Path, adapters: Adapters) -> None:
    first = model(tmp_path / "first")
    key = adapters.key("a", str(first), 1)
    copied = shutil.copytree(first, tmp_path / "copy")
    assert key == adapters.key("b", str(copied), 2) == adapters.key("a", str(first), 3)
    (first / "config.json").write_text("other")
    assert adapters.key("a", str(first), 1) != key


def test_an_adapter_whose_files_changed_while_this_process_ran_is_its_own(tmp_path: Path) -> None:
    """vLLM may have loaded it before they changed, or may load it again."""
    first = model(tmp_path / "first")
    one, other = Adapters(), Adapters()
    keys = {
        one.key("a", str(first), 1), other.key("a", str(first), 1), one.key("a", str(first), 2),
        one.key("a", "org/adapter", 1), other.key("a", "org/adapter", 1),
    }  # fmt: skip
    assert len(keys) == 5
    assert one.key("a", str(first), 1) in keys
    (first / "config.json").write_text("other")
    assert one.key("a", str(first), 1) not in keys


def test_a_home_directory_is_found(
    tmp_path: Path, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = model(tmp_path / "first")
    assert adapters.key("a", "~/first", 1) == adapters.key("a", str(path), 1)


def configured(model: str, **changed: object) -> Any:
    """What `_weights_mark` reads of vLLM's configuration."""
    load = {"load_format": "auto", "download_dir": None} | {
        name: value for name, value in changed.items() if name in ("load_format", "download_dir")
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model, revision=None, model_weights=changed.get("model_weights", "")
        ),
        load_config=SimpleNamespace(**load),
        kv_transfer_config=SimpleNamespace(engine_id="e"),
    )


def mark(config: Any) -> str:
    return _weights_mark(config, config.model_config, config.load_config)


def test_weights_that_nobody_can_see_are_the_engines_own(tmp_path: Path) -> None:
    path = str(model(tmp_path / "one"))
    assert mark(configured(path)) == fingerprint(Path(path))
    own = [
        configured("org/nowhere"),
        configured(path, load_format="tensorizer"),
        configured(path, model_weights="s3://bucket/model"),
    ]
    assert [mark(each) for each in own] == ["of engine e"] * 3


def test_a_model_in_the_cache_of_its_hub_is_known_by_its_content(tmp_path: Path) -> None:
    """Two commits of one name differ, whatever the configuration says of its commit."""
    marks = []
    for commit, value in (("a" * 40, 0.0), ("b" * 40, 0.5)):
        repository = tmp_path / "models--org--model"
        (repository / "snapshots").mkdir(parents=True, exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        path = model(repository / "snapshots" / commit, norm=value)
        marks.append(mark(configured("org/model", download_dir=str(tmp_path))))
        assert marks[-1] == fingerprint(path)
    assert marks[0] != marks[1]
