"""The status report as text for a terminal."""

from typing import Any

from lmcache_server.host.logs import printable
from lmcache_server.host.units import size
from lmcache_server.options import parts

REASONS = {
    "not_stored": "never stored",
    "evicted": "evicted",
    "tier_down": "perhaps in a tier that is left alone",
    "tier_late": "not brought from a tier in time",
    "no_state": "without a window or state",
    "partial": "stored by some workers only",
}
"""Why tokens were missed, by the names of the report."""


def summary(report: dict[str, Any]) -> str:
    """A short text about the server; `report` is what `control.report` returns."""
    l1, tokens = report["l1"], report["tokens"]
    used = l1["ready_bytes"] + l1["reserved_bytes"]
    share = 100 * used / max(l1["total_bytes"], 1)
    lines = [
        f"lmcache server {report['version']}, pid {report['pid']}, up {duration(report['uptime_s'])}",
        f"L1: {size(used)} of {size(l1['total_bytes'])} used ({share:.1f} %), "
        f"{l1['chunks']:,} chunks, {l1['leases']} leases",
        f"tokens looked up: {tokens['hit']:,} hit, {tokens['miss']:,} missed, {tokens['computed']:,} held by "
        f"the engine itself; hit rate {100 * report['hit_rate']:.1f} %",
    ]
    if hits := report["test_hit_tokens"]:
        lines.append(f"tests (bench, verify, self-tests): {hits:,} tokens hit, counted apart")
    for of_option in parts("text", "lines"):
        lines += of_option(report)
    lines.append(f"namespaces: {count(report, 'namespaces')}")
    for namespace in report["namespaces"]:
        lines.append(
            f"  {namespace['namespace'][:12]}  {namespace['model']}  chunk size {namespace['chunk_size']}, "
            f"{namespace['chunks']:,} chunks, {namespace['world_size']} worker(s), "
            f"{len(namespace['engines'])} engine(s) connected, room for about "
            f"{namespace['capacity_tokens']:,} tokens"
        )
        if tokens := namespace["tokens"]:
            why = reasons(namespace["missed"] or {})
            lines.append(f"    tokens: {tokens['hit']:,} hit, {tokens['miss']:,} missed{why and ': '}{why}")
        for index, group in enumerate(namespace["groups"]):
            lines.append(
                f"    group {index}: {group_name(group)}, {group['layers']} layers, "
                f"blocks of {group['block_size']} tokens and {size(group['block_bytes'])}"
            )
    lines.append(f"sessions: {count(report, 'sessions')}")
    for session in report["sessions"]:
        of_engine = f" of engine {session['engine_id']}" if session["engine_id"] else ""
        lines.append(
            f"  {session['session_id']}  {session['role']}{of_engine}, rank {session['rank']}, "
            f"pid {session['pid']}, {duration(session['age_s'])}"
        )
        if session["not_cached"]:
            lines.append(f"     because it has {session['not_cached']}")
    # Clients chose some of these names, which must not end a line or move the cursor.
    return "\n".join(map(printable, lines))


def reasons(missed: dict[str, int]) -> str:
    """Why tokens were missed, in words; empty if none were."""
    return ", ".join(f"{missed[why]:,} {text}" for why, text in REASONS.items() if missed.get(why))


def group_name(group: dict[str, Any]) -> str:
    """The kind of a group, and its window if it has one."""
    window = f" of {group['window']} tokens" if group["window"] else ""
    return f"{group['kind'].replace('_', ' ')}{window}"


def explanation(report: dict[str, Any], namespaces: tuple[str, ...] = ()) -> str:
    """What the namespaces of the connected engines are made of, a line each, to be compared with `diff`. If
    `namespaces` has first digits: only those namespaces, and only what differs."""
    chosen = [each for each in report["explained"] if each["namespace"].startswith(namespaces or "")]
    lines = []
    for explained in sorted(chosen, key=lambda each: str(each["engine"])):
        lines.append(f"engine {explained['engine']}, namespace {explained['namespace']}")
        for name, value in explained["fields"].items():
            differs = any(each["fields"].get(name) != value for each in chosen)
            if differs or (value and not namespaces):
                lines.append(f"  {name}: {value}")
    nothing = "has a namespace that begins with these digits" if namespaces else "is connected"
    return "\n".join(map(printable, lines)) or f"no engine {nothing}: start one, then ask again"


def count(report: dict[str, Any], what: str) -> str:
    shown, left_out = len(report[what]), report[f"{what}_left_out"]
    return f"{shown + left_out}, of which {left_out} are not shown" if left_out else str(shown)


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
