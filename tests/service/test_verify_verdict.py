"""`lmcache verify` without an engine: how answers are compared, prompts are read, and what is said."""

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from lmcache_server.commands import cli
from lmcache_server.commands.verify import engine, prompts, run
from lmcache_server.commands.verify.engine import Answer, Prompt, VllmServer
from lmcache_server.commands.verify.prompts import Case
from lmcache_server.commands.verify.run import distance
from lmcache_server.errors import CommandError


def answer(*tops: dict[str, float]) -> Answer:
    """Each position's likeliest token is the chosen one."""
    tokens = [max(top, key=lambda token: top[token]) for top in tops]
    return Answer(" ".join(tokens), tokens, list(tops), [1, 2])


A = answer({"a": -0.1, "b": -3.0}, {"c": -0.5, "d": -1.0})
OTHER = answer({"a": -0.1, "b": -3.25}, A.tops[1])


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        (answer(*A.tops), 0.0),
        # The largest difference counts.
        (answer({"a": -0.1, "b": -3.25}, {"c": -0.625, "d": -1.0}), 0.25),
        # A token that only one has is at most as likely as the other's last.
        (answer({"a": -0.1, "x": -2.0}, A.tops[1]), 1.0),
        # Positions behind the first other token say nothing.
        (answer({"a": -0.1, "b": -3.0}, {"d": -0.75, "c": -0.75 - 0.01}, {"e": -9.0}), 0.26),
    ],
)
def test_how_far_answers_are_apart(other: Answer, apart: float) -> None:
    longer = Answer("", [*A.tokens, "z"], [*A.tops, {"z": 0.0}])
    assert distance(longer, other) == distance(other, longer) == pytest.approx(apart)
    assert bool(result(other).equals) is (apart == 0.0)


def test_a_difference_is_judged_by_the_engines_own() -> None:
    assert [result(OTHER).is_right(noise) for noise in (0.0, 0.1, 0.2)] == [False, False, True]
    assert not result(answer(A.tops[0])).is_right(1.0), "fewer tokens never are"


def result(served: Answer, served_tokens: int = 64, again: Answer = A, local: Answer = A) -> run.Result:
    return run.Result(Case("x", "p", "p"), A, again, local, served, served_tokens)


@pytest.mark.parametrize(
    ("results", "right", "sentence"),
    [
        ([result(A)], True, "right: 1 of 1 prompts were served, 1 equal to the last bit to an answer"),
        ([result(A), result(OTHER, 0)], True, "right: 1 of 2 prompts were served"),
        ([result(A, 0)], False, "nothing was served"),
        ([result(A), result(OTHER)], False, "WRONG: 1 of 2 served answers differ, by up to 0.25"),
        (
            [result(OTHER), result(OTHER, local=OTHER)],
            True,
            "1 equal to the last bit to an answer of the engine's own, 1 within its noise",
        ),
        ([result(OTHER, local=OTHER)], True, "engine's own; the engine's own answers differ by up to 0.25"),
        ([result(A, again=answer({"a": -0.1, "b": -5.0}, A.tops[1]))], False, "cannot tell"),
    ],
)
def test_the_verdict(results: list[run.Result], right: bool, sentence: str) -> None:
    is_right, text = run.verdict(results)
    assert is_right is right
    assert sentence in text


class Rounding(VllmServer):
    """Rounds as it resumes. Its own cache drops a block, as vLLM's with EAGLE does."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.totals: Counter[str] = Counter()
        self.cached: set[str] = set()
        self.stored: set[str] = set()

    def counters(self) -> Counter[str]:
        return self.totals.copy()

    def reset_prefix_cache(self) -> None:
        self.cached.clear()

    def ask(
        self, prompt: Prompt, max_tokens: int, salt: str = "", request: str = "", load: bool = True
    ) -> Answer:
        last = len(prompt) - 1
        own = last // 16 * 16 - 16 if salt in self.cached else 0
        served = last // 256 * 256 if salt in self.stored and load else 0
        loaded = max(0, served - own)
        self.cached.add(salt)
        self.stored.add(salt)
        self.totals += Counter({engine.LOADED_TOKENS: loaded, engine.OWN_TOKENS: own})
        self.totals += Counter({engine.FINISHED: 1, engine.DRAFTS: 100})
        return Answer("a", ["a"], [{"a": -1e-6 * max(own, served)}], [int(token) for token in prompt])


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "lengths"),
    [
        (700, 0, [700, 512 + 8, 512 + 8 + 16]),
        # Its own cache ends earlier at once. The prompt that is cut is a little longer than it was.
        (520, 0, [520, 512 + 8 + 16]),
        # There is no room for a longer one.
        (520, 520 + 32, [520]),
    ],
)
def test_a_cut_lets_both_caches_end_at_one_token(tokens: int, max_tokens: int, lengths: list[int]) -> None:
    ids = list(range(tokens))
    results = run.run(Rounding(max_tokens), [Case("x", ids, ids)], lambda _: None)
    assert [len(each.cold.prompt_ids) for each in results] == lengths
    assert [each.equals for each in results][:-1] == [""] * (len(lengths) - 1)
    assert results[-1].equals == ("" if max_tokens else "as vLLM's own cache")
    assert run.verdict(results)[0]


def test_a_line_of_a_file_is_a_prompt_and_a_file_without_prompts_says_so(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('plain "text"\n\n"two\\nlines"\n[1, 2, 3]\n[not json\n[1, "a"]\n')
    read = [case.prompt for case in prompts.from_file(file)]
    assert read == ['plain "text"', "two\nlines", [1, 2, 3], "[not json", '[1, "a"]']
    file.write_text("\n")
    with pytest.raises(CommandError, match="write one on each line"):
        prompts.from_file(file)
    file.write_bytes(b"\xff")
    for path, why in ((tmp_path / "none", "No such file or directory"), (file, "it is not text in UTF-8")):
        with pytest.raises(CommandError) as refused:
            prompts.from_file(path)
        assert str(refused.value) == f"cannot read {path} ({why}): name another file"


def test_a_vllm_that_does_not_run_is_one_sentence_without_a_number_of_an_error() -> None:
    with pytest.raises(CommandError) as refused:
        VllmServer("http://127.0.0.1:9", None, None, 1.0)
    assert str(refused.value) == (
        "vLLM at http://127.0.0.1:9 does not answer /v1/models (Connection refused): see whether it runs, or "
        "pass the address at which it listens"
    )


@contextlib.contextmanager
def answering(pages: dict[str, str], code: int = 404) -> Iterator[str]:
    """The address of something that answers these pages, and else with `code`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(code if page is None else 200)
            self.end_headers()
            self.wfile.write((page or "no such page").encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


MODELS = {"/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 100}]})}


def vllm(url: str, model: str | None = None) -> VllmServer:
    return VllmServer(url, model, None, 5.0)


def test_what_is_missing_is_one_sentence_that_says_what_to_do() -> None:
    with answering({**MODELS, "/metrics": "vllm:x 1\n"}) as url:
        assert (vllm(url).model, vllm(url).max_tokens) == ("m", 100)
        with pytest.raises(CommandError, match="has no model 'n': --model can be m"):
            vllm(url, "n")
        with pytest.raises(CommandError, match="VLLM_SERVER_DEV_MODE=1"):
            vllm(url).reset_prefix_cache()
        with pytest.raises(CommandError, match='"kv_connector":"LMCacheMPConnector"'):
            vllm(url).counters()
        with pytest.raises(CommandError, match="1 to 68 tokens here, not 90"):
            prompts.built_in(vllm(url), [30, 90])
        with pytest.raises(CommandError, match="/v1/completions with 404: no such page"):
            vllm(url).ask("p", 1)
    with answering({}, code=401) as url, pytest.raises(CommandError, match="--api-key"):
        vllm(url)


@pytest.mark.parametrize(
    "page",
    [
        "", "[]", "{}", "null", "[" * 100_000, "<html>", '{"data": [{"id": {}}]}',
        '{"data": [{"id": 5}, {"id": 6}]}', '{"data": [{"id": "m", "max_model_len": "x"}]}',
        '{"data": [{"id": "m", "max_model_len": NaN}]}', '{"data": [{"id": "m", "max_model_len": Infinity}]}',
    ],
)  # fmt: skip
def test_a_list_of_models_that_is_not_vllms_is_one_sentence(page: str) -> None:
    with answering({"/v1/models": page}) as url, pytest.raises(CommandError, match=r"/v1/models is not vLLM"):
        vllm(url)


def test_a_completion_that_is_not_vllms_is_one_sentence() -> None:
    pages = dict(MODELS)
    with answering(pages) as url:
        for event in (
            "[]", "{}", '{"choices": 1}', "[" * 100_000, '{"choices": [{"text": 5}]}',
            '{"choices": [{"text": "x", "logprobs": 5}]}',
            '{"choices": [{"text": "x", "prompt_token_ids": 7}]}',
            '{"choices": [{"text": "x", "logprobs": {"tokens": ["a"], "top_logprobs": [{"a": "b"}]}}]}',
        ):  # fmt: skip
            pages["/v1/completions"] = f"data: {event}\n\n"
            with pytest.raises(CommandError, match=r"/v1/completions is not vLLM"):
                vllm(url).ask("p", 1)


def test_an_engine_that_says_nothing_or_is_used_by_others_is_not_judged() -> None:
    with answering({**MODELS, "/v1/completions": "\n", "/reset_prefix_cache": "\n"}) as url:
        with pytest.raises(CommandError, match="ended a completion without a token"):
            vllm(url).ask("p", 1)
        with pytest.raises(CommandError, match="reset_prefix_cache is not vLLM"):
            vllm(url).reset_prefix_cache()
    busy = "vllm:lmcache_mp_loaded_tokens_total 0\nvllm:num_requests_running 2.0\n"
    pages = {**MODELS, "/metrics": busy}
    with answering(pages) as url, pytest.raises(CommandError, match="while it is idle"):
        run.run(vllm(url), [Case("x", "p", "p")], lambda _: None)


def completion(logprobs: dict[str, Any]) -> str:
    """The stream of an answer of one token."""
    event = {"choices": [{"text": "x", "logprobs": logprobs, "prompt_token_ids": [1, 2]}]}
    return f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"


def test_log_probabilities_that_are_no_numbers_are_as_wrong_as_can_be() -> None:
    """What vLLM's JSON says of NaN, which garbage in the KV cache leads to."""
    stream = completion({"tokens": ["a"], "top_logprobs": [{"a": None, "b": None}]})
    with answering({**MODELS, "/v1/completions": stream}) as url:
        wrong = vllm(url).ask("p", 1)
    assert (wrong.text, wrong.prompt_ids) == ("x", [1, 2])
    right, text = run.verdict([result(wrong)])
    assert not right
    assert text.startswith("WRONG: 1 of 1 served answers differ, by up to 1e+04")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_each_prompt_has_its_line_as_it_ends(flags, tmp_path, capsys, monkeypatch):
    """With --json on stderr, so that stdout is JSON alone."""
    monkeypatch.setattr(run, "COUNT_TIMEOUT_S", 0.0)
    pages = {
        "/metrics": "vllm:lmcache_mp_loaded_tokens_total 0\n",
        "/reset_prefix_cache": '{"success": true}',
        "/v1/completions": completion({"tokens": ["a"], "top_logprobs": [{"a": 0.0}]}),
    }
    (tmp_path / "prompts").write_text("one\ntwo\n")
    with answering({**MODELS, **pages}) as url, pytest.raises(SystemExit, match="1"):
        cli.main(["verify", url, "--prompts", str(tmp_path / "prompts"), *flags])
    out, err = capsys.readouterr()
    shown = (err if flags else out).splitlines()
    assert sum("not served" in line for line in shown) == 2
    if flags:
        assert len(json.loads(out)["prompts"]) == 2
