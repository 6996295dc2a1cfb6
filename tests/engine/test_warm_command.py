"""`lmcache warm` through a real vLLM: what it sends, the server holds; what it prints, the server did."""

import json
import re
import subprocess
import sys
from pathlib import Path

from harness.api_server import ApiServer
from harness.engine import Engine
from harness.prompts import prompt
from harness.server import LMCacheServer

CHUNK = 128


def warm(url: str, server: LMCacheServer, *arguments: str) -> tuple[int, list[str], str]:
    command = [sys.executable, "-m", "lmcache_server", "warm", url, *arguments]
    environment = {"LMCACHE_RUNTIME_DIR": str(server.runtime_dir), "LMCACHE_PORT": str(server.port)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    return done.returncode, done.stdout.splitlines(), done.stderr


def numbers(line: str) -> list[int]:
    """Tokens of the prompt, tokens served, objects stored, there already, dropped."""
    return [int(each.replace(",", "")) for each in re.findall(r"(?<!line )\b\d[\d,]*\b", line)]


def test_prompts_that_were_sent_ahead_are_served_to_another_engine(tmp_path: Path) -> None:
    first, second = prompt(4 * CHUNK + 20, 1), prompt(3 * CHUNK + 20, 2)
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in (first, second, first, [5] * 30)))
    with LMCacheServer(l1_size_gb=4 / 1024, chunk_size=CHUNK) as server:
        with ApiServer("llama", server) as vllm:
            assert server.status()["l1"]["chunks"] == 0
            code, lines, error = warm(vllm.url, server, str(file))
            assert (code, error) == (0, ""), lines
            assert [line.partition(",")[0] for line in lines[:-1]] == [f"line {n}" for n in range(1, 5)]
            assert [numbers(line) for line in lines[:-1]] == [
                [len(first), 0, 4, 0, 0],
                [len(second), 0, 3, 0, 0],
                # The engine still had it itself, so it asked for nothing.
                [len(first), 0, 0, 4, 0],
                [30, 0, 0, 0, 0],
            ]
            assert lines[-1].startswith("all: 0 tokens were there and served; 7 objects stored, 4 there")
            assert server.status()["l1"]["chunks"] == 7

            short = tmp_path / "short.txt"
            short.write_text("[5, 5, 5]")
            code, lines, _ = warm(vllm.url, server, str(short))
            assert code == 1
            assert "nothing was stored" in lines[-1]

            code, lines, error = warm(vllm.url, server, str(file), "--port", "9")
            assert (code, lines) == (1, [])
            assert "no lmcache server answers" in error
        with Engine("llama", server=server) as engine:
            served = [engine.run(each) for each in (first, second)]
            assert [each.external_tokens for each in served] == [4 * CHUNK, 3 * CHUNK]
            server.clear()
            assert engine.reset_prefix_cache()
            assert [engine.run(each).output for each in (first, second)] == [each.output for each in served]
