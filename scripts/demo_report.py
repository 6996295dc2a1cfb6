"""What the demo measured, as a table, and what it proves, in sentences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MARK = "> "
MOST_NOISE = 1.25
LEGEND = f"{MARK}marks what only the server can speed up: vLLM's own cache is empty there."
HEAD = (
    ("", "prompt", "from the", "from vLLM's", "first", "without", "times", "same"),
    ("request", "tokens", "server", "own cache", "token", "a cache", "sooner", "text"),
)


@dataclass(frozen=True)
class Answer:
    """The answer to one request. `cached_tokens` came from vLLM's own cache or from the server. `logprobs`
    has the log probabilities of its tokens, if they were asked for."""

    text: str
    first_token_s: float
    prompt_tokens: int
    cached_tokens: int
    logprobs: Any = None


@dataclass(frozen=True)
class Row:
    """One line of the table: the `answer` to check, and the `reference` of vLLM without a cache. If the
    server must have served it, `proves` says what that shows."""

    step: str
    answer: Answer
    reference: Answer
    served_tokens: int
    proves: str = ""

    @property
    def is_equal(self) -> bool:
        return self.answer.text == self.reference.text

    @property
    def is_good(self) -> bool:
        return self.is_equal and (self.served_tokens > 0 or not self.proves)

    @property
    def is_faster(self) -> bool:
        """Whether anything could make it faster than without a cache."""
        return self.answer.cached_tokens > 0

    @property
    def times_sooner(self) -> float:
        return self.reference.first_token_s / max(self.answer.first_token_s, 1e-3)


@dataclass(frozen=True)
class Exact:
    """The hybrid model's answers to one prompt: computed, from vLLM's own cache, and from the server."""

    computed: Answer
    own: Answer
    served: Answer
    served_tokens: int

    @property
    def equals(self) -> str:
        """Which of vLLM's own answers the served one equals, with its log probabilities; empty for none."""
        found = (self.served.text, self.served.logprobs)
        if found == (self.computed.text, self.computed.logprobs):
            return "the computed one"
        return "the one from vLLM's own cache" if found == (self.own.text, self.own.logprobs) else ""

    @property
    def is_good(self) -> bool:
        return bool(self.equals) and self.served_tokens > 0

    def __str__(self) -> str:
        verdict = f"equals {self.equals}, to the last bit" if self.equals else "DIFFERS from the computed one"
        tokens = f"{self.served_tokens} of {self.served.prompt_tokens} tokens from the server"
        return f"{tokens}; the answer, with its log probabilities, {verdict}"


def median(answers: Sequence[Answer], text: str = "") -> Answer:
    """The answer that came neither first nor last, or one whose text is not the wanted one."""
    wrong = [each for each in answers if text and each.text != text]
    return (wrong or sorted(answers, key=lambda each: each.first_token_s))[0 if wrong else len(answers) // 2]


def busy(rows: list[Row]) -> str:
    """A sentence, if requests took different times that nothing but the machine can have caused."""
    ratios = [row.times_sooner for row in rows if not row.is_faster]
    worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio), default=1.0)
    if 1 / MOST_NOISE <= worst <= MOST_NOISE:
        return ""
    return (
        "Ignore the times: this machine was busy. A request that nothing could speed up took "
        f"{1 / worst:.1f} times as long as the same one without a cache.\n"
    )


def progress(row: Row) -> str:
    """The line about one request, as soon as it is answered."""
    return (
        f"  {row.step}: first token after {row.answer.first_token_s:.2f} s "
        f"({row.reference.first_token_s:.2f} s without a cache), "
        f"{row.served_tokens} of {row.answer.prompt_tokens} tokens from the server"
    )


def table(rows: list[Row]) -> str:
    """The rows as aligned columns."""
    lines = list(HEAD)
    for row in rows:
        own = row.answer.cached_tokens - row.served_tokens
        lines.append(
            (
                (MARK if row.proves else " " * len(MARK)) + row.step,
                str(row.answer.prompt_tokens),
                str(row.served_tokens or "-"),
                str(own or "-"),
                f"{row.answer.first_token_s:.2f} s",
                f"{row.reference.first_token_s:.2f} s",
                f"{row.times_sooner:.1f}" if row.is_faster else "-",
                "yes" if row.is_equal else "NO",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([*shown[:2], "-" * len(shown[0]), *shown[2:], LEGEND])


def conclusion(rows: list[Row], hybrid: Exact) -> str:
    """What the demo proves, or what failed."""
    failures = []
    for row in rows:
        if not row.is_equal:
            failures.append(f"The text differs in: {row.step}")
            failures.append(f"  with the server: {row.answer.text!r}")
            failures.append(f"  without a cache: {row.reference.text!r}")
        if row.proves and not row.served_tokens:
            failures.append(f"The server served nothing in: {row.step}")
    if not hybrid.is_good:
        failures.append(f"The hybrid model: {hybrid}")
    if failures:
        return "\n".join(["FAILED", *failures])
    lines = [f"{row.times_sooner:4.1f} times sooner {row.proves}" for row in rows if row.proves]
    return "\n".join(["PASS: every answer has the same text as without a cache.", *lines])
