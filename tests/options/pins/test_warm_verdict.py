"""What `lmcache warm` and `pin` make of the server's answers. That a cache works is shown in tests/engine."""

import itertools
from typing import Any

import pytest

from lmcache_client.contract.messages import Pinned
from lmcache_server.commands.control import ControlError
from lmcache_server.commands.verify.engine import Answer
from lmcache_server.commands.verify.prompts import Case
from lmcache_server.options.pins import warm

NOTHING = Pinned(0, 0, 0, 0)


class Server:
    """A vLLM that answers at once, before its stores have ended, and a server that gives these answers in
    order, of which the last stays."""

    def __init__(self, *answers: Pinned) -> None:
        self.asked: list[tuple[str, str]] = []
        self.requests: list[str] = []
        self._answers = itertools.chain(answers, itertools.repeat(answers[-1]))

    def ask(self, prompt: Any, _max_tokens: int, request: str) -> Answer:
        assert self.asked[-1] == ("", request), "the server already watches for it"
        self.requests.append(request)
        return Answer(prompt_ids=list(prompt))

    def pin(self, name: str, request: str) -> Pinned:
        self.asked.append((name, request))
        return next(self._answers)

    def run(self, name: str = "", prompts: int = 1) -> tuple[list[Pinned], list[str]]:
        lines: list[str] = []
        cases = [Case(f"line {number}", [5] * 9, [5] * 9) for number in range(prompts)]
        return warm.send(self, cases, self.pin, name, lines.append), lines  # type: ignore[arg-type]


def test_a_prompt_is_over_when_the_server_has_all_of_it() -> None:
    whole = Pinned(3, 3, 48, 16)
    server = Server(NOTHING, NOTHING, Pinned(3, 2, 32, 16), Pinned(3, 3, 16, 16), whole)
    results, lines = server.run()
    assert results == [whole]
    assert lines == ["line 0, 9 tokens: 48 can be restored, 3 of 3 chunks are there"]
    assert len(server.asked) == 5
    assert {name for name, _ in server.asked} == {""}


def test_a_prompt_is_pinned_once_when_it_is_over_and_each_by_an_id_of_its_own() -> None:
    server = Server(Pinned(3, 3, 48, 16))
    server.run("mine", prompts=2)
    assert [request for name, request in server.asked if name == "mine"] == server.requests
    assert len(set(server.requests)) == 2
    assert server.asked[-1][0] == "mine", "after that the server does not watch for it any more"


def test_a_prompt_that_never_gets_whole_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "SETTLE_S", 0.3)
    assert Server(NOTHING).run(prompts=2)[0] == [NOTHING] * 2
    part = Pinned(3, 2, 32, 16)
    assert Server(NOTHING, part).run()[0] == [part]


def test_a_refusal_says_which_prompt_it_is() -> None:
    server = Server(Pinned(3, 3, 48, 16))

    def refuse(name: str, request: str) -> Pinned:
        if name:
            raise ControlError("half of L1 is pinned")
        return server.pin(name, request)

    with pytest.raises(ControlError, match=r"^line 7: half of L1 is pinned$"):
        warm.send(server, [Case("line 7", [5], [5])], refuse, "mine", print)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("results", "right", "words"),
    [
        ([Pinned(3, 3, 48, 16), NOTHING], True, "48 tokens of 1 prompts"),
        ([Pinned(3, 1, 32, 16)], True, "32 tokens"),
        ([Pinned(3, 2, 16, 16), Pinned(3, 3, 48, 16)], False, "1 of 2 prompts are not there as a whole"),
        ([Pinned(1, 0, 0, 16)], False, "1 of 1 prompts"),
        ([], False, "saw no chunk of these prompts"),
    ],
)
def test_the_verdict_is_about_what_the_server_holds(results: list[Pinned], right: bool, words: str) -> None:
    verdict = warm.verdict(results)
    assert verdict[0] == right
    assert words in verdict[1]
