"""Prints docs/metrics.md, made from the table of metrics.

python scripts/metrics_page.py > docs/metrics.md
"""

from lmcache_server.telemetry.metrics import TABLE, Metric

HEAD = """# Metrics

The server offers these metrics at `/metrics` on `--http-host` and `--http-port`.
`python scripts/metrics_page.py` generates this page from the table in `lmcache_server/telemetry/metrics.py`,
and a test keeps it up to date. Every series exists, at zero, from the first scrape. Labels take only the
listed values.

| metric | kind | labels | meaning |
|---|---|---|---|
"""


def row(metric: Metric) -> str:
    labels = "; ".join(
        f"`{name}`: {'the version' if name == 'version' else ', '.join(values)}"
        for name, values in metric.labels.items()
    )
    return f"| `{metric.name}` | {metric.kind.__name__.lower()} | {labels} | {metric.help} |\n"


def page() -> str:
    """The whole page, as Markdown."""
    return HEAD + "".join(map(row, TABLE))


if __name__ == "__main__":
    print(page(), end="")
