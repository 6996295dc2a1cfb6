"""`lmcache inspect`: how much of a prompt the server holds, and why not more. It changes nothing."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_client.contract.control import Inspect, Inspected
from lmcache_client.contract.keys import MAX_CHUNKS, chunk_keys
from lmcache_server.commands.control import ControlError
from lmcache_server.commands.status import group_name, reasons
from lmcache_server.host.logs import printable

SHOWN_GAPS, SHOWN_RANKS = 4, 8

Ask = Callable[[Inspect], Inspected]


def chosen(report: dict[str, Any], model: str, namespace: str) -> list[dict[str, Any]]:
    """The namespaces of a status report that have an engine and match, where an empty name matches all.
    Raises ControlError if there is none."""
    found = [
        each
        for each in report["namespaces"]
        if each["engines"] and not each["ephemeral"]
        if model in ("", each["model"]) and each["namespace"].startswith(namespace)
    ]
    if not found:
        wanted = f"no engine of {model or 'this namespace'}" if model or namespace else "no engine"
        raise ControlError(
            f"{wanted} is connected: `lmcache status` lists models and namespaces, for --model or --namespace"
        )
    return found


def keys_of(tokens: Sequence[int], chunk_size: int, salt: str, lookahead: int = 0) -> tuple[bytes, ...]:
    """The keys of the whole chunks of a text, as the connector computes them from vLLM's extra keys: only the
    first chunk of a request has its salt. Each key covers `lookahead` tokens behind its chunk, too, for a
    drafter. Raises ControlError if these are no token ids."""
    length = chunk_size + lookahead
    starts = range(0, len(tokens) - length + 1, chunk_size)[:MAX_CHUNKS]
    first = (("cache_salt", salt),) if salt else None
    try:
        return tuple(chunk_keys((tokens[at : at + length], None if at else first) for at in starts))
    except OverflowError:
        raise ControlError("a token id is a number from 0 to 4294967295") from None


def look(ask: Ask, name: str, tokens: Sequence[int], salt: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """What the server holds of a prompt in a namespace, as JSON values. Raises ControlError."""
    size, groups, lookahead = (namespace[each] for each in ("chunk_size", "groups", "lookahead_tokens"))
    # vLLM always computes the last token, so it never asks for a chunk that ends with it.
    keys = keys_of(tokens if lookahead else tokens[:-1], max(size, 1), salt, lookahead)
    limit = len(keys) * size
    found = ask(Inspect(namespace["engines"][0], keys, limit))
    if len(found.held) != len(groups) or found.resume_tokens > limit:
        raise ControlError("the lmcache server's answer does not fit the question: restart it and ask again")
    ends = {group: (end, list(ranks)) for group, end, ranks in found.ends}
    shown = [
        {"kind": group_name(group), "where": "l1"}
        | _held(bits, len(keys), size)
        | dict(zip(("resume_tokens", "missing_ranks"), ends.get(index, (limit, [])), strict=True))
        for index, (group, bits) in enumerate(zip(groups, found.held, strict=True))
    ]
    names = {each: namespace[each] for each in ("model", "namespace", "chunk_size")}
    numbers = {"tokens": len(tokens), "limit_tokens": limit, "resume_tokens": found.resume_tokens}
    return {"name": name, **names, **numbers, "missed": dict(found.missed), "groups": shown}


def _held(bitmap: bytes, chunks: int, chunk_size: int) -> dict[str, Any]:
    bits = int.from_bytes(bitmap, "little")
    runs = [(has, len(list(run))) for has, run in itertools.groupby(bits >> at & 1 for at in range(chunks))]
    ends = list(itertools.accumulate((length * chunk_size for _, length in runs), initial=0))
    return {
        "chunks": chunks,
        "held_chunks": sum(length for has, length in runs if has),
        "leading_tokens": ends[1] if runs and runs[0][0] else 0,
        "missing_tokens": [ends[at : at + 2] for at, (has, _) in enumerate(runs) if not has],
    }


def is_whole(row: dict[str, Any]) -> bool:
    """Whether vLLM would load all that it can load of this prompt."""
    return bool(row["resume_tokens"] == row["limit_tokens"])


def text(row: dict[str, Any]) -> str:
    """One result of `look`, for a terminal."""
    head = f"{row['name']}: {row['tokens']:,} tokens, {row['model']}, namespace {row['namespace'][:12]}"
    if not row["limit_tokens"]:
        short = f"  never cached: it has no more tokens than a chunk ({row['chunk_size']:,})"
        return f"{printable(head)}\n{short}"
    why = reasons(row["missed"])
    lines = [
        head,
        f"  {row['resume_tokens']:,} of {row['limit_tokens']:,} tokens can be restored{why and ', '}{why}",
    ]
    for index, group in enumerate(row["groups"]):
        # A gap before the resume point is one of windows or states that no request needs.
        missing = [gap for gap in group["missing_tokens"] if gap[1] > row["resume_tokens"]]
        lines.append(
            f"  group {index}: {group['kind']}, in {group['where'].upper()}: {group['held_chunks']} of "
            f"{group['chunks']} chunks, the first {group['leading_tokens']:,} tokens without a gap"
            + _gaps(missing)
            + _why(group, row["limit_tokens"])
        )
    return "\n".join(map(printable, lines))


def _why(group: dict[str, Any], limit_tokens: int) -> str:
    ranks = ", ".join(map(str, group["missing_ranks"][:SHOWN_RANKS]))
    end, waits = group["resume_tokens"], f", not stored by rank {ranks}" if ranks else ""
    return f"; alone, it could be restored up to {end:,}{waits}" if end < limit_tokens else ""


def _gaps(missing: list[list[int]]) -> str:
    shown = ", ".join(f"{start:,} to {end:,}" for start, end in missing[:SHOWN_GAPS])
    more = f" and {len(missing) - SHOWN_GAPS} more" if len(missing) > SHOWN_GAPS else ""
    return f"; missing: {shown}{more}" if missing else ""
