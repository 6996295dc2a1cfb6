"""Prints docs/metrics.md, made from the table of metrics.

python scripts/metrics_page.py > docs/metrics.md
"""

from itertools import chain

from lmcache_server.options import parts
from lmcache_server.telemetry.metrics import MAX_MODEL_CHARS, MAX_NAMESPACES, TABLE, Metric

HEAD = f"""# Metrics

The server offers these metrics at `/metrics` on `--http-host` and `--http-port`.
`python scripts/metrics_page.py` generates this page from the table in `lmcache_server/telemetry/metrics.py`
and from the options, and a test keeps it up to date.

Two labels can take any value. `model` is the model's name, cut after {MAX_MODEL_CHARS} characters.
`namespace` has the first 16 digits of the model's [namespace](design.md#keys-and-the-namespace). A series
with these labels begins, at zero, when the first engine of its namespace registers. The first
{MAX_NAMESPACES} namespaces since the start of the server have series of their own. All others are counted
together, as `other`.

All other labels take only the listed values. All other series exist, at zero, from the first scrape.

Metrics that begin with `lmcache_test_` count only tests: self-tests, `lmcache bench` and `lmcache verify`.

| metric | kind | labels | meaning |
|---|---|---|---|
"""


def row(metric: Metric) -> str:
    labels = "; ".join(
        f"`{name}`: {'the version' if name == 'version' else ', '.join(values)}"
        for name, values in metric.labels.items()
    )
    if metric.by_model:
        labels = f"`model`; `namespace`{'; ' if labels else ''}{labels}"
    return f"| `{metric.name}` | {metric.kind.__name__.lower()} | {labels} | {metric.help} |\n"


def page() -> str:
    """The whole page, as Markdown."""
    of_options = chain.from_iterable(server.METRICS for server in parts("server", "Server"))
    return HEAD + "".join(map(row, [*TABLE, *of_options]))


if __name__ == "__main__":
    print(page(), end="")
