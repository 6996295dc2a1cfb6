"""`lmcache warm`: sends prompts through vLLM, and reads the server's counters after each."""

import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from typing import Any

from lmcache_server.commands.verify.engine import VllmServer
from lmcache_server.commands.verify.prompts import Case

SETTLE_S = 3.0
"""How long to wait for the stores of a prompt. One that is shorter than a chunk has none."""
POLL_S = 0.1


@dataclass(frozen=True)
class Counts:
    """The server's counters: tokens that it restored; objects that it stored, had already, and dropped."""

    served_tokens: int
    stored: int
    present: int
    dropped: int
    writing: int = 0
    """The bytes that are being written now."""

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(new - old for new, old in zip(astuple(self), astuple(before), strict=True)))

    def __str__(self) -> str:
        return (
            f"{self.served_tokens:,} tokens were there and served; {self.stored:,} objects stored, "
            f"{self.present:,} there already, {self.dropped:,} dropped"
        )


def counts(report: dict[str, Any]) -> Counts:
    """Those of a status report."""
    objects = report["objects"]
    present, dropped = objects["present"] + objects["busy"], objects["no_room"] + objects["failed"]
    writing = report["l1"]["reserved_bytes"]
    return Counts(report["tokens"]["hit"], objects["stored"], present, dropped, writing)


def warm(
    vllm: VllmServer, cases: Iterable[Case], read: Callable[[], Counts], done: Callable[[str], None]
) -> Counts:
    """Sends each prompt once, one after the other, and passes the changes of the counters to `done`. Returns
    the changes of all prompts together."""
    first = before = read()
    for case in cases:
        answer = vllm.ask(case.prompt, 1)
        after = _settled(read, before)
        done(f"{case.name}, {len(answer.prompt_ids):,} tokens: {after.since(before)}")
        before = after
    return before.since(first)


def _settled(read: Callable[[], Counts], before: Counts) -> Counts:
    """The counters when the stores of a prompt have ended. They begin after vLLM's answer."""
    end_s, last = time.monotonic() + SETTLE_S, before
    while True:
        time.sleep(POLL_S)
        now = read()
        offered = now.since(before)
        is_over = bool(offered.stored or offered.present or offered.dropped) and not now.writing
        if (is_over and now == last) or time.monotonic() > end_s:
            return now
        last = now


def verdict(total: Counts) -> tuple[bool, str]:
    """Whether the server now holds the prompts, and a sentence about it."""
    if total.dropped:
        return False, f"{total}: L1 has no room for all: give the server more memory with --l1-size-gb"
    if not (total.served_tokens or total.stored or total.present):
        return False, (
            "nothing was stored: does this vLLM use this server (`lmcache status`), and are the prompts "
            "longer than its chunk size?"
        )
    return True, str(total)
