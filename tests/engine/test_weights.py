"""The name that weights have by their content: equal on every machine, and another if a tensor changes."""

import hashlib
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from harness.waiting import wait_until
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from lmcache_client.connector import translate, weights
from lmcache_client.connector.weights import Adapters, fingerprint

SHAPES = {"embedding": (512, 64), "layer.q": (64, 64), "layer.k": (16, 64), "norm": (3,)}


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tensors(**changed: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: tensor + changed.get(name.replace(".", "_"), 0.0) for name, tensor in made.items()}


def model(directory: Path, **changed: float) -> Path:
    directory.mkdir()
    save_file(tensors(**changed), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text("{}")
    return directory


def test_a_name_is_of_the_content_alone(tmp_path: Path) -> None:
    one = model(tmp_path / "one")
    other = shutil.copytree(one, tmp_path / "other")
    os.utime(other / "model.safetensors", (1, 1))
    assert fingerprint(one) == fingerprint(other) != ""
    assert fingerprint(one / "model.safetensors") == fingerprint(other / "model.safetensors")
    for number, tensor in enumerate(name.replace(".", "_") for name in SHAPES):
        other = model(tmp_path / f"{number}", **{tensor: 0.5})
        sizes = [(path / "model.safetensors").stat().st_size for path in (one, other)]
        assert sizes[0] == sizes[1]
        assert fingerprint(one) != fingerprint(other), tensor
    empty = tmp_path / "empty"
    empty.mkdir()
    assert fingerprint(empty) == fingerprint(tmp_path / "nothing") == ""


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_each_byte_of_a_large_file_counts(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"model{suffix}"
    content = bytearray(os.urandom(9 << 20))
    names = set()
    for changed in (0, 1, 4_095, (4 << 20) - 1, 4 << 20, (4 << 20) + 5_000, 8_000_001, len(content) - 1):
        content[changed] ^= 1
        file.write_bytes(content)
        names.add(fingerprint(tmp_path))
    assert len(names) == 8


def test_a_large_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it changes: then nothing that was remembered counts."""
    read = []

    def counted(*arguments: object) -> "hashlib._Hash":
        read.append(arguments)
        return hashlib.sha256(*arguments)

    monkeypatch.setattr(weights, "hashlib", SimpleNamespace(sha256=counted))
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(2 << 20))
    names, reads = [], []
    for content in (None, None, b"\x01"):
        if content:
            with file.open("r+b") as opened:
                opened.write(content)
        read.clear()
        names.append(fingerprint(tmp_path))
        reads.append(read.count(()))
    assert names[0] == names[1] != names[2]
    assert reads == [1, 0, 1]
    (remembered, _) = sorted((tmp_path / "cache" / "lmcache-mp" / "digests").iterdir())
    remembered.write_text("garbage")
    assert fingerprint(tmp_path) == names[2]


def snapshot(cache: Path, commit: str, value: float) -> Path:
    """A model as a hub's cache has it: links to files that have their digests as names."""
    repository = cache / "models--org--model"
    linked = repository / "snapshots" / commit
    for directory in (linked, repository / "refs", repository / "blobs"):
        directory.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    for file in model(repository / commit, norm=value).iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        (linked / file.name).symlink_to(file.rename(blob))
    return linked


def test_a_hubs_cache_has_the_digest_as_the_name_of_its_file(tmp_path: Path) -> None:
    """So a copy of the file elsewhere has the same name, and this one is not read."""
    one, linked = model(tmp_path / "one"), snapshot(tmp_path, "a" * 40, 0.0)
    assert fingerprint(linked) == fingerprint(one)
    (linked / "model.safetensors").write_bytes(b"")
    assert fingerprint(linked) == fingerprint(one)


def test_a_file_that_changes_while_it_is_read_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(2 << 20))
    identity, asked = weights._identity, []

    def identity_then_change(of: Path) -> tuple[int, ...]:
        asked.append(of)
        found = identity(of)
        if len(asked) == 1:
            with file.open("ab") as opened:
                opened.write(b"more")
        return found

    monkeypatch.setattr(weights, "_identity", identity_then_change)
    assert fingerprint(tmp_path) == ""


def test_every_file_of_the_directory_counts_except_hidden_ones(tmp_path: Path) -> None:
    path = model(tmp_path / "one")
    for name in ("modeling_x.py", "model.tensors", "preprocessor_config.json"):
        (path / name).write_text("a")
        before = fingerprint(path)
        (path / name).write_text("b")
        assert fingerprint(path) != before, name
    before = fingerprint(path)
    (path / ".cache").mkdir()
    (path / ".gitattributes").write_text("b")
    assert fingerprint(path) == before


def test_directories_of_a_model_count_too(tmp_path: Path) -> None:
    """Some models have a part of their weights there. No adapter does."""
    path = model(tmp_path / "one")
    model(path / "audio")
    before, of_adapter = fingerprint(path, deep=True), fingerprint(path)
    assert before == fingerprint(shutil.copytree(path, tmp_path / "other"), deep=True)
    (path / "audio" / "config.json").write_text("other")
    assert len({before, of_adapter, fingerprint(path, deep=True)}) == 3
    assert fingerprint(path) == of_adapter
    before = fingerprint(path, deep=True)
    (path / ".hidden").symlink_to(tmp_path)
    assert fingerprint(path, deep=True) == before
    (path / "linked").symlink_to(tmp_path)
    assert fingerprint(path, deep=True) == ""


def test_a_directory_that_nobody_here_can_read_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As lost+found on a disk of its own. Root, who runs this, can read everything."""
    path = model(tmp_path / "one")
    before = fingerprint(path, deep=True)
    model(path / "lost+found")
    monkeypatch.setattr(os, "access", lambda place, _mode: place.name != "lost+found")
    assert fingerprint(path, deep=True) == before


def test_a_file_that_is_gone_from_a_directory_of_a_model_counts_as_a_change(tmp_path: Path) -> None:
    path = model(tmp_path / "one")
    model(path / "audio")
    started_ns = now_ns()
    assert fingerprint(path, started_ns, deep=True) != ""
    (path / "audio" / "config.json").unlink()
    assert fingerprint(path, started_ns, deep=True) == ""


def test_equal_numbers_and_times_do_not_make_two_files_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_identity", lambda _file: (1, 2, 3))
    names = set()
    for number in range(2):
        (tmp_path / "model.bin").write_bytes(bytes([number]) * (2 << 20))
        names.add(fingerprint(tmp_path / "model.bin"))
    assert len(names) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"\x05", b"\xff" * 100, (2).to_bytes(8, "little") + b"{}", (4).to_bytes(8, "little") + b"null",
     (9).to_bytes(8, "little") + b'{"a": {}}', (99).to_bytes(8, "little") + b"{"],
)  # fmt: skip
def test_a_damaged_file_still_has_a_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert len(fingerprint(tmp_path)) == 64


def now_ns() -> int:
    """A time after that of all files until now and before that of the next one: the clock of file times goes
    on in steps of some milliseconds."""
    time.sleep(0.05)
    now_ns = time.time_ns()
    time.sleep(0.05)
    return now_ns


def test_a_directory_that_took_the_place_of_another_is_not_older(tmp_path: Path) -> None:
    """Its files are, but vLLM may have loaded those of the other."""
    here, there = model(tmp_path / "here"), model(tmp_path / "there")
    started_ns = now_ns()
    assert weights.is_older(here, started_ns)
    assert weights.fingerprint(here, started_ns) == weights.fingerprint(here) != ""
    here.rename(tmp_path / "aside")
    there.rename(here)
    assert not weights.is_older(here, started_ns)
    assert weights.fingerprint(here, started_ns) == ""


def test_what_changes_while_it_is_read_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = model(tmp_path / "here")
    started_ns = now_ns()
    hashed = weights._digest

    def exchanged(file: Path) -> str:
        for each in here.iterdir():
            (tmp_path / "new").write_bytes(each.read_bytes() + b"1")
            os.utime(tmp_path / "new", (1, 1))
            (tmp_path / "new").rename(each)
        return hashed(file)

    assert weights.fingerprint(here, started_ns) != ""
    monkeypatch.setattr(weights, "_digest", exchanged)
    assert weights.fingerprint(here, started_ns) == ""


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process began a year from now, so that all files of the test are older."""
    started_ns = weights.process_started_ns() + 365 * 86_400 * 10**9
    for module in (weights, translate):
        monkeypatch.setattr(module, "process_started_ns", lambda: started_ns)


@pytest.mark.usefixtures("later")
def test_an_adapter_is_known_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "ADAPTER_WAIT_S", 60.0)  # however busy the machine is
    adapters, first = Adapters(), model(tmp_path / "first")
    key = adapters.key("a", str(first), 1)
    copied = shutil.copytree(first, tmp_path / "copy")
    assert key == adapters.key("b", str(copied), 2) == adapters.key("a", str(first), 3)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert adapters.key("a", "~/first", 1) == key
    (first / "config.json").write_text("other")
    assert adapters.key("a", str(first), 1) != key


@pytest.mark.usefixtures("later")
def test_an_adapter_that_is_read_for_long_is_its_own_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler, which asks, does not wait for it."""
    monkeypatch.setattr(weights, "ADAPTER_WAIT_S", 0.0)
    monkeypatch.setattr(weights, "SLOTS", slots := threading.Semaphore(0))
    adapters, first = Adapters(), model(tmp_path / "first")
    assert adapters.key("a", str(first), 1)[:2] == ("lora", "own")
    slots.release(100)
    wait_until(lambda: adapters.key("a", str(first), 1)[:2] == ("lora", "content"))


def test_an_adapter_that_cannot_be_reached_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM still has it in memory, and goes on."""

    def fails(_path: Path, **_: object) -> object:
        raise PermissionError(13, "Permission denied")

    first = model(tmp_path / "first")
    monkeypatch.setattr(Path, "stat", fails)
    assert Adapters().key("a", str(first), 1)[:2] == ("lora", "own")
    monkeypatch.setattr(Path, "expanduser", lambda _path: (_ for _ in ()).throw(RuntimeError("no home")))
    assert Adapters().key("a", "~/first", 1)[:2] == ("lora", "own")
    assert fingerprint(first) == ""


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


@pytest.mark.usefixtures("later")
def test_an_adapter_of_which_a_hub_has_brought_another_version_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM goes on with the version that it has loaded, also if that was removed meanwhile."""
    monkeypatch.setattr(weights, "ADAPTER_WAIT_S", 60.0)
    snapshots, here = tmp_path / "snapshots", [tmp_path / "snapshots" / "one"]
    monkeypatch.setattr(weights, "local_path", lambda _path: here[0])

    def brings(commit: str) -> None:
        blob = model(tmp_path / f"blobs of {commit}") / "config.json"
        blob.write_text(commit)
        (snapshots / commit).mkdir(parents=True)
        (snapshots / commit / "config.json").symlink_to(blob)
        here[0] = snapshots / commit

    brings("one")
    adapters = Adapters()
    first = adapters.key("a", "org/adapter", 1)
    assert first[:2] == ("lora", "content")
    shutil.rmtree(snapshots / "one")
    assert adapters.key("a", "org/adapter", 1)[:2] == ("lora", "own")
    brings("two")
    assert adapters.key("a", "org/adapter", 1)[:2] == ("lora", "own")
    assert Adapters().key("a", "org/adapter", 1)[:2] == ("lora", "content"), "another process loads this one"


def configured(model: str, load_format: str = "auto", **changed: Any) -> Any:
    """What `translate.weights` reads of vLLM's configuration."""
    load = {"load_format": load_format, "download_dir": changed.get("download_dir")}
    known: dict[str, Any] = {
        "model": model,
        "revision": None,
        "model_weights": changed.get("model_weights", ""),
        "seed": 7,
    }
    known["hf_config"] = SimpleNamespace(**changed.get("hf_config", {}))
    return SimpleNamespace(
        model_config=SimpleNamespace(**known),
        load_config=SimpleNamespace(**load),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(engine_id="e"),
        instance_id="life",
    )


def mark(config: Any, name: str = "") -> str:
    return dict(translate.weights(config, name))["weights"]


OWN = "of engine e life"


@pytest.mark.usefixtures("later")
def test_weights_that_nobody_can_see_are_the_engines_own(tmp_path: Path) -> None:
    path = str(model(tmp_path / "one"))
    assert mark(configured(path)) == fingerprint(Path(path))
    assert mark(configured("org/nowhere")) == OWN
    assert mark(configured(path, load_format="tensorizer")) == OWN
    assert mark(configured(path, model_weights="s3://bucket/model")) == OWN
    assert mark(configured(path, load_format="dummy")) == "dummy 7"


def test_weights_that_changed_after_the_process_began_are_the_engines_own_unless_named(
    tmp_path: Path,
) -> None:
    """vLLM may have loaded them before."""
    path = str(model(tmp_path / "one"))
    assert mark(configured(path)) == OWN
    assert mark(configured(path), "v17") == mark(configured("org/nowhere"), "v17") == "named v17"


@pytest.mark.usefixtures("later")
def test_a_model_in_the_cache_of_its_hub_is_known_by_its_content(tmp_path: Path) -> None:
    """Two commits of one name differ, whatever the configuration says of its commit."""
    marks = []
    for commit, value in (("a" * 40, 0.0), ("b" * 40, 0.5)):
        path = snapshot(tmp_path, commit, value)
        marks.append(mark(configured("org/model", download_dir=str(tmp_path))))
        assert marks[-1] == fingerprint(path)
    assert marks[0] != marks[1]


@pytest.mark.usefixtures("later")
def test_a_model_of_which_the_hub_has_more_files_is_known_by_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM brings only some. A hub's client that knows the others calls the model incomplete."""
    path = snapshot(tmp_path, "a" * 40, 0.0)
    more = {"picture.png": {"size": 1, "blob_id": "c" * 40}}
    trees = path.parents[1] / "trees"
    trees.mkdir()
    (trees / f"{'a' * 40}.json").write_text(json.dumps({"format_version": 1, "files": more}))
    with pytest.raises(LocalEntryNotFoundError):
        snapshot_download("org/model", cache_dir=tmp_path, local_files_only=True)
    assert mark(configured("org/model", download_dir=str(tmp_path))) == fingerprint(path)

    def of_this_cache(name: str, **given: Any) -> str:
        return str(snapshot_download(name, **{**given, "cache_dir": tmp_path}))

    monkeypatch.setattr(weights, "snapshot_download", of_this_cache)
    monkeypatch.setattr(weights, "ADAPTER_WAIT_S", 60.0)
    # Of an adapter, vLLM may not have brought the rest yet.
    assert Adapters().key("a", "org/model", 1)[:2] == ("lora", "own")
    (path / "picture.png").write_bytes(b"a")
    assert Adapters().key("a", "org/model", 1)[:2] == ("lora", "content")


@pytest.mark.usefixtures("later")
def test_weights_that_a_configuration_takes_from_elsewhere_are_in_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text = str(model(tmp_path / "one")), model(tmp_path / "text")
    of_both = configured(path, hf_config={"text_model_id": str(text), "audio_model_id": None})
    before = mark(of_both)
    assert before not in (OWN, mark(configured(path)))
    (text / "config.json").write_text("other")
    assert mark(of_both) not in (OWN, before)
    shutil.rmtree(text)
    assert mark(of_both) == OWN
    snapshot(tmp_path, "a" * 40, 0.0)
    of_hub = configured("org/model", download_dir=str(tmp_path))
    assert mark(of_hub) != OWN
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert mark(of_hub) == OWN, "vLLM takes it from another hub"
    assert mark(configured(path)) != OWN


def test_no_other_model_takes_weights_from_elsewhere() -> None:
    """If this fails, vLLM has a model that names further weights: see OTHER_SOURCES."""
    models = Path(vllm.__file__).parent / "model_executor" / "models"
    sources = {
        found.strip()
        for file in models.rglob("*.py")
        for found in re.findall(r"model_or_path=([^,)]+)", file.read_text())
    }
    own = {"model_config.model", "vllm_config.model_config.model"}
    assert sources - own == {f"config.{entry}" for entry in translate.OTHER_SOURCES}


def test_what_a_hub_has_just_brought_is_known_while_there_is_no_other_commit(tmp_path: Path) -> None:
    """Of two, vLLM may have loaded the older one."""
    path = snapshot(tmp_path, "a" * 40, 0.0)
    assert mark(configured("org/model", download_dir=str(tmp_path))) == fingerprint(path)
    other = snapshot(tmp_path, "b" * 40, 0.5)
    assert mark(configured("org/model", download_dir=str(tmp_path))) == OWN
    # Where the hub has no links, somebody may have changed the file.
    shutil.rmtree(path)
    (other / "config.json").unlink()
    (other / "config.json").write_text("{}")
    assert mark(configured("org/model", download_dir=str(tmp_path))) == OWN
