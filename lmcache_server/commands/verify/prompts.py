"""The prompts of `lmcache verify`: built in, of chosen lengths, or from a file."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache_server.commands.verify.engine import Prompt, VllmServer, new_salt
from lmcache_server.errors import CommandError

ANSWER_TOKENS = 32
DEFAULT_MAX_TOKENS = 8192
_SAMPLE_CHARS = 2000
_SLACK = 0.9
"""Lengths are estimated from a sample of the text, and the longest prompt must still fit."""

_WHO = ("The keeper", "Her brother", "The harbour master", "A pilot", "The youngest clerk", "Nobody here")
_DID = ("counted", "wrote down", "sold", "carried away", "painted", "lost", "mended", "weighed")
_WHAT = ("lamps", "barrels of oil", "letters", "nets", "brass screws", "charts", "sacks of meal", "ropes")
_WHEN = ("before the storm", "at noon", "while the tide was out", "on a Sunday", "by candlelight", "in March")


@dataclass(frozen=True)
class Case:
    """A prompt, and the one `stored` first so that the cache can serve it: the same, or its beginning."""

    name: str
    prompt: Prompt
    stored: Prompt

    @property
    def is_repeat(self) -> bool:
        return self.prompt == self.stored


def built_in(vllm: VllmServer, lengths: Sequence[int]) -> list[Case]:
    """A prompt of about each length in tokens, and one that continues the beginning of the middle prompt.

    The default lengths are an eighth, a quarter, half and all of what the model takes, up to
    DEFAULT_MAX_TOKENS.
    """
    most = vllm.max_tokens - ANSWER_TOKENS if vllm.max_tokens else DEFAULT_MAX_TOKENS
    longest = min(int(most * _SLACK), DEFAULT_MAX_TOKENS)
    lengths = lengths or [longest // part for part in (8, 4, 2, 1)]
    if wrong := [length for length in lengths if not 1 <= length <= most]:
        raise CommandError(f"prompts can have 1 to {most} tokens here, not {wrong[0]}")
    chars = min(_SAMPLE_CHARS, max(most // 2, 16))
    sample = vllm.ask(_text(0, chars), 1, new_salt())
    chars_per_token = chars / len(sample.prompt_ids)
    texts = [_text(i, int(length * chars_per_token)) for i, length in enumerate(lengths, start=1)]
    cases = [Case("repeated", text, text) for text in texts]
    middle = texts[len(texts) // 2]
    return [*cases, Case("continued", middle, middle[: int(len(middle) * 0.6)])]


def from_file(path: Path) -> list[Case]:
    """One prompt per line: text, a JSON string (for line breaks), or a JSON list of token ids."""
    lines = [line for line in _read(path).splitlines() if line.strip()]
    if not lines:
        raise CommandError(f"{path} has no prompts: write one on each line")
    prompts = [_prompt(line) for line in lines]
    return [Case(f"line {number}", prompt, prompt) for number, prompt in enumerate(prompts, start=1)]


def salt(path: Path) -> str:
    """The cache_salt in a file."""
    if text := _read(path).removesuffix("\n"):
        return text
    raise CommandError(f"{path} is empty: write the cache_salt into it")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise CommandError(f"cannot read {path} ({reason}): name another file") from None


def _prompt(line: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    is_ids = isinstance(value, list) and value and all(type(token) is int for token in value)
    return value if is_ids or isinstance(value, str) else line


def _text(seed: int, num_chars: int) -> str:
    """Generated sentences; texts with different seeds differ from the first line on."""
    choose = random.Random(seed)
    text = f"Log book {seed}.\n"
    while len(text) < num_chars:
        number = choose.randrange(2, 1000)
        who, did, what, when = (choose.choice(words) for words in (_WHO, _DID, _WHAT, _WHEN))
        text += f"{who} {did} {number} {what} {when}." + ("\n" if choose.randrange(5) == 0 else " ")
    return text[:num_chars]
