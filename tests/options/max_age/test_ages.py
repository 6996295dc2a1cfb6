"""How old chunks may get: the limits that a text sets."""

import math

import pytest
from harness.options import load

from lmcache_server.errors import StartError
from lmcache_server.options.max_age.flags import ages_s

NAMESPACE = bytes.fromhex("0b5d5f2cbd9c") + bytes(26)
DAY_S = 86400.0


@pytest.mark.parametrize(
    ("text", "model", "limit_s"),
    [
        ("", "some/model", math.inf),
        ("7d", "some/model", 7 * DAY_S),
        ("3600s", None, 3600),
        ("0.5h", "some/model", 1800),
        ("90m,some/model=24h", "some/model", DAY_S),
        ("90m,some/model=24h", "other", 5400),
        ("some/model=45s", "other", math.inf),
        ("7d, 0B5D5F2C = 1h", "other", 3600),
        ("7d,0b5d5f2d=1h", "other", 7 * DAY_S),
        ("7d,0b5d5f2=1h", "other", 7 * DAY_S),
        ("0b5d5f2=1h", "0b5d5f2", 3600),
        ("7d,some/model=24h,0b5d5f2cbd9c=30d", "some/model", DAY_S),
        ("a=b=1h", "a=b", 3600),
        ("7d,some/model=24h", None, DAY_S),
        ("7d,some/model=30d", None, 7 * DAY_S),
    ],
)
def test_the_limit_of_a_namespace(text: str, model: str | None, limit_s: float) -> None:
    """If nobody knows its model any more, the smallest of all."""
    assert ages_s(text).of(NAMESPACE, model) == limit_s


WRONG = [
    "0",
    "7",
    "7,a=1h",
    "0d",
    "-1",
    "7 days",
    "inf",
    "nan",
    "1e9",
    "7d,",
    ",",
    "a=",
    "7d,1d",
    "a=1h,a=2h",
    "\u0661d",
]


@pytest.mark.parametrize("text", [*WRONG, "9" * 40])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(ValueError):
        ages_s(text)


def test_a_wrong_age_is_one_sentence() -> None:
    for wrong in ("7 days", "7"):
        with pytest.raises(StartError) as refused:
            load("--max-age", wrong)
        said = "--max-age must be an age with its unit (s, m, h or d), such as 7d, or 7d,some/model=24h, not"
        assert str(refused.value) == f"{said} {wrong!r}"
    assert load("--max-age", "7d,some/model=24h").of_options == {"max_age": "7d,some/model=24h"}
