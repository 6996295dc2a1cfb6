"""A fixed portion of the fuzzing: the same frames on every run. `make fuzz SECONDS=600` does more."""

import logging
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fuzz.all_targets import TARGETS
from fuzz.targets import RouterTarget, check_decoder, decoder_seeds, owner, router_seeds
from harness.paths import SUPPORT

from lmcache_client.channel import Channel
from lmcache_server import config
from lmcache_server.admin import http
from lmcache_server.core import snapshot

DECODER_FRAMES = 60_000
ROUTER_RUNS = 4000


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


def test_the_decoder_takes_any_bytes() -> None:
    draw, seeds = random.Random(1), decoder_seeds()
    for _ in range(DECODER_FRAMES):
        check_decoder(mutated(draw.choice(seeds), draw, 6))


def rss_bytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) << 10


def test_the_router_takes_any_frames_of_any_clients() -> None:
    """No exception escapes, every request that can be answered gets exactly one reply, the invariants hold
    after every sequence, and nothing grows."""
    draw, seeds = random.Random(2), router_seeds()
    with owner() as (pid, address):
        target = RouterTarget(pid, address)
        try:
            for number in range(ROUTER_RUNS):
                if number == ROUTER_RUNS // 4:
                    before = rss_bytes()
                target.run(mutated(draw.choice(seeds), draw, 30) + draw.randbytes(draw.choice((0, 50))))
            assert rss_bytes() - before < 16 << 20
        finally:
            target.close()
    print(f"{target.inputs} frames: {dict(target.replies.most_common())}")
    for reached in (
        "Stored",
        "Done",
        "Found",
        "Registered",
        "Joined",
        "Pinned",
        "Unpinned",
        "Inspected",
        "Followed",
        "expired",
        "bad_request",
        "no_access",
    ):
        assert target.replies[reached] > 10, f"{reached}: the frames reach deep"


REACHED = {
    "pages": ("200", "400", "403", "404", "405", "431"),
    "files": ("restored", "empty", "refused"),
    "options": ("taken", "refused"),
    "replies": ("ready", "refused", "down", "found", "unreadable"),
}
INPUTS = {"pages": 2500, "files": 1500, "options": 500, "replies": 1500}


def play(what: str, inputs: int) -> str:
    """Runs the seeds of a target and then so many mutations of them; returns what came of them."""
    draw, (seeds, make) = random.Random(3), TARGETS[what]
    most = 6 if what == "options" else 20
    with make() as target:
        for seed in seeds():
            target.run(seed)
        for _ in range(inputs):
            target.run(mutated(draw.choice(seeds()), draw, most) + draw.randbytes(draw.choice((0, 0, 30))))
        assert target.inputs == inputs + len(seeds())
        return target.detail()


@pytest.mark.parametrize("what", REACHED)
def test_a_portion_of_each_other_target(what: str) -> None:
    logging.disable(logging.CRITICAL)
    try:
        detail = play(what, INPUTS[what])
    finally:
        logging.disable(logging.NOTSET)
    print(detail)
    for reached in REACHED[what]:
        assert re.search(rf"\b{reached}'?: \d\d", detail), f"{reached}: the inputs reach deep; {detail}"


@pytest.mark.parametrize("what", TARGETS)
def test_fuzzing_guided_by_coverage_runs(what: str) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed: make fuzz needs it")
    result = subprocess.run(
        [sys.executable, "-m", "fuzz", what, "2"],
        cwd=SUPPORT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Done " in result.stderr


def test_the_target_fails_when_the_router_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of the target can fail."""
    (life, *_) = router_seeds()
    with owner() as (pid, address):
        target = RouterTarget(pid, address)
        monkeypatch.setattr(target.router, "_reply", lambda *_: None)
        monkeypatch.setattr("fuzz.targets.ANSWER_S", 0.2)
        started_s = time.monotonic()
        with pytest.raises(TimeoutError):
            target.run(life)
        assert time.monotonic() - started_s < 5
        target.close()


def put_in(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A fault that somebody could have made."""
    if what == "pages":  # an impossible port in a Host header is a ValueError
        monkeypatch.setattr(http.Server, "_is_own_name", lambda _, host: urlsplit(f"//{host}").port != 0)
    elif what == "files":  # the bits of a chunk are believed
        monkeypatch.setattr(snapshot, "_objects", lambda chunk: chunk.packed.objects())
    elif what == "options":  # names with control characters are taken
        monkeypatch.setattr(config._TEXT, "func", str)
    else:  # a broken connection is taken for the end of the server
        monkeypatch.setattr(Channel, "_is_over", lambda *_: True)


@pytest.mark.parametrize("what", REACHED)
def test_each_other_target_finds_a_fault(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    put_in(monkeypatch, what)
    logging.disable(logging.CRITICAL)
    try:
        with pytest.raises(AssertionError):
            play(what, 20 * INPUTS[what])
    finally:
        logging.disable(logging.NOTSET)
