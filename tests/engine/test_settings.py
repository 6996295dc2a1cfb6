"""The connector's keys, and the documents' examples of them."""

import json
import re
from types import SimpleNamespace

import pytest
from harness.paths import ROOT
from msgspec import structs

from lmcache_client.connector.rank_servers import RankServer, rank_servers
from lmcache_client.connector.settings import PREFIX, Settings, parse
from lmcache_client.connector.support import on_joined
from lmcache_client.contract.geometry import FULL, RECURRENT, GroupSpec
from lmcache_client.contract.messages import Joined


def test_the_documents_name_every_key_with_its_default() -> None:
    page = (ROOT / "docs/connector.md").read_text()
    rows = dict(re.findall(r"\| `(lmcache\.mp\.\w+)` \| ([^|]+) \|", page))
    for name, default in structs.asdict(Settings()).items():
        shown = rows.pop(PREFIX + name).strip()
        number = f"{default:g}" if isinstance(default, float) else str(default).lower()
        assert shown == {"host": "(Unix socket)", "key_file": "(none)", "weights_name": "(none)"}.get(
            name, number
        )
    assert not rows


def test_the_configurations_in_the_documents_are_accepted() -> None:
    text = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    examples = re.findall(r"--kv-transfer-config '(\{.*?\})'\n", text, re.DOTALL)
    assert len(examples) >= 5
    assert sum("tcp://" in example for example in examples) >= 1
    for example in examples:
        config = json.loads(example)
        if config["kv_connector"] == "MultiConnector":
            config = config["kv_connector_extra_config"]["connectors"][1]
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
    ignored = {**extra, "lmcache.mp.mq_timeout": 20}
    assert parse(ignored) == (expected, ["lmcache.mp.mq_timeout"]), "keys of LMCache that mean nothing here"


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"prot": 1}, "unknown key 'lmcache.mp.prot'"),
        ({"port": "many"}, "lmcache.mp.port in kv_connector_extra_config is 'many': expected `int`"),
        ({"port": -1}, "is -1: expected `int` >= 1"),
        ({"load_timeout_s": True}, "is True: expected `float`"),
        ({"strict_resume_points": "yes"}, "is 'yes': expected `bool`"),
        ({"servers": "h:1"}, "lmcache.mp.servers in kv_connector_extra_config is 'h:1'"),
        ({"servers": {"0": 5555}}, "is {'0': 5555}: expected `str`"),
    ],
)
def test_bad_keys_are_refused_with_a_sentence(extra: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse({f"lmcache.mp.{name}": value for name, value in extra.items()})


def test_servers_are_given_to_ranks() -> None:
    assert [each.ranks for each in rank_servers(Settings(), 4)] == [range(4)]
    servers = {"2-3": "10.0.0.2:5556", "0-1": "10.0.0.1:5555"}
    first, second = rank_servers(Settings(servers=servers), 4)
    assert first == RankServer(range(2), "tcp://10.0.0.1:5555")
    assert second == RankServer(range(2, 4), "tcp://10.0.0.2:5556")
    assert second.details(4) == (("ranks", "2-3"),)
    (alone,) = rank_servers(Settings(servers={"0-3": "[::1]:5555"}), 4)
    assert alone.address == "tcp://[::1]:5555"
    assert alone.details(4) == ()


@pytest.mark.parametrize(
    ("servers", "sentence"),
    [
        ({"0-1": "h:1"}, "ends at rank 1, but this engine has ranks 0 to 3"),
        ({"0-3": "h:1", "4": "h:2"}, "ends at rank 4, but"),
        ({"0": "h:1", "2-3": "h:2"}, "no server for rank 1"),
        ({"0-2": "h:1", "2-3": "h:2"}, "two servers for rank 2"),
        ({"0-1": "h:1", "2-3": "h:1"}, "names one server twice"),
        ({"a-b": "h:1"}, "'a-b' is no range of ranks"),
        ({"3-0": "h:1"}, "'3-0' is no range of ranks"),
        ({"0-3": "h"}, "'h' is not HOST:PORT"),
        ({"0-3": "h:70000"}, "'h:70000' is not HOST:PORT"),
    ],
)
def test_servers_that_do_not_fit_the_ranks_are_refused(servers: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        rank_servers(Settings(servers=servers), 4)


def test_the_advice_for_recurrent_models_is_quoted_as_it_is_given() -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_cache_retention_interval=0, kv_offloading_size=None),
        model_config=SimpleNamespace(max_model_len=0),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
    )
    groups = (GroupSpec(FULL, 544, 0, "", ()), *(GroupSpec(RECURRENT, 544, 0, "", ()),) * 3)
    advice = on_joined(config, groups, (13_369_344, *(13_172_736,) * 3), False, Joined(True, 544))
    assert f"\nlmcache: {advice}\n" in (ROOT / "docs" / "hybrid-models.md").read_text()
