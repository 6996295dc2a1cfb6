"""The beginning of docs/benchmarks.md, for people who choose: five sentences and one picture.

Every figure is taken from what the sections measured, so it cannot differ from theirs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Section = Mapping[str, Any]
PICTURE = "overview"
NEEDED = ("engine", "replay")
OURS = "ours"
COLD, LOCAL = "cold", "local hit"


def sentences(sections: Mapping[str, Section]) -> list[str]:
    """Five sentences. `sections` are by name and have all of NEEDED."""
    times = first_tokens(sections["engine"])
    length = max(times[COLD])
    ours, cold, local = (times[name][length] for name in (OURS, COLD, LOCAL))
    said = [
        f"The first token of a prompt of {length:,} tokens that the server has comes {cold / ours:.0f} times sooner: "
        f"after {ours:.2f} s instead of {cold:.1f} s.",
        f"With vLLM's own prefix cache it comes after {local:.2f} s, but that cache belongs to one engine and ends "
        "with it.",
    ]
    others = [
        f"{name} it comes after {at[length]:.2f} s"
        for name, at in times.items()
        if name not in (OURS, COLD, LOCAL)
    ]
    said.append(f"With {', with '.join(others)}." if others else "No other cache was measured.")
    shares = [f"{share:.1%} in {work}" for work, share in throughput(sections["engine"]).items()]
    said.append(
        f"If no prompt ever comes back, an engine with this server has {', '.join(shares)} of the throughput that "
        "vLLM has alone."
    )
    rooms = [(row[0], float(row[2])) for row in sections["replay"]["tables"][0]["rows"]]
    (small, least), (large, most) = rooms[0], rooms[-1]
    said.append(
        f"Of all prompt tokens of a public trace, the server finds {least:.0%} with room for {small} chunks, and "
        f"{most:.0%} with room for {large} chunks."
    )
    return said


def first_tokens(engine: Section) -> dict[str, dict[int, float]]:
    """Seconds to the first token, by system and by tokens of the prompt."""
    (plot,) = (plot for plot in engine["plots"] if plot["name"] == "first-token")
    return {name: {int(x): y for x, y in points} for name, points in plot["series"].items()}


def throughput(engine: Section) -> dict[str, float]:
    """By work, our throughput over that of vLLM alone."""
    (table,) = (table for table in engine["tables"] if "throughput" in table["columns"])
    place = table["columns"].index("throughput")
    return {row[0]: float(row[place]) for row in table["rows"] if row[1] == OURS}


def draw(sections: Mapping[str, Section], folder: Path) -> None:
    """Bars: how many times as soon as without any cache the first token comes, by length of the prompt."""
    from matplotlib import pyplot

    times = first_tokens(sections["engine"])
    names = [name for name in (LOCAL, OURS) if name in times]
    names += [name for name in times if name not in (COLD, LOCAL, OURS)]
    labels = {LOCAL: "vLLM's own prefix cache", OURS: "this server"}
    lengths = sorted(times[COLD])
    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        heights = [times[COLD][length] / times[name][length] for length in lengths]
        places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(lengths))]
        bars = axes.bar(places, heights, width, label=labels.get(name, name))
        axes.bar_label(bars, [f"{height:.0f}" for height in heights], fontsize=8)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set(
        title="How many times sooner the first token of a cached prompt comes",
        xlabel="prompt tokens",
        ylabel="time to first token, computed / cached",
    )
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / f"{PICTURE}.svg", metadata={"Date": None})
    pyplot.close(figure)
