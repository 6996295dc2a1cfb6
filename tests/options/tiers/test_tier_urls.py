"""URLs of tiers and --tier: what they mean, and one clear sentence for everything that is wrong."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness.options import load
from harness.waiting import PATIENCE_S
from tier_rig import option

from lmcache_server.config import NO_FLAGS
from lmcache_server.errors import StartError
from lmcache_server.host.preflight import FAIL, OK, Check
from lmcache_server.options.tiers import doctor, urls
from lmcache_server.options.tiers.base import CREDENTIALS
from lmcache_server.options.tiers.urls import TierOptions, open_tier, parse

TIERS = "lmcache_server.options.tiers"
TWO = ("dir:///a?size_gb=1", "s3://b")


def sentence(url: str) -> str:
    with pytest.raises(StartError) as caught:
        parse(url)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    return str(caught.value)


def test_what_urls_mean():
    url = parse("dir:///nvme/lm%20cache?size_gb=2000&shared=0&max_age=3600")
    assert (url.scheme, url.place) == ("dir", "/nvme/lm cache")
    assert url.parameters == {"size_gb": 2000.0, "shared": False, "max_age": 3600.0}
    assert url.options == TierOptions("cold")
    url = parse("valkey://h1:6379,h2,[::1]:7000?cluster=1&tls=1&read_mb_s=100&write=cold")
    assert urls._addresses(url.place) == [("h1", 6379), ("h2", 6379), ("::1", 7000)]
    assert url.parameters == {"cluster": True, "tls": True}
    assert url.options == TierOptions("cold", read_mb_s=100.0, compress="auto")
    url = parse("s3://bucket/some/prefix?endpoint=https%3A%2F%2Fhost:9000&region=eu-1")
    assert url.place == "bucket/some/prefix"
    assert url.parameters == {"endpoint": "https://host:9000", "region": "eu-1"}
    assert parse("az://container?endpoint=http://127.0.0.1:1/account&allow_http=1").place == "container"
    assert parse("gs://bucket").options == TierOptions("commit", compress="auto")
    assert parse("az://a?compress=off").options == TierOptions("commit")
    url = parse("mooncake://master?protocol=rdma&segment_gb=64&devices=mlx5_0,mlx5_1&host=10.0.0.1")
    devices = {"devices": "mlx5_0,mlx5_1", "host": "10.0.0.1"}
    assert url.place == "master"
    assert url.parameters == {"protocol": "rdma", "segment_gb": 64.0, **devices}
    assert (url.shares_l1, parse("valkey://a").shares_l1) == (True, False)
    assert parse("mooncake://[::1]:7000?segment_gb=0&metadata=P2PHANDSHAKE").parameters["segment_gb"] == 0
    assert parse("dir:///a?size_gb=1").options.write == "cold"
    # What is shared is written on commit.
    shared = ("dir:///a?size_gb=1&shared=1", "valkey://a", "s3://a", "az://a", "gs://a", "mooncake://a")
    assert {parse(url).options.write for url in shared} == {"commit"}
    assert parse("mooncake://a").options.compress == "off"
    every = "write=commit&read_mb_s=1&write_mb_s=2.5&write_tb_day=3&key_file=/run/key&compress=zstd"
    expected = TierOptions("commit", 1.0, 2.5, 3.0, "/run/key", "zstd")
    assert parse(f"dir:///a?size_gb=1&{every}").options == expected


MISTAKES = {
    "must begin with dir://, valkey://, s3://": ["", "/nvme/lmcache", "redis://host", "dir://"],
    "needs size_gb": ["dir:///a"],
    "size_gb='': it must be a number above 0": ["dir:///a?size_gb="],
    "a number above 0": [f"dir:///a?size_gb={number}" for number in ("0", "-1", "inf", "nan")],
    "it must be seconds, such as 604800 for a week": ["dir:///a?size_gb=1&max_age=7d"],
    "size_gb twice": ["dir:///a?size_gb=1&size_gb=2"],
    "did you mean size_gb?": ["dir:///a?size_bg=1"],
    "the names are size_gb, shared, max_age, compress, write, ": ["dir:///a?zzzzzz=1"],
    "it must be off or auto or zstd or lz4": ["valkey://a?compress=gzip"],
    "unknown parameter 'compress'": ["mooncake://a?compress=zstd"],
    "it must be 0 or 1": ["dir:///a?size_gb=1&shared=yes"],
    "dir:///path": ["dir://nvme/a?size_gb=1", "dir:///?size_gb=1"],
    "cannot be printed": ["dir:///a%0Ab?size_gb=1"],
    "must name servers": [f"valkey://{place}" for place in ("?tls=1", "host:70000", "host/0", "host,,other")],
    "unknown parameter 'size_gb'": ["valkey://host?size_gb=1"],
    "did you mean cluster?": ["valkey://host?cluter=1"],
    "must name the master: mooncake://host:50051": ["mooncake://a,b"],
    "segment_gb='-1': it must be 0 or a number above it": ["mooncake://a?segment_gb=-1"],
    "it must be tcp or rdma": ["mooncake://a?protocol=udp"],
    "must name a bucket: s3://bucket/prefix": ["s3:///prefix"],
    "https://host:9000": ["s3://a?endpoint=host:9000", "s3://a?endpoint=https://host?sig=secret"],
    "allow_http=1 if you trust the network": ["az://a?endpoint=http://host:1/account&allow_http=0"],
    "unknown parameter 'region'": ["az://a?region=x"],
    "commit or cold": ["s3://a?write=often"],
    "a whole path": ["s3://a?key_file=key"],
}


@pytest.mark.parametrize("part", MISTAKES)
def test_a_mistake_is_one_sentence(part):
    for url in MISTAKES[part]:
        assert part in sentence(url), url


@pytest.mark.parametrize(
    ("url", "variables"),
    [
        ("valkey://user:hunter2@host", "LMCACHE_VALKEY_PASSWORD"),
        ("valkey://:hunter2@host:6379", "LMCACHE_VALKEY_PASSWORD"),
        ("valkey://user:hunter2%40host", "LMCACHE_VALKEY_PASSWORD"),
        ("s3://key:hunter2@bucket", "AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket?endpoint=https://key:hunter2@host", "AWS_SECRET_ACCESS_KEY"),
        ("az://bucket?endpoint=https://key:hunter2@host", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("mooncake://user:hunter2@host", "it knows no passwords"),
        ("gs://hunter2@bucket", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("dir://hunter2@host/a?size_gb=1", "needs none"),
    ],
)
def test_a_password_is_refused_and_not_repeated(url, variables):
    text = sentence(url)
    assert variables in text
    assert "hunter2" not in text
    assert set(CREDENTIALS["valkey"]) <= set(NO_FLAGS), "they are known"


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("valkey://a", "glide_sync", "valkey"),
        ("s3://a", "obstore", "s3"),
        ("az://a", "obstore", "s3"),
        ("mooncake://a", "mooncake", "mooncake"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(url, package, extra, monkeypatch):
    for name in [*sys.modules]:
        if name.startswith((package, f"{TIERS}.valkey", f"{TIERS}.object_store")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StartError, match=rf"run pip install '\.\[{extra}\]'"):
        open_tier(parse(url))
    with pytest.raises(StartError, match=rf"run pip install '\.\[{extra}\]'"):
        option(url)


def test_without_blosc_a_named_method_is_refused_and_auto_says_once_that_it_is_off(monkeypatch, caplog):
    monkeypatch.setattr(urls.compressed_body, "is_installed", lambda: False)
    named = parse("dir:///a?size_gb=1&compress=lz4")
    with pytest.raises(StartError, match=r"dir:///a' .*compress=lz4 needs .*pip install '\.\[compress\]'"):
        option(named.text)
    assert "\n" not in caplog.text
    assert urls.compress(parse("s3://a")) == "off"
    (line,) = caplog.messages
    assert line.startswith(
        "s3://a is not compressed: compress=auto needs the package blosc: run pip install "
    )
    assert urls.compress(parse("dir:///a?size_gb=1")) == urls.compress(parse("s3://a?compress=off")) == "off"


def test_a_directory_opens_and_needs_no_extra(tmp_path):
    code = (
        "import sys\n"
        "from lmcache_server.options.tiers.urls import open_tier, parse\n"
        "open_tier(parse(sys.argv[1])).close()\n"
        "assert not {'glide_sync', 'obstore', 'blosc'} & set(sys.modules)\n"
    )
    url = f"dir://{tmp_path}/tier?size_gb=0.5&max_age=60"
    subprocess.run([sys.executable, "-c", code, url], check=True)
    assert (tmp_path / "tier").stat().st_mode & 0o777 == 0o700


def of_file(tmp_path: Path, text: str) -> object:
    path = tmp_path / "lmcache.toml"
    path.write_text(text)
    return load("--config", str(path)).of_options["tier"]


def test_tiers_can_be_set_in_each_way(tmp_path: Path) -> None:
    assert load(*(f"--tier={tier}" for tier in TWO)).of_options["tier"] == TWO
    assert load(environment={"LMCACHE_TIER": " ".join(TWO)}).of_options["tier"] == TWO
    assert of_file(tmp_path, f"tier = {list(TWO)}") == TWO
    assert of_file(tmp_path, f'tier = "{TWO[0]}"') == TWO[:1]


def test_tiers_are_few_and_chunks_behind_them_have_no_age(tmp_path: Path) -> None:
    for sentence, *flags in (
        ("cannot be combined", f"--tier={TWO[0]}", "--max-age=7d"),
        ("names /a twice: leave one out", f"--tier={TWO[0]}", "--tier=dir:///a/?size_gb=2"),
        ("2 times at most", "--tier=a", "--tier=b", "--tier=c"),
    ):
        with pytest.raises(StartError, match=sentence):
            load(*flags)
    for wrong in ("tier = 1", "tier = [1]", 'tier = ["a", 2]', "tier = {a = 1}"):
        with pytest.raises(StartError, match="tier in"):
            of_file(tmp_path, wrong)


def test_a_directory_that_hangs_does_not_keep_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the room of a mounted file system whose server is gone."""
    released, room_of = threading.Event(), os.statvfs
    monkeypatch.setattr(doctor, "WAIT_S", 0.2)
    monkeypatch.setattr(doctor, "_tried", lambda name, _url, pid: Check(name, OK, ""))
    monkeypatch.setattr(os, "statvfs", lambda path: released.wait(PATIENCE_S) and room_of(path))
    try:
        _, room = doctor.checks({"tier": [f"dir://{tmp_path}?size_gb=1"]}, {})
    finally:
        released.set()
    assert (room.name, room.verdict) == ("tier 1, room", FAIL)
    assert "gave no answer" in room.finding
