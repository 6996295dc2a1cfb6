"""--tier on the command line, in the environment and in the file."""

from pathlib import Path

import pytest
from harness.options import load

from lmcache_server.errors import StartError

TIERS = ("dir:///a?size_gb=1", "s3://b")


def of_file(tmp_path: Path, text: str) -> object:
    path = tmp_path / "lmcache.toml"
    path.write_text(text)
    return load("--config", str(path)).of_options["tier"]


def test_tiers_can_be_set_in_each_way(tmp_path: Path) -> None:
    assert load(*(f"--tier={tier}" for tier in TIERS)).of_options["tier"] == TIERS
    assert load(environment={"LMCACHE_TIER": " ".join(TIERS)}).of_options["tier"] == TIERS
    assert of_file(tmp_path, f"tier = {list(TIERS)}") == TIERS
    assert of_file(tmp_path, f'tier = "{TIERS[0]}"') == TIERS[:1]


def test_tiers_are_few_and_chunks_behind_them_have_no_age(tmp_path: Path) -> None:
    for sentence, *flags in (
        ("cannot be combined", f"--tier={TIERS[0]}", "--max-age=7d"),
        ("2 times at most", "--tier=a", "--tier=b", "--tier=c"),
    ):
        with pytest.raises(StartError, match=sentence):
            load(*flags)
    for wrong in ("tier = 1", "tier = [1]", 'tier = ["a", 2]', "tier = {a = 1}"):
        with pytest.raises(StartError, match="tier in"):
            of_file(tmp_path, wrong)
