"""What users of LMCache are told: every name of theirs is answered, by errors and on the page alike."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from harness.paths import ROOT

from lmcache_client.connector.settings import PREFIX, Settings, parse
from lmcache_client.contract.lmcache_names import MISSING, NO_EFFECT, NOT_NEEDED, SAME, advice, table
from lmcache_server import config
from lmcache_server.commands.cli import cli
from lmcache_server.config import FLAGS, NO_FLAGS, flag_name, unknown_variables, variable_name

LMCACHE = json.loads(Path(__file__).with_name("lmcache-0.5.6.json").read_text())
KINDS = {"Flags of the server": "flags", "Keys": "keys", "Environment": "variables", "Commands": "commands"}
OURS = {
    "flags": [*map(flag_name, FLAGS)],
    "keys": [PREFIX + name for name in Settings.__struct_fields__],
    "variables": [*map(variable_name, FLAGS), config.CONFIG_VARIABLE],
    "commands": ["vllm bench serve", *(f"lmcache {name}" for name in cli.commands)],
}
EFFECTLESS = {
    PREFIX + name
    for name in (
        "mq_timeout", "heartbeat_interval", "mp_transfer_mode", "nonblocking_lookup_status", "eager_prefetch",
    )
}  # fmt: skip
"""LMCache's keys that change nothing here but may be in a user's configuration."""


def test_every_name_of_lmcache_has_one_row_and_no_other_name_has() -> None:
    for kind in ("flags", "keys"):
        assert sorted(name for names, _, _ in table(kind) for name in names) == LMCACHE[kind]
    commands = {name for names, _, _ in table("commands") for name in names}
    assert not [each for each in LMCACHE["commands"] if not {each, each.split()[0]} & commands]


@pytest.mark.parametrize("kind", KINDS.values())
def test_what_is_named_instead_exists(kind: str) -> None:
    for names, here, why in table(kind):
        assert here in (SAME, MISSING, NOT_NEEDED, NO_EFFECT, *OURS[kind])
        assert here != SAME or kind == "commands" or set(names) <= set(OURS[kind])
        assert why or here != MISSING, f"{names}: say what is missing"
    effectless = {name for names, here, _ in table("keys") for name in names if here == NO_EFFECT}
    assert effectless == EFFECTLESS == {*parse(dict.fromkeys(EFFECTLESS, "some value"))[1]}


def test_the_page_is_what_the_script_prints() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "lmcache_names.py"))["page"]()
    assert (ROOT / "docs" / "lmcache-names.md").read_text() == page, (
        f"run: {sys.executable} scripts/lmcache_names.py > docs/lmcache-names.md"
    )


OFFERED = {
    # What a page offers: how LMCache's names and this page's words speak of it, and what that page says.
    r"kv[-_. ]event": ("several-machines.md", "--kv-events-config"),
    r"quota": ("operations.md", "--quota-gb"),
    r"\bpin\b": ("operations.md", "lmcache pin"),
    r"prefetch|warm": ("operations.md", "lmcache warm"),
    r"hugepage": ("tuning.md", "--l1-hugetlb"),
    r"disk|resp\b|remote.url|l2.adapter": ("tiers.md", "--tier"),
    r"encrypt": ("tiers.md", "key_file"),
    r"tracing|otlp": ("operations.md", "--otlp-traces-endpoint"),
    r"lookup.hash.log": ("tuning.md", "--record"),
    r"metric|prometheus": ("operations.md", "/metrics"),
    r"speculat": ("speculative.md", "EAGLE"),
    r"kubernetes$": ("containers.md", "helm"),
}


def contradictions(missing: list[str]) -> list[str]:
    return [each for each in missing for words in OFFERED if re.search(words, each, re.IGNORECASE)]


def test_nothing_is_called_missing_that_a_page_offers() -> None:
    for page, said in OFFERED.values():
        assert said in (ROOT / "docs" / page).read_text(), page
    page = (ROOT / "docs" / "coming-from-lmcache.md").read_text()
    section = page.partition("\n## What is missing\n")[2].partition("\n## ")[0]
    missing = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    for kind in KINDS.values():
        missing += [name for names, here, _ in table(kind) if here == MISSING for name in names]
    # Its rest is missing; the row says what is there.
    missing.remove("the HTTP API to list, prefetch and delete objects and to set quotas")
    assert len(missing) > 40
    assert not contradictions(missing)
    assert contradictions(["KV events", "--kv-event-log-size", "LMCACHE_ENABLE_KV_EVENTS", "quota"])


def test_the_advice() -> None:
    assert advice("flags", "--max-workers") == (
        "LMCache's --max-workers is not needed here: remove it "
        "(there is one thread for each registered worker)"
    )
    assert advice("flags", "--l1-use-hugepages") == "LMCache's --l1-use-hugepages is '--l1-hugetlb' here"
    assert advice("flags", "--enable") == (
        "lmcache-mp has nothing like LMCache's --enable (no experimental modules (transfer_query)): see "
        "docs/coming-from-lmcache.md"
    )
    assert advice("commands", "describe kvcache") == (
        "LMCache's command 'describe kvcache' is 'lmcache status' here"
    )
    assert advice("flags", "--port") == advice("flags", "--no-such-flag") == ""


def test_a_key_that_lmcache_knows_is_answered() -> None:
    with pytest.raises(ValueError, match=r"'lmcache\.mp\.lazy_offload' .*: LMCache's .* is not needed here"):
        parse({"lmcache.mp.lazy_offload": True})
    both = r"'lmcache\.mp\.prot' .*: did you mean lmcache\.mp\.port\?; .* is 'lmcache\.mp\.servers' here"
    with pytest.raises(ValueError, match=both):
        parse({"lmcache.mp.prot": 1, "lmcache.mp.server_urls": "x"})
    with pytest.raises(ValueError, match=r"the keys are lmcache\.mp\.host, "):
        parse({"lmcache.mp.zzz": 1})


def test_variables_that_set_nothing_are_found() -> None:
    kubernetes = {
        "LMCACHE_PORT": "tcp://10.0.0.1:8080",
        "LMCACHE_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "LMCACHE_PORT_8080_TCP_ADDR": "10.0.0.1",
        "LMCACHE_SERVICE_HOST": "10.0.0.1",
        "LMCACHE_SERVICE_PORT_HTTP": "8080",
        "LMCACHE_LMCACHE_MP_PORT": "tcp://10.0.0.1:8080",
    }
    known = dict.fromkeys([*OURS["variables"], *NO_FLAGS], "1")
    assert unknown_variables({**kubernetes, **known, "PATH": "/bin"}) == []
    assert unknown_variables({"LMCACHE_L1_SIZE_G": "1", "LMCACHE_LOCAL_CPU": "True"}) == [
        "the environment variable LMCACHE_L1_SIZE_G sets nothing: did you mean LMCACHE_L1_SIZE_GB?",
        "the environment variable LMCACHE_LOCAL_CPU sets nothing: "
        + advice("variables", "LMCACHE_LOCAL_CPU"),
    ]
    assert "the names are LMCACHE_HOST, " in unknown_variables({"LMCACHE_ZZ": ""})[0]
