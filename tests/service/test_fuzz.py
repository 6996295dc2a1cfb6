"""Everything that others can write, as bytes at random: the same inputs on every run. `make fuzz SECONDS=600`
does more, guided by coverage."""

import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import ANY
from urllib.parse import urlsplit

import msgspec
import pytest
from fuzz.all_targets import TARGETS
from fuzz.choices import Target
from harness.paths import SUPPORT
from harness.processes import rss_bytes

from lmcache_client import server_channel
from lmcache_client.contract import messages
from lmcache_server import config
from lmcache_server.admin import http
from lmcache_server.options import NAMES
from lmcache_server.service import router

OF_OPTIONS = " ".join(
    answer for option, answer in (("kv_events", "Followed"), ("pins", "Pinned Unpinned")) if option in NAMES
)
PORTIONS: dict[str, tuple[int, int, str]] = {
    "decoder": (30_000, 6, "request reply unreadable"),
    "router": (
        2000,
        30,
        f"Stored Done Found Registered Joined Inspected expired {OF_OPTIONS}",
    ),
    "pages": (1500, 20, "200 400 403 404 405 431"),
    "options": (500, 6, "taken refused"),
    "replies": (700, 20, "ready refused down found unreadable"),
}
if "warm_restart" in NAMES:
    PORTIONS["files"] = 400, 20, "restored empty refused"
if "tiers" in NAMES:
    PORTIONS["records"] = 4000, 12, "whole damaged"
"""Of each target: how many inputs, how many changes in each, and what must come of ten of them at least."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def mutated(seed: bytes, draw: random.Random, most: int) -> bytes:
    """Up to `most` bytes changed, cut out, put in, or doubled."""
    data = bytearray(seed)
    for _ in range(draw.randint(0, most)):
        at = draw.randrange(len(data) + 1)
        how = draw.randrange(5)
        if how == 0:
            data[at : at + 1] = draw.randbytes(1)
        elif how == 1:
            del data[at : at + draw.randint(1, 8)]
        elif how == 2:
            data[at:at] = draw.randbytes(draw.randint(1, 8))
        elif how == 3:
            data[at:at] = data[at : at + draw.randint(1, 40)]
        else:
            data[at : at + 1] = draw.choice((b"\x00", b"\x7f", b"\x80", b"\x90", b"\xc0", b"\xdd", b"\xff"))
    return bytes(data)


def play(target: Target, inputs: int, most: int) -> None:
    """Runs the seeds and then so many mutations of them; nothing grows meanwhile."""
    draw = random.Random(3)
    for seed in target.seeds:
        target.run(seed)
    for number in range(inputs):
        if number == inputs // 4:
            before = rss_bytes()
        rest = draw.randbytes(draw.choice((0, 0, 30)))
        target.run(mutated(draw.choice(target.seeds), draw, most) + rest)
    assert rss_bytes() - before < 16 << 20


@pytest.mark.parametrize("what", PORTIONS)
def test_a_portion_of_each_target(what: str) -> None:
    inputs, most, reached = PORTIONS[what]
    with TARGETS[what]() as target:
        play(target, inputs, most)
    print(f"{target.inputs} inputs: {dict(target.outcomes.most_common())}")
    for each in reached.split():
        assert target.outcomes[each] >= 10, f"{each}: the inputs reach deep"


def test_fuzzing_guided_by_coverage_runs() -> None:
    pytest.importorskip("atheris", reason="atheris is not installed: make fuzz needs it")
    result = subprocess.run(
        [sys.executable, "-m", "fuzz", "decoder", "2"],
        cwd=SUPPORT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Done " in result.stderr


FAULTS = {
    "decoder": (messages, "_message", msgspec.msgpack.decode),
    "router": (router.Router, "_reply", lambda *_: None),
    "pages": (http.Server, "_is_own_name", lambda _, host: urlsplit(f"//{host}").port != 0),
    "options": (config._TEXT, "func", str),
    "replies": (server_channel.Channel, "_is_over", lambda *_: True),
}
if "warm_restart" in NAMES:
    from lmcache_server.options.warm_restart import snapshot

    FAULTS["files"] = snapshot, "_objects", lambda chunk: chunk.packed.objects()
if "tiers" in NAMES:
    from lmcache_server.options.tiers import record_format

    FAULTS["records"] = record_format, "digest", lambda _payload: ANY
"""Types are not checked; nothing is answered; an impossible port in a Host header is a ValueError; the bits
of a chunk are believed; control characters are taken; a broken connection means that the server has ended;
every digest is right."""


@pytest.mark.parametrize("what", FAULTS)
def test_each_target_finds_a_fault(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The checks of the targets can fail."""
    inputs, most, _ = PORTIONS[what]
    with TARGETS[what]() as target, monkeypatch.context() as patch:
        patch.setattr(*FAULTS[what])
        patch.setattr("fuzz.targets.ANSWER_S", 0.2)
        with pytest.raises((AssertionError, TimeoutError)):
            play(target, inputs, most)
