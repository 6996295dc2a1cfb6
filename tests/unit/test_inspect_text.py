"""What `lmcache inspect` asks and what it makes of the answers. That its keys are vLLM's: tests/engine."""

import json
from typing import Any

import pytest

from lmcache_client.contract.control import Inspect, Inspected
from lmcache_client.contract.keys import ROOT_KEY, chunk_key
from lmcache_server.commands import inspect
from lmcache_server.commands.control import ControlError

NAMESPACE: dict[str, Any] = {
    "namespace": "0123456789abcdef" * 4,
    "model": "some/model",
    "chunk_size": 4,
    "lookahead_tokens": 0,
    "engines": ["engine-1", "engine-2"],
    "ephemeral": False,
    "groups": [{"kind": "full", "window": 0}, {"kind": "sliding_window", "window": 512}],
}
TOKENS = list(range(17))


def look(
    reply: Inspected, tokens: list[int] = TOKENS, **changed: Any
) -> tuple[dict[str, Any], list[Inspect]]:
    asked: list[Inspect] = []

    def ask(message: Inspect) -> Inspected:
        asked.append(message)
        return reply

    return inspect.look(ask, "line 1", tokens, "", {**NAMESPACE, **changed}), asked


@pytest.mark.parametrize(
    ("lookahead", "chunks_of"),
    [(0, {17: 4, 16: 3, 13: 3, 12: 2, 5: 1, 4: 0, 1: 0}), (1, {17: 4, 16: 3}), (2, {17: 3, 18: 4})],
)
def test_it_asks_for_the_chunks_that_vllm_would_ask_for(lookahead: int, chunks_of: dict[int, int]) -> None:
    """The last token is computed always, so a chunk that ends with it is never asked for. For a drafter,
    chunks have the tokens behind them, too."""
    for length, chunks in chunks_of.items():
        tokens = list(range(length))
        _, (asked,) = look(Inspected(0, (b"", b""), ()), tokens, lookahead_tokens=lookahead)
        keys = inspect.keys_of(tokens, 4, "", lookahead)
        assert asked == Inspect("engine-1", keys[:chunks], 4 * chunks)
        assert not keys or keys[0] == chunk_key(ROOT_KEY, tokens[: 4 + lookahead], None)


def test_a_key_is_of_token_ids_and_the_first_one_of_the_salt_as_vllm_has_it() -> None:
    for number in (-1, 1 << 32):
        with pytest.raises(ControlError, match=r"^a token id is a number from 0 to 4294967295$"):
            inspect.keys_of([number] * 8, 4, "")
    first = chunk_key(ROOT_KEY, TOKENS[:4], (("cache_salt", "secret"),))
    assert inspect.keys_of(TOKENS, 4, "secret")[:2] == (first, chunk_key(first, TOKENS[4:8], None))
    assert inspect.keys_of(TOKENS, 4, "")[0] == chunk_key(ROOT_KEY, TOKENS[:4], None)


def test_what_is_held_of_each_group_and_why_no_more() -> None:
    missed = (("no_state", 4), ("evicted", 8))
    row, _ = look(Inspected(4, (b"\x03", b"\x0a"), missed, ((0, 8, ()),)))
    assert json.loads(json.dumps(row)) == row
    assert (row["tokens"], row["limit_tokens"], row["resume_tokens"]) == (17, 16, 4)
    assert row["missed"] == {"no_state": 4, "evicted": 8}
    full, window = row["groups"]
    assert full == {
        **{"kind": "full", "where": "l1", "chunks": 4, "held_chunks": 2},
        **{"leading_tokens": 8, "missing_tokens": [[8, 16]]},
        **{"resume_tokens": 8, "missing_ranks": []},
    }
    assert (window["resume_tokens"], window["missing_ranks"]) == (16, [])
    assert (window["kind"], window["leading_tokens"]) == ("sliding window of 512 tokens", 0)
    assert window["missing_tokens"] == [[0, 4], [8, 12]]
    assert not inspect.is_whole(row)
    assert inspect.text(row).splitlines() == [
        "line 1: 17 tokens, some/model, namespace 0123456789ab",
        "  4 of 16 tokens can be restored, 8 evicted, 4 without a window or state",
        "  group 0: full, in L1: 2 of 4 chunks, the first 8 tokens without a gap; missing: 8 to 16; "
        "alone, it could be restored up to 8",
        "  group 1: sliding window of 512 tokens, in L1: 2 of 4 chunks, the first 0 tokens without a gap; "
        "missing: 8 to 12",
    ]


def test_ranks_that_have_not_stored_their_part_are_named() -> None:
    row, _ = look(Inspected(4, (b"\x0f", b"\x01"), (("partial", 12),), ((1, 4, (1, 3)),)))
    assert row["groups"][1]["missing_ranks"] == [1, 3]
    assert inspect.text(row).endswith("restored up to 4, not stored by rank 1, 3")


def test_a_prompt_is_whole_if_all_that_vllm_loads_can_be_restored() -> None:
    row, _ = look(Inspected(16, (b"\x0f", b"\x08"), ()))
    assert inspect.is_whole(row)
    assert "16 of 16 tokens can be restored\n" in inspect.text(row)
    short, _ = look(Inspected(0, (b"", b""), ()), TOKENS[:4])
    assert inspect.is_whole(short), "vLLM could load nothing of it"
    assert inspect.text(short).endswith("never cached: it has no more tokens than a chunk (4)")


def test_many_gaps_are_counted_in_text_and_listed_in_json() -> None:
    row, _ = look(Inspected(0, (b"\xaa", b"\xff"), ()), list(range(33)))
    assert row["groups"][0]["missing_tokens"] == [[at, at + 4] for at in range(0, 32, 8)]
    row, _ = look(Inspected(0, (b"\xaa\xaa", b"\xff\xff"), ()), list(range(65)))
    assert "missing: 0 to 4, 8 to 12, 16 to 20, 24 to 28 and 4 more" in inspect.text(row)


def test_an_answer_that_does_not_fit_is_one_sentence_and_names_of_others_cannot_move_the_cursor() -> None:
    for resume_tokens, held in ((0, (b"",)), (0, (b"",) * 3), (20, (b"", b""))):
        with pytest.raises(ControlError, match="does not fit the question"):
            look(Inspected(resume_tokens, held, ()))
    row, _ = look(Inspected(0, (b"", b""), ()), model="a\x1b[2J\nb")
    assert all(line.isprintable() for line in inspect.text(row).splitlines())


def test_only_namespaces_with_engines_that_match_are_looked_at() -> None:
    idle = {**NAMESPACE, "engines": []}
    test = {**NAMESPACE, "ephemeral": True}
    other = {**NAMESPACE, "model": "other", "namespace": "ff" * 32}
    report = {"namespaces": [idle, test, NAMESPACE, other]}
    assert inspect.chosen(report, "", "") == [NAMESPACE, other]
    assert inspect.chosen(report, "other", "") == [other]
    assert inspect.chosen(report, "", "0123") == [NAMESPACE]
    with pytest.raises(ControlError, match=r"^no engine of others is connected: `lmcache status` lists"):
        inspect.chosen(report, "others", "")
    with pytest.raises(ControlError, match=r"^no engine of this namespace is connected"):
        inspect.chosen(report, "", "012x")
    with pytest.raises(ControlError, match=r"^no engine is connected"):
        inspect.chosen({"namespaces": [idle]}, "", "")
