"""The status report as text for a terminal."""

from typing import Any

from lmcache_server.host.logs import printable
from lmcache_server.host.units import size


def summary(report: dict[str, Any]) -> str:
    """A short text about the server; `report` is what `control.report` returns."""
    l1, tokens = report["l1"], report["tokens"]
    used = l1["ready_bytes"] + l1["reserved_bytes"]
    share = 100 * used / max(l1["total_bytes"], 1)
    lines = [
        f"lmcache server {report['version']}, pid {report['pid']}, up {_duration(report['uptime_s'])}",
        f"L1: {size(used)} of {size(l1['total_bytes'])} used ({share:.1f} %), "
        f"{l1['chunks']} chunks, {l1['leases']} leases",
        f"tokens looked up: {tokens['hit']} hit, {tokens['miss']} missed, {tokens['computed']} held by the "
        f"engine itself; hit rate {100 * report['hit_rate']:.1f} %",
        f"namespaces: {_count(report, 'namespaces')}",
    ]
    for namespace in report["namespaces"]:
        lines.append(
            f"  {namespace['namespace'][:12]}  {namespace['model']}  chunk size {namespace['chunk_size']}, "
            f"{namespace['chunks']} chunks, {namespace['world_size']} worker(s), "
            f"{len(namespace['engines'])} engine(s) connected"
        )
        for index, group in enumerate(namespace["groups"]):
            window = f" of {group['window']} tokens" if group["window"] else ""
            lines.append(
                f"    group {index}: {group['kind'].replace('_', ' ')}{window}, {group['layers']} layers, "
                f"blocks of {group['block_size']} tokens and {size(group['block_bytes'])}"
            )
    lines.append(f"sessions: {_count(report, 'sessions')}")
    for session in report["sessions"]:
        of_engine = f" of engine {session['engine_id']}" if session["engine_id"] else ""
        lines.append(
            f"  {session['session_id']}  {session['role']}{of_engine}, rank {session['rank']}, "
            f"pid {session['pid']}, {_duration(session['age_s'])}"
        )
        if session["not_cached"]:
            lines.append(f"     because it has {session['not_cached']}")
    # Clients chose some of these names, which must not end a line or move the cursor.
    return "\n".join(map(printable, lines))


def _count(report: dict[str, Any], what: str) -> str:
    shown, left_out = len(report[what]), report[f"{what}_left_out"]
    return f"{shown + left_out}, of which {left_out} are not shown" if left_out else str(shown)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
