"""The curve of a soak."""

from collections.abc import Sequence
from pathlib import Path

from soak.samples import Sample, warm


def draw(samples: Sequence[Sample], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    # The same samples give the same file.
    mpl.rcParams["svg.hashsalt"] = "lmcache-mp"
    from matplotlib import pyplot

    figure, (memory, handles) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 5), height_ratios=(2, 1))
    for at_rest, style, label in ((False, "-", "under load"), (True, "o", "no client")):
        some = [each for each in samples if each.at_rest == at_rest]
        minutes = [each.at_s / 60 for each in some]
        memory.plot(minutes, [each.rss_bytes / (1 << 20) for each in some], style, label=label, markersize=4)
    resting = [each for each in samples if each.at_rest]
    minutes = [each.at_s / 60 for each in resting]
    for name in ("descriptors", "threads"):
        handles.plot(minutes, [getattr(each, name) for each in resting], label=name)
    memory.axvline(warm(samples)[0].at_s / 60, color="grey", linestyle=":")
    memory.set(title="One server, clients that come, fail and are killed", ylabel="resident memory, MiB")
    handles.set(xlabel="minutes", ylabel="with no client")
    for axes in (memory, handles):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
