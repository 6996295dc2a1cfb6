"""`lmcache plan`, of a running server and of a record."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from harness.cli import clean_environment, in_process, sentence
from harness.hostile import HostileServer
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer, refusal

__all__ = ["clean_environment"]


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, output, errors = in_process(capsys, "plan", "--json", *arguments)
    assert code == 0, errors
    return json.loads(output)["windows"]["start"]


def test_a_cache_that_is_too_small_is_told_what_more_memory_would_hit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 4 MiB in turn: none of them is still there when it comes back, and twice the memory holds
    them all. The record of the lookups gives the same figures."""
    record = tmp_path / "record"
    with LMCacheServer(l1_size_gb=16 / 1024, record=str(record)) as server:
        monkeypatch.setenv("LMCACHE_RUNTIME_DIR", server.runtime_dir)
        engine = RawEngine(server.address, [group(layers=4, page_bytes=64 << 10)], 70).start()
        tokens = 16 * 16 // engine.chunk_size * engine.chunk_size
        for number in (*range(6), *range(6), *range(6)):
            keys = chain(range(1000 * number, 1000 * number + tokens), engine.chunk_size)
            found = engine.lookup(keys)
            engine.store_prompt(keys, [list(range(1, 1 + tokens // 16))])
            engine.end(found, keys)
        port = str(server.port)
        live = figures(capsys, "--port", port)
        assert live["tokens"] == 18 * tokens
        assert live["hit_rates"]["1"] == 0
        assert live["hit_rates"]["2"] == live["hit_rates"]["unlimited"] == round(12 / 18, 4)
        assert server.tokens("hit") == 0
        assert server.metrics()['lmcache_demand_hit_ratio{l1="2"}'] == live["hit_rates"]["2"]
        code, text, _ = in_process(capsys, "plan", "--port", port)
        assert code == 0
        assert (
            "2 times the memory (32.0 MiB) would raise the hits of the last day from 0.0% to 66.7%." in text
        )
        engine.close()
        taken = f"lmcache: cannot use --record {record}: another server records there; name another file"
        assert refusal(l1_size_gb=0.01, record=str(record)) == taken
        server.wait_until(lambda _: len(record.read_bytes().splitlines()) == 2 * 18)
        assert record.stat().st_mode & 0o777 == 0o600
        again = figures(capsys, "--from", str(record), "--l1-size-gb", str(16 / 1024))
        assert again["hit_rates"] == live["hit_rates"]


def test_a_file_that_is_no_record_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "record"
    path.write_text("[1, 2]")
    assert ": it is no record of a server; " in refusal(l1_size_gb=0.01, record=str(path))
    assert path.read_text() == "[1, 2]"
    for line in (b"[]", b"no", b'[0,"lookup","n",0,1,false,false,0,0,""]', b"[" * 100_000):
        path.write_bytes(b'[0.0,"end","n",16,1,false,false,0,0,"0011223344556677"]\n' + line + b"\n")
        said = sentence(capsys, 1, "plan", "--from", str(path))
        assert said.startswith(f"lmcache: line 2 of {path} is no event of a record")
    assert sentence(capsys, 1, "plan", "--from", str(tmp_path / "none")).startswith("lmcache: cannot read")


def test_a_demand_that_cannot_be_read_is_one_clear_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LMCacheServer(l1_size_gb=16 / 1024) as server:
        report, directory = server.status(), os.environ["LMCACHE_RUNTIME_DIR"]
    windows = report["demand"]["windows"]
    for lacking in (windows, windows["day"]["hit_rates"]):
        lost = lacking.popitem()
        with HostileServer(Path(directory), server.port, chunk_size=64, report=json.dumps(report)):
            said = sentence(capsys, 1, "plan", "--port", str(server.port))
        assert "sent a status that this version cannot read: install the same version of lmcache-mp" in said
        lacking.update([lost])


def test_a_record_goes_on_after_a_restart_of_which_the_next_server_knows_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record"
    for start in range(2):
        with LMCacheServer(
            l1_size_gb=16 / 1024, record=str(record), tier=f"dir://{tmp_path}/tier?size_gb=0.1"
        ) as server:
            monkeypatch.setenv("LMCACHE_RUNTIME_DIR", server.runtime_dir)
            engine = RawEngine(server.address, [group()], 70).start()
            tokens = 4 * engine.chunk_size
            keys = chain(range(tokens), engine.chunk_size)
            found = engine.lookup(keys)
            engine.store_prompt(keys, [list(range(1, 1 + tokens // 16))])
            engine.end(found, keys)
            live = figures(capsys, "--port", str(server.port))
            code, text, _ = in_process(capsys, "plan", "--port", str(server.port))
            engine.close()
            server.wait_until(lambda _, start=start: len(record.read_bytes().splitlines()) == 2 * (start + 1))
        assert code == 0
        assert text.endswith("keeps lookups for `lmcache plan --from FILE`.\n")
        assert (live["tokens"], live["hit_rates"]["unlimited"]) == (tokens, 0)
    whole = figures(capsys, "--from", str(record), "--l1-size-gb", str(16 / 1024))
    assert (whole["tokens"], whole["hit_rates"]["unlimited"]) == (2 * tokens, 0.5)
