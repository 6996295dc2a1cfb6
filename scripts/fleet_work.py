"""The conversations of `make fleet`, and what a fleet answers to them."""

import http.client
import json
import random
import re
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONVERSATIONS, TURNS = 6, 3
PARAGRAPHS = 5
"""Of the text that a conversation begins with."""
ANSWER_TOKENS = 16
QUESTIONS = (
    "Tell me in one sentence what this is about.",
    "Who was the first keeper of the lighthouse?",
    "What did Ruth Marsh do during the great storm?",
)
PATIENCE_S = 20.0
"""How long a client waits before it asks again."""
TRIES = 12

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    text: str
    first_token_s: float
    prompt_tokens: int
    cached_tokens: int
    tries: int


class FleetError(Exception):
    """The fleet does not do what it should; the message says what."""


def beginnings(text: str) -> list[Message]:
    """The first message of each conversation: some paragraphs of the text, in an order of its own."""
    draw, paragraphs = random.Random(0), text.split("\n\n")[1:]
    asked = []
    for number in range(CONVERSATIONS):
        chosen = draw.sample(paragraphs, PARAGRAPHS)
        content = "\n\n".join([f"Here is text number {number + 1}.", *chosen, QUESTIONS[0]])
        asked.append({"role": "user", "content": content})
    return asked


def order() -> list[tuple[int, int]]:
    """The requests as (conversation, turn), mixed as people come and go: the same in every run."""
    draw, left = random.Random(1), [0] * CONVERSATIONS
    requests = []
    while open_ := [number for number in range(CONVERSATIONS) if left[number] < TURNS]:
        number = draw.choice(open_)
        requests.append((number, left[number]))
        left[number] += 1
    return requests


def ask(url: str, messages: Sequence[Message], max_tokens: int = ANSWER_TOKENS) -> Answer:
    """Streams the answer. Asks again when nobody answers, as a client does. Raises FleetError after TRIES."""
    fault = ""
    for number in range(1, TRIES + 1):
        try:
            return _ask(url, messages, max_tokens, number)
        except urllib.error.HTTPError as error:
            fault = f"{error.code} {error.read()[:200].decode(errors='replace')}"
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            fault = repr(error)
        time.sleep(1.0)
    raise FleetError(f"no answer in {TRIES} tries; the last one: {fault}")


def _ask(url: str, messages: Sequence[Message], max_tokens: int, tries: int) -> Answer:
    body = {
        "model": "fleet", "messages": list(messages), "temperature": 0, "max_tokens": max_tokens,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers, method="POST")
    start_s, first_s, text, usage = time.monotonic(), 0.0, "", dict[str, Any]()
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        for line in response:
            event = line.decode().strip().removeprefix("data: ")
            if not event or event == "[DONE]":
                continue
            told = json.loads(event)
            usage = told.get("usage") or usage
            for choice in told["choices"]:
                if choice["delta"].get("content"):
                    first_s = first_s or time.monotonic() - start_s
                    text += choice["delta"]["content"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(text, first_s, usage["prompt_tokens"], cached, tries)


def post(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, b"", method="POST"), timeout=30).close()


def counters(url: str, names: Iterable[str]) -> dict[str, float]:
    """Sums over the series of each of these metrics at /metrics. A name may end with labels, as in
    `x_total{direction="read"`, of which every series must have the text."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        page = response.read().decode()
    found = {}
    for name in names:
        metric, _, labels = name.partition("{")
        series = re.findall(rf"^{re.escape(metric)}(\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
        found[name] = sum(float(value) for shown, value in series if labels in shown)
    return found


@dataclass(frozen=True)
class Run:
    """What one run of all conversations gave."""

    name: str
    answers: list[Answer]
    wrong: int
    own: int
    served: int
    from_store: int
    """Of the prompts' tokens: found in vLLM's own cache, served by the host's server, and among these
    fetched from the store."""

    def row(self) -> list[str]:
        tokens = sum(answer.prompt_tokens for answer in self.answers)
        shares = (
            f"{part / tokens:.0%}" for part in (self.own, self.served - self.from_store, self.from_store)
        )
        first = statistics.mean(answer.first_token_s for answer in self.answers)
        return [
            self.name,
            *shares,
            f"{first:.2f} s",
            f"{len(self.answers) - self.wrong} of {len(self.answers)}",
        ]


def text_of(root: Path) -> str:
    return (root / "scripts" / "demo_text.txt").read_text(encoding="utf-8")
