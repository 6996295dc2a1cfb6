"""The dashboard's queries, with its variables filled in as Grafana does."""

import json
import re
from collections.abc import Iterator
from typing import Any

from harness.paths import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "dashboard.json"


def load() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def queries() -> Iterator[tuple[str, str]]:
    """(title of the panel, expression as it stands in the file) of every query."""
    for panel in load()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def filled_in(expression: str, window: str, **chosen: str) -> str:
    """What Grafana would send for the `chosen` values of variables, and for All of the others. `window` is
    the time shown and $__rate_interval."""
    values = {each["name"]: each.get("allValue", "") for each in load()["templating"]["list"]}
    values |= {name: re.escape(value) for name, value in chosen.items()}
    values |= {"__rate_interval": window, "__range": window}
    # Within PromQL's quotes a backslash of the pattern is doubled.
    return re.sub(r"\$(\w+)", lambda found: values[found[1]].replace("\\", "\\\\"), expression)


def metrics_in(expression: str) -> set[str]:
    """The metrics that an expression names, histograms without their suffixes."""
    names = set(re.findall(r"(?<![\w:])lmcache_\w+", expression))
    return {re.sub(r"(_seconds)_(bucket|sum|count)$", r"\1", name) for name in names}


def vllm_metrics_in(expression: str) -> set[str]:
    """The metrics of vLLM that an expression names, as vLLM declares them: without suffixes."""
    names = set(re.findall(r"\bvllm:\w+", expression))
    return {re.sub(r"(_total|_bucket|_sum|_count)$", "", name) for name in names}
