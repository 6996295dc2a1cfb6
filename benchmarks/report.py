"""docs/benchmarks.md and its plots, from what the benchmarks measured."""

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import summary

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "benchmarks"
NOTES = ROOT / "benchmarks" / "notes.md"
"""Written by hand: what a run cannot know."""
Section = Mapping[str, Any]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def verdict(bar: Mapping[str, Any]) -> list[str]:
    return [bar["bar"], bar["measured"], "met" if bar["met"] else "**missed**"]


def top(sections: Sequence[Section]) -> list[str]:
    """The bars that a user would ask about, and how many the sections have."""
    rows = [
        [section["title"], *verdict(bar)] for section in sections for bar in section["bars"] if bar.get("top")
    ]
    every = [bar["met"] for section in sections for bar in section["bars"]]
    count = f"Each section has its own bars. Of all {len(every)}, {every.count(False)} were missed."
    return [*table(["", "bar", "measured", ""], rows), "", count]


def body(section: Section, named_run: bool) -> list[str]:
    """A section; with `named_run` it says in which run it was measured."""
    lines = [f"## {section['title']}", "", section["text"], ""]
    if named_run:
        lines += [f"Measured in the run of {run(section)}.", ""]
    for each in section.get("tables") or [section]:
        if each.get("caption"):
            lines += [each["caption"], ""]
        lines += [*table(each["columns"], each["rows"]), ""]
    if section["bars"]:
        lines += [*table(["bar", "measured", ""], list(map(verdict, section["bars"]))), ""]
    for each in section.get("plots", ()):
        lines += [f"![{each['title']}](benchmarks/{each['name']}.svg)", ""]
    return lines


def run(section: Section) -> str:
    """The run that measured a section."""
    return str(section.get("run", "unknown time"))


def draw(plot: Mapping[str, Any]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, points in plot["series"].items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(title=plot["title"], xlabel=plot["x"], ylabel=plot["y"])
    if plot["log_x"]:
        axes.set_xscale(
            "log", base=2 if max(x for each in plot["series"].values() for x, _ in each) < 1e5 else 10
        )
    if plot["log_y"]:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(PLOTS / f"{plot['name']}.svg", metadata={"Date": None})
    pyplot.close(figure)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def beginning(sections: Sequence[Section]) -> list[str]:
    """The sentences and the picture for people who choose; what they need may not have been measured."""
    known = {section["name"]: section for section in sections}
    if not all(name in known for name in summary.NEEDED):
        return []
    summary.draw(known, PLOTS)
    picture = f"![How much sooner a cached prompt is answered](benchmarks/{summary.PICTURE}.svg)"
    return [" ".join(summary.sentences(known)), "", picture, ""]


def prepare_plots() -> None:
    """The same figures give the same files."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "lmcache-mp"
    PLOTS.mkdir(parents=True, exist_ok=True)


def write(sections: Sequence[Section], failed: Sequence[str], minutes: float) -> None:
    """Replaces the page and its plots. `minutes` are those of a whole run, if it was one. A page of several
    runs says so, and names the run of each section."""
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    is_one_run = len({run(section) for section in sections}) == 1
    prepare_plots()
    lines = ["# Benchmarks", "", *beginning(sections)]
    lines += [
        f"Measured on: {processor()}, {len(os.sched_getaffinity(0))} processors, {memory_gib:.0f} GiB, no GPU used; "
        f"Python {platform.python_version()}, Linux {platform.release().partition('-')[0]}. "
        + (
            f"All of it is one run, of {run(sections[0])}"
            if is_one_run
            else "**This page is of several runs**"
        )
        + (
            f" ({minutes:.0f} minutes)."
            if minutes
            else "."
            if is_one_run
            else ": each section names its own."
        ),
        "",
        "Written by `make bench`, which installs what it compares with (LMCache 0.5.6 in multiprocess mode) into",
        "environments of its own. Figures of one run are comparable with each other, not with those of another",
        "machine: read ratios. Where there is a GPU, the engines have vLLM's own offloading beside them, and",
        "`make bench-gpu` measures the copies. [What ran on a GPU](gpu-results.md) lists what has been run.",
        "",
        "## What was asked for, and what was measured",
        "",
        *top(sections),
        "",
    ]
    if failed:
        lines += [f"**Not measured, because it failed: {', '.join(failed)}.**", ""]
    if NOTES.exists():
        lines += [NOTES.read_text().rstrip(), ""]
    for section in sections:
        lines += body(section, named_run=not is_one_run)
        for plot in section.get("plots", ()):
            draw(plot)
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    missed = sum(not bar["met"] for section in sections for bar in section["bars"])
    print(f"\n{PAGE} written; {missed} bars missed")


if __name__ == "__main__":
    raise SystemExit("this is a part of run.py")
