"""The connector's keys, and the documents' examples of them."""

import json
import re

import pytest
from harness.paths import ROOT
from msgspec import structs

from lmcache_client.connector.settings import PREFIX, Settings, parse


def test_the_documents_name_every_key_with_its_default() -> None:
    page = (ROOT / "docs/connector.md").read_text()
    rows = dict(re.findall(r"\| `(lmcache\.mp\.\w+)` \| ([^|]+) \|", page))
    for name, default in structs.asdict(Settings()).items():
        shown = rows.pop(PREFIX + name).strip()
        number = f"{default:g}" if isinstance(default, float) else str(default).lower()
        assert shown == ("(Unix socket)" if name == "host" else number)
    assert not rows


def test_the_configurations_in_the_documents_are_accepted() -> None:
    text = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    examples = re.findall(r"--kv-transfer-config '(\{.*?\})'\n", text, re.DOTALL)
    assert len(examples) >= 5
    assert sum("tcp://" in example for example in examples) >= 1
    for example in examples:
        config = json.loads(example)
        assert config["kv_connector"] == "LMCacheMPConnector"
        settings, ignored = parse(config.get("kv_connector_extra_config", {}))
        assert not ignored
        assert settings.address.startswith(("ipc://", "tcp://127.0.0.1:5556"))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, Settings()),
        (
            {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": "6000"},
            Settings("tcp://localhost", 6000),
        ),
        ({"lmcache.mp.lookup_timeout_s": 2, "somebody.else": 1}, Settings(lookup_timeout_s=2.0)),
        ({"lmcache.mp.strict_resume_points": True}, Settings(strict_resume_points=True)),
    ],
)
def test_keys(extra: dict[str, object], expected: Settings) -> None:
    assert parse(extra) == (expected, [])


def test_keys_of_lmcache_that_mean_nothing_here_are_named() -> None:
    assert parse({"lmcache.mp.mq_timeout": 20}) == (Settings(), ["lmcache.mp.mq_timeout"])


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"lmcache.mp.prot": 1}, "unknown key 'lmcache.mp.prot'"),
        (
            {"lmcache.mp.port": "many"},
            "lmcache.mp.port in kv_connector_extra_config is 'many': expected `int`",
        ),
        ({"lmcache.mp.port": -1}, "is -1: expected `int` >= 1"),
        ({"lmcache.mp.load_timeout_s": True}, "is True: expected `float`"),
        ({"lmcache.mp.strict_resume_points": "yes"}, "is 'yes': expected `bool`"),
    ],
)
def test_bad_keys_are_refused_with_a_sentence(extra: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse(extra)
