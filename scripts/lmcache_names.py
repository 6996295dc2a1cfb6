"""Prints docs/lmcache-names.md, made from the table of LMCache's names.

python scripts/lmcache_names.py > docs/lmcache-names.md
"""

from collections.abc import Iterable

from lmcache_client.contract.lmcache_names import MISSING, NO_EFFECT, NOT_NEEDED, SAME, table

HEAD = """# LMCache's names

`python scripts/lmcache_names.py` generates this page, most of it from
`lmcache_client/contract/lmcache_names.json`, and a test keeps it up to date. It has every flag of LMCache's
server and every key of its connector, in version 0.5.6 (and the flags of 0.5.7rc3), and what they are here.
[Coming from LMCache](coming-from-lmcache.md) has the steps.
"""
SECTIONS = {
    "Flags of the server": (
        "flags",
        "The server does not start with a flag that is not *the same* here. Its error says what to do.",
    ),
    "Keys": (
        "keys",
        """These are keys of `kv_connector_extra_config`. A key with *no effect* is ignored, with one line in
the log. Any other key that is not *the same* here stops vLLM before it loads the weights. The last line of
its log says what to do.""",
    ),
    "Environment": (
        "variables",
        """The server reads a variable for each of its flags, such as `LMCACHE_L1_SIZE_GB`: see [command
line](command-line.md). It warns about every variable that begins with `LMCACHE_` and that it does not know.
`PYTHONHASHSEED` does not matter, and `DO_NOT_TRACK` is not needed.""",
    ),
    "Commands": ("commands", ""),
}
OTHER_NAMES = {
    "HTTP paths": (
        ("`/healthcheck`", "`/healthcheck`, `/healthz`", "also `/readyz`"),
        ("`/metrics`, `/status`", "the same", "the content differs"),
        ("`/version`, `/config`", "in `/status`", ""),
        ("`POST /cache/clear`", "`lmcache clear`", "HTTP is read-only"),
        ("`/env`, `/run_script`, `/quota`, `/cache/objects`, `/reconfigure/…`", "none", ""),
    ),
    "Metrics": (
        (
            "`lmcache_mp_lookup_requested_tokens_total`",
            "`lmcache_tokens_requested_total`",
            "has the labels `model` and `namespace`, none for a tenant",
        ),
        (
            "`lmcache_mp_lookup_hit_tokens_total`",
            '`lmcache_tokens_total{outcome="hit"}`',
            "the outcomes add up to the requested tokens",
        ),
        ("`lmcache_mp_lookups_requests_total`", '`lmcache_requests_total{op="lookup"}`', ""),
        ("`lmcache_mp_l1_memory_usage_bytes`", "`lmcache_l1_ready_bytes` + `lmcache_l1_reserved_bytes`", ""),
        ("`lmcache_mp_l1_usage_ratio`", "the same over `lmcache_l1_capacity_bytes`", ""),
        (
            "`lmcache_mp_l1_write_chunks_total`",
            '`lmcache_objects_total{outcome="stored"}`',
            "counts objects: one per chunk, group and worker",
        ),
        ("`lmcache_mp_l1_evicted_chunks_total`", "`lmcache_evicted_chunks_total`", ""),
        ("`lmcache_mp_l1_allocation_failure_chunks_total`", '`lmcache_objects_total{outcome="no_room"}`', ""),
        (
            "`lmcache_mp_l1_chunk_idle_before_evict`",
            "`lmcache_eviction_age_seconds`",
            "not a sample; batch jobs and quotas are left out",
        ),
        (
            "`lmcache_mp_l0_l1_store_throughput_GB_per_second`, "
            "`lmcache_mp_l0_l1_load_throughput_GB_per_second`",
            "`lmcache_transfer_bytes_total`, `lmcache_transfer_seconds`",
            "",
        ),
        (
            "`vllm:lmcache_mp_lookup_duration_seconds`",
            "`lmcache_lookup_seconds`",
            "the server's part of the time",
        ),
    ),
}


def cells(names: list[str], here: str, why: str) -> tuple[str, str, str]:
    shown = here if here in (SAME, MISSING, NOT_NEEDED, NO_EFFECT) else f"`{here}`"
    return ", ".join(f"`{name}`" for name in names), shown, why


def section(heading: str, text: str, rows: Iterable[tuple[str, str, str]]) -> str:
    lines = ["| LMCache | lmcache-mp | |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return "\n\n".join(filter(None, [f"## {heading}", text, "\n".join(lines)])) + "\n"


def page() -> str:
    """The whole page, as Markdown."""
    sections = [
        section(heading, text, (cells(*each) for each in table(kind)))
        for heading, (kind, text) in SECTIONS.items()
    ]
    sections += [section(heading, "", rows) for heading, rows in OTHER_NAMES.items()]
    return "\n".join([HEAD, *sections])


if __name__ == "__main__":
    print(page(), end="")
