"""`lmcache verify` against a real vLLM: it finds a right cache right, a wrong one wrong, and none missing."""

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import drafters
from harness.api_server import ApiServer
from harness.processes import run_forked
from harness.server import LMCacheServer

from lmcache_server.options.warm_restart.l1_file import HEADER_BYTES

COMMAND_TIMEOUT_S = 300.0
L1_BYTES = 32 << 20
SHARE = "([0-9]+) %"


def lmcache(*arguments: str, server: LMCacheServer | None = None) -> tuple[int, str, str]:
    environment = server.environment if server else os.environ
    done = run_forked("lmcache", arguments, environment, COMMAND_TIMEOUT_S)
    return done.returncode, done.stdout, done.stderr


def verify(url: str, *flags: str) -> tuple[int, str, str]:
    return lmcache("verify", url, *flags)


@contextlib.contextmanager
def serving(directory: Path, model: str, *flags: str) -> Iterator[tuple[LMCacheServer, str, Path]]:
    file = directory / "l1"
    with (
        LMCacheServer(l1_path=str(file), l1_size_gb=L1_BYTES / (1 << 30), checksums=False) as server,
        ApiServer(model, server, *flags, text=True) as api,
    ):
        yield server, f"http://127.0.0.1:{api.port}", file


@contextlib.contextmanager
def damaged(file: Path) -> Iterator[None]:
    """Meanwhile every byte of L1 but those of the file's header is written over, again and again."""
    stop = threading.Event()
    wrong = bytes([60, 7]) * (L1_BYTES // 2)

    def write() -> None:
        with file.open("r+b") as pages:
            while not stop.wait(0.05):
                pages.seek(HEADER_BYTES)
                pages.write(wrong)
                pages.flush()

    thread = threading.Thread(target=write)
    thread.start()
    yield
    stop.set()
    thread.join()


def test_a_right_cache_is_found_right_a_wrong_one_wrong(tmp_path: Path) -> None:
    with serving(tmp_path, "falconh1") as (server, url, file):
        prompts = tmp_path / "prompts.txt"
        prompts.write_text(
            "x" * 600 + "\n" + json.dumps("Two\nlines. " * 80) + "\n" + str([*range(1, 255)] * 3)
        )

        code, out, err = verify(url, "--tokens", "400", "--tokens", "1300")
        assert code == 0, out + err
        lines = out.splitlines()
        assert [line.split()[0] for line in lines[1:-1]] == ["repeated", "repeated", "continued"]
        assert all("equal   equal" in line for line in lines[1:3]), out
        # Resumed in the middle, this model computes the rest in other shapes: vLLM's own cache does so, too,
        # and on some processors it rounds to the same.
        assert "as vLLM's own cache" in lines[3] or "equal   equal" in lines[3], out
        assert lines[-1].startswith("right: 3 of 3 prompts were served, 3 equal to the last bit"), out

        code, out, err = verify(f"{url}/v1/", "--prompts", str(prompts), "--json")
        assert code == 0, out + err
        report: dict[str, Any] = json.loads(out)
        assert report["right"]
        assert [each["served_tokens"] > 0 for each in report["prompts"]] == [True] * 3
        assert all(each["logprobs"] == "equal" and each["text_equal"] for each in report["prompts"])
        counts = server.metrics()
        hits = counts['lmcache_test_tokens_total{outcome="hit",test="verify"}']
        assert hits >= sum(each["served_tokens"] for each in report["prompts"]) > 0
        assert counts['lmcache_test_objects_total{outcome="stored",test="verify"}'] > 0
        assert counts["lmcache_tokens_requested_total"] == 0, "nothing of it is in the hit rate"
        assert counts['lmcache_objects_total{outcome="stored"}'] == 0

        at = ("--port", str(server.port))
        code, out, err = lmcache("inspect", str(prompts), "--url", url, "--json", *at, server=server)
        assert (code, err) == (1, "")
        assert [row["resume_tokens"] for row in json.loads(out)] == [0] * 3, "each had its own salt"
        lmcache("warm", url, str(prompts), *at, server=server)
        code, out, err = lmcache("inspect", str(prompts), "--url", url, "--json", *at, server=server)
        rows = json.loads(out)
        assert all(row["resume_tokens"] == row["limit_tokens"] > 0 for row in rows), "text, as vLLM has it"
        assert code == 0
        assert {group["kind"] for group in rows[0]["groups"]} == {"full", "recurrent"}

        with damaged(file):
            code, out, err = verify(url, "--tokens", "1300")
        assert code == 1, out + err
        # Not each: what is stored anew and loaded at once may be damaged too late.
        assert "\nWRONG: " in out, out
        assert re.search("^repeated  .* differs differ by ", out, re.MULTILINE), out

        server.kill()
        code, out, err = verify(url, "--tokens", "400")
        assert code == 1
        assert "not served" in out
        assert "nothing was served: is `lmcache server` running" in out


def test_with_a_drafter_that_looks_ahead(tmp_path: Path) -> None:
    """vLLM's own cache then ends a block before the server's."""
    drafter = {"method": "eagle", "model": str(drafters.eagle_path()), "num_speculative_tokens": 3}
    # The default lengths are parts of what the model takes, and the shortest must be more than a chunk.
    flags = ("--speculative-config", json.dumps(drafter), "--max-model-len", "3072")
    with serving(tmp_path, str(drafters.target_path("llama")), *flags) as (_, url, file):
        code, out, err = verify(url, "--tokens", "400", "--tokens", "1300")
        assert code == 0, out + err
        shares = re.search(
            f"; drafts accepted: {SHARE} computed, {SHARE} from vLLM's own cache, {SHARE} served$", out
        )
        assert shares, out
        # How many, the processor decides, by how it rounds. Of a drafter that read wrong pages, next to none.
        assert all(int(share) > 20 for share in shares.groups()), out
        code, out, err = verify(url, "--json")
        assert code == 0, out + err
        report = json.loads(out)
        assert all(each["served_tokens"] > 0 for each in report["prompts"])
        assert all(each["logprobs"] != "differ" for each in report["prompts"] if "cut" in each["prompt"])
        accepted, made = report["prompts"][0]["drafts_accepted"]["served"]
        assert 0 < accepted < made
        with damaged(file):
            code, out, err = verify(url, "--tokens", "1300")
        assert code == 1, out + err
        assert "\nWRONG: " in out, out


def test_what_is_no_engine_is_one_sentence() -> None:
    for url, sentence in (
        ("ftp://127.0.0.1", "is not a URL"),
        ("http://127.0.0.1:9", "does not answer /v1/models"),
    ):
        code, out, err = verify(url)
        assert (code, out) == (1, "")
        assert sentence in err
        assert len(err.splitlines()) == 1
