"""What `lmcache plan` advises."""

import pytest

from lmcache_server.options.planner import text as plan

GB = 1 << 30


def window(*rates: float, tokens: int = 1000) -> dict[str, object]:
    names = ("0.25", "0.5", "1", "2", "4", "10", "unlimited")
    return {"tokens": tokens, "hit_rates": dict(zip(names, rates, strict=True)), "namespaces": {}}


@pytest.mark.parametrize(
    ("rates", "advice"),
    [
        ((0.1, 0.2, 0.3, 0.3, 0.31, 0.31, 0.31), "More memory would hardly help"),
        (
            (0.76, 0.769, 0.769, 0.769, 0.769, 0.769, 0.769),
            "More memory would hardly help: 76.9% hit in this size, and 76.9% without any limit. "
            "25.0 GiB would be enough: 76.0% would hit.",
        ),
        ((0.1, 0.2, 0.3, 0.36, 0.37, 0.37, 0.37), "2 times the memory (200.0 GiB) would raise the hits"),
        ((0.1, 0.2, 0.3, 0.31, 0.37, 0.38, 0.40), "4 times the memory (400.0 GiB)"),
        ((0.1, 0.2, 0.3, 0.31, 0.32, 0.33, 0.80), "Even ten times the memory would raise the hits only"),
    ],
)
def test_the_smallest_size_that_gives_half_of_the_gain_is_advised(
    rates: tuple[float, ...], advice: str
) -> None:
    said = plan.advice(window(*rates), 100 * GB)
    assert said.startswith(advice)
    names_a_tier = "A tier (--tier) of that size hits nearly the same" in said
    assert names_a_tier == ("would raise the hits of" in said)


def test_without_lookups_there_is_no_advice() -> None:
    assert plan.advice(window(*[0.0] * 7, tokens=0), GB) == "No engine has looked anything up yet."


def test_the_table_has_a_line_for_each_size_and_names_the_limit_of_exactness() -> None:
    windows = dict.fromkeys(("hour", "day", "start"), window(0.1, 0.2, 0.3, 0.36, 0.37, 0.37, 0.373))
    lines = plan.table({"windows": windows, "exact_bytes": 64 * GB}, 2 * GB).splitlines()
    assert "1x, 2.0 GiB (now)        30.0%        30.0%        30.0%  " + "█" * 12 in "\n".join(lines)
    recorded = plan.table({"windows": windows, "exact_bytes": None}, 2 * GB, is_record=True)
    assert "        1x, 2.0 GiB        30.0%" in recorded
    assert any(line.startswith("       without limit        37.3%") for line in lines)
    assert "Exact up to 64.0 GiB: what was used longer ago is forgotten." in lines
