"""The text of `lmcache plan`: what other sizes of L1 would have hit."""

from typing import Any, TypedDict

from lmcache_client.contract.codec import Natural
from lmcache_server.commands.control import SHARE, json_object
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.host.logs import printable
from lmcache_server.host.units import size
from lmcache_server.options.planner import recording
from lmcache_server.options.planner.demand import SIZES, Demand, Sizes, rates

WINDOWS = {"hour": "last hour", "day": "last day", "start": "since start"}
_HIT_RATES = TypedDict("_HIT_RATES", dict.fromkeys(SIZES, SHARE))  # type: ignore[misc]
_WINDOW = json_object("", "tokens", hit_rates=_HIT_RATES)
_WINDOWS = json_object("", "", **dict.fromkeys(WINDOWS, _WINDOW))
REPORT = {"demand": json_object("", "", exact_bytes=Natural | None, windows=_WINDOWS)}
MAX_RECORDED_KEYS = 20_000_000
BAR = 40
LITTLE = 0.02  # a gain in the hit rate that is not worth more memory
MOST = 0.5  # the share of all possible gain that a recommended size has at least


def replayed(path: str, l1_bytes: int) -> dict[str, Any]:
    """The demand of a record, in the form of a status report, for an L1 of this size. Raises CommandError."""
    counted, time_s, boot_s = Demand(MAX_RECORDED_KEYS), 0.0, 0.0
    counted.l1_frames = l1_bytes / FRAME_BYTES
    for event in recording.read(path):
        # Its clock begins again when the machine does; how long that took is not known.
        boot_s = time_s if boot_s + event.time_s < time_s else boot_s
        namespace, time_s = event.namespace.encode(), boot_s + event.time_s
        sizes = Sizes(event.chunk_size, event.chunk_frames, event.sparse, event.states)
        if event.kind == "lookup":
            tokens = (event.computed_tokens, event.limit_tokens)
            counted.looked_up(namespace, sizes, event.names(), *tokens, time_s)
        else:
            counted.completed(namespace, sizes, event.names())
    exact = counted.exact_frames()
    return {
        "exact_bytes": None if exact is None else exact * FRAME_BYTES,
        "windows": {name: rates(counted.window(name, time_s).values()) for name in WINDOWS},
    }


def table(demand: dict[str, Any], l1_bytes: int, is_record: bool = False) -> str:
    """`demand` is that of a status report. A record does not know how large L1 was."""
    windows = {name: demand["windows"][name] for name in WINDOWS}
    columns = [window["hit_rates"] for window in windows.values()]
    lines = ["of the tokens that engines looked up and did not hold themselves, these would have hit:", ""]
    lines.append(f"{'L1':>20}" + "".join(f"{text:>13}" for text in WINDOWS.values()))
    for multiple in columns[0]:
        shares = [column[multiple] for column in columns]
        bar = "█" * round(BAR * shares[1])
        label = "without limit"
        if multiple != "unlimited":
            now = " (now)" if multiple == "1" and not is_record else ""
            label = f"{float(multiple):g}x, {size(int(float(multiple) * l1_bytes))}{now}"
        lines.append(f"{label:>20}" + "".join(f"{share:>13.1%}" for share in shares) + f"  {bar}".rstrip())
    lines.append(f"{'tokens looked up':>20}" + "".join(f"{w['tokens']:>13,}" for w in windows.values()))
    if demand["exact_bytes"] is not None:
        lines.append(f"Exact up to {size(demand['exact_bytes'])}: what was used longer ago is forgotten.")
    lines += ["", advice(windows["day"], l1_bytes)]
    return "\n".join(map(printable, lines))


def advice(window: dict[str, Any], l1_bytes: int) -> str:
    """What to buy."""
    hits = window["hit_rates"]
    now, most = hits["1"], hits["unlimited"]
    if not window["tokens"]:
        return "No engine has looked anything up yet."
    if most - now < LITTLE:
        text = f"More memory would hardly help: {now:.1%} hit in this size, and {most:.1%} without any limit."
        enough = next(multiple for multiple in hits if now - hits[multiple] < LITTLE)
        less = f" {size(int(float(enough) * l1_bytes))} would be enough: {hits[enough]:.1%} would hit."
        return text + (less if enough != "1" else "")
    for multiple in ("2", "4", "10"):
        if hits[multiple] - now >= MOST * (most - now):
            more = f"{multiple} times the memory ({size(int(float(multiple) * l1_bytes))})"
            gain = f"{more} would raise the hits of the last day from {now:.1%} to {hits[multiple]:.1%}."
            return f"{gain} A tier (--tier) of that size hits nearly the same, only more slowly."
    return (
        f"Even ten times the memory would raise the hits only from {now:.1%} to {hits['10']:.1%}: most "
        "prompts come back after more than that has been stored."
    )
