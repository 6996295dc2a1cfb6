"""What `lmcache plan` advises."""

from pathlib import Path

import msgspec
import pytest

from lmcache_server.options.planner import recording
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


def event(time_s: float) -> recording.Event:
    return recording.Event(time_s, "lookup", "n", 16, 1, False, False, 0, 16, "0011223344556677")


def test_a_record_of_two_boots_has_one_clock(tmp_path: Path) -> None:
    """The clock of a machine that starts again begins at 0."""
    path = tmp_path / "record"
    lines = [
        msgspec.json.encode(event(time_s)) + b"\n" for time_s in (0.0, 500_000.0, 500_001.0, 1.0, 90_000.0)
    ]
    path.write_bytes(b"".join(lines))
    windows = plan.replayed(str(path), GB)["windows"]
    assert [windows[name]["tokens"] for name in ("hour", "day", "start")] == [16, 16, 5 * 16]


def test_a_line_that_a_full_disk_cut_is_removed_before_others_follow(tmp_path: Path) -> None:
    path, line = tmp_path / "record", msgspec.json.encode(event(1.0)) + b"\n"
    for left in (b"", line, line + line):
        path.write_bytes(left + line[:-9])
        recorder = recording.Recorder(str(path))
        recorder.add(event(2.0))
        recorder.flush()
        recorder._file.close()
        assert len(list(recording.read(str(path)))) == len(left) // len(line) + 1


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
