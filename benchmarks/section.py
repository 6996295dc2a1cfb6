"""What a benchmark hands to the report: one JSON file."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".cache" / "bench" / "results"


@dataclass
class Section:
    """`tables` have caption, columns and rows of strings; `bars` what was asked for, what was measured,
    whether it was met, and whether it stands at the top of the page; `plots` a file stem, axes and series of
    points."""

    name: str
    title: str
    text: str
    tables: list[dict[str, object]] = field(default_factory=list)
    bars: list[dict[str, object]] = field(default_factory=list)
    plots: list[dict[str, object]] = field(default_factory=list)

    def table(self, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.tables.append(
            {"caption": caption, "columns": list(columns), "rows": [list(row) for row in rows]}
        )

    def bar(self, bar: str, measured: str, met: bool, top: bool = False) -> None:
        """`top` is for what a user would ask about."""
        self.bars.append({"bar": bar, "measured": measured, "met": bool(met), "top": top})

    def plot(
        self,
        name: str,
        title: str,
        x: str,
        y: str,
        series: dict[str, list[tuple[float, float]]],
        log_x: bool = True,
        log_y: bool = False,
    ) -> None:
        self.plots.append(
            {"name": name, "title": title, "x": x, "y": y, "series": series, "log_x": log_x, "log_y": log_y}
        )

    def save(self) -> None:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{self.name}.json").write_text(json.dumps(asdict(self), indent=1))
        print(f"\n{self.title}")
        for table in self.tables:
            for row in [table["columns"], *table["rows"]]:  # type: ignore[misc]
                print("  ", " | ".join(map(str, row)))
        for bar in self.bars:
            print("  ", "met   " if bar["met"] else "MISSED", bar["bar"], "--", bar["measured"], flush=True)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def micros(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs"


def millis(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
