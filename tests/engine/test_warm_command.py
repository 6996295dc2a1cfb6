"""`lmcache warm`, `pin` and `inspect` with a real vLLM: what is sent, is there, and what is pinned, stays."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.api_server import ApiServer
from harness.engine import Engine
from harness.processes import run_forked
from harness.prompts import prompt
from harness.served import served
from harness.server import LMCacheServer
from harness.waiting import wait_until

CHUNK = 32
COMMAND_TIMEOUT_S = 300.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LMCacheServer]:
    """Room for 32 chunks of the tiny model."""
    with LMCacheServer(l1_size_gb=2 / 1024, chunk_size=CHUNK, l1_path=tmp_path / "l1") as running:
        yield running


def lmcache(server: LMCacheServer, *arguments: str) -> tuple[int, list[str], str]:
    environment = {**server.environment, "LMCACHE_PORT": str(server.port)}
    done = run_forked("lmcache", arguments, environment, COMMAND_TIMEOUT_S)
    return done.returncode, done.stdout.splitlines(), done.stderr


def numbers(line: str) -> list[int]:
    """Tokens of the prompt, tokens that can be restored, chunks that are there, chunks of the prompt."""
    return [int(each.replace(",", "")) for each in re.findall(r"(?<!line )\b\d[\d,]*\b", line)]


def written(path: Path, *prompts: list[int]) -> str:
    path.write_text("\n".join(map(json.dumps, prompts)))
    return str(path)


def inspected(server: LMCacheServer, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    code, lines, error = lmcache(server, "inspect", "--json", *arguments)
    assert not error
    return code, json.loads("\n".join(lines))


def prompt_tokens(vllm: ApiServer) -> list[str]:
    """vLLM's count of the tokens of all prompts."""
    return re.findall(r"(?m)^vllm:prompt_tokens_total.*$", vllm.get("/metrics"))


def look_without_a_trace(
    server: LMCacheServer, vllm: ApiServer, first: list[int], second: list[int], tmp_path: Path
) -> None:
    """Inspects what is there, what parts from it, and what has a salt. Nothing but the salted request is
    counted, and vLLM computes nothing."""
    parted = first[: 2 * CHUNK + 5] + second
    counted, computed = server.status(), prompt_tokens(vllm)
    code, rows = inspected(server, written(tmp_path / "all", first, second, parted), "--url", vllm.url)
    assert code == 1
    assert [(row["limit_tokens"], row["resume_tokens"]) for row in rows] == [
        (4 * CHUNK, 4 * CHUNK),
        (2 * CHUNK, 2 * CHUNK),
        (5 * CHUNK, 2 * CHUNK),
    ]
    assert rows[2]["missed"] == {"not_stored": 3 * CHUNK}
    code, lines, _ = lmcache(server, "inspect", written(tmp_path / "first", first))
    assert (code, lines[1]) == (0, f"  {4 * CHUNK} of {4 * CHUNK} tokens can be restored")

    salt = tmp_path / "salt"
    salt.write_text("a tenant\n")
    salted = (written(tmp_path / "second", second), "--salt-file", str(salt))
    assert inspected(server, *salted)[0] == 1
    after = server.status()
    assert (after["tokens"], after["l1"]) == (counted["tokens"], counted["l1"])
    assert prompt_tokens(vllm) == computed
    vllm.complete(second, cache_salt="a tenant")
    wait_until(lambda: inspected(server, *salted)[0] == 0, what="the salted prompt is stored")


def test_what_was_sent_ahead_is_served_to_another_engine_and_what_is_pinned_stays(
    server: LMCacheServer, tmp_path: Path
) -> None:
    first, second, large = prompt(4 * CHUNK + 20, 1), prompt(3 * CHUNK, 2), prompt(11 * CHUNK, 3)
    file = written(tmp_path / "prompts.jsonl", first, second, first)
    with ApiServer("llama", server, "--block-size", str(CHUNK)) as vllm:
        assert server.status()["l1"]["chunks"] == 0
        code, rows = inspected(server, file, "--model", vllm.model)
        assert (code, [row["resume_tokens"] for row in rows]) == (1, [0, 0, 0])
        code, lines, error = lmcache(server, "warm", vllm.url, file)
        assert (code, error) == (0, ""), lines
        assert [line.partition(",")[0] for line in lines[:-1]] == [f"line {n}" for n in range(1, 4)]
        whole = [len(first), 4 * CHUNK, 4, 4]
        assert [numbers(line) for line in lines[:-1]] == [whole, [len(second), 3 * CHUNK, 3, 3], whole]
        assert lines[-1].startswith(f"all: {11 * CHUNK:,} tokens of 3 prompts")
        assert server.status()["l1"]["chunks"] == 7
        assert server.status()["pins"] == []
        look_without_a_trace(server, vllm, first, second, tmp_path)

        code, lines, _ = lmcache(server, "warm", vllm.url, written(tmp_path / "short", [5, 5, 5]))
        assert code == 1
        assert "saw no chunk of these prompts" in lines[-1]

        code, lines, error = lmcache(server, "warm", vllm.url, file, "--port", "9")
        assert (code, lines) == (1, [])
        assert "no lmcache server answers" in error

        code, lines, error = lmcache(server, "pin", vllm.url, file)
        assert (code, error) == (0, ""), lines
        assert numbers(lines[0]) == whole
        code, lines, error = lmcache(server, "pin", vllm.url, written(tmp_path / "large", large))
        assert (code, lines) == (1, [])
        assert error.startswith("lmcache: line 1: 56 % of L1 would be pinned, and at most half of it can be")
        (pin,) = server.status()["pins"]
        assert (pin["name"], pin["chunks"]) == ("prompts.jsonl", 7)
    assert server.terminate() == 0
    server.start()
    assert server.status()["pins"] == [pin], "it outlives its engine and the server"
    with Engine("llama", server=server, block_size=CHUNK, dtype="bfloat16") as engine:
        for number in range(8):
            engine.run(prompt(8 * CHUNK + 20, 10 + number), 1)
        assert server.status()["l1"]["chunks"] == 32
        pinned = [served(engine, first, 4 * CHUNK), served(engine, second, 2 * CHUNK)]
        served(engine, large, 0, 1)  # what is not pinned was evicted
        assert lmcache(server, "unpin", "--all") == (0, ["unpinned 7 chunks"], "")
        assert server.status()["pins"] == []
        server.clear()
        assert engine.reset_prefix_cache()
        assert [engine.run(each).output for each in (first, second)] == [each.output for each in pinned]
