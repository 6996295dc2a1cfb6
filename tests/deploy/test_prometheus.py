"""Alerts and dashboard, in a real Prometheus that scrapes a real server with real traffic."""

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import tools
from harness.paths import ROOT
from harness.processes import ChildProcess, free_port, tail
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import wait_until

from deploy import dashboard
from lmcache_server.telemetry import metrics

SHIPPED = ROOT / "deploy" / "prometheus"
WINDOW = "30s"
START_TIMEOUT_S = 30.0
KNOWN = {metric.name for metric in metrics.TABLE}


def test_promtool_finds_nothing_wrong():
    promtool = tools.find("promtool")
    for arguments in (
        ("check", "config", SHIPPED / "prometheus.yml"),
        ("check", "rules", "--lint=all", "--lint-fatal", SHIPPED / "rules.yml"),
        ("test", "rules", SHIPPED / "rules_test.yml"),
    ):
        done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def rules() -> list[dict[str, Any]]:
    loaded = tools.module("yaml").safe_load((SHIPPED / "rules.yml").read_text())
    return [rule for each in loaded["groups"] for rule in each["rules"]]


def test_every_alert_is_tested_and_says_what_to_do():
    tested = tools.module("yaml").safe_load((SHIPPED / "rules_test.yml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tested
        for case in test.get("alert_rule_test", ())
        if case.get("exp_alerts")
    }
    alerts = [rule for rule in rules() if "alert" in rule]
    assert fired == {rule["alert"] for rule in alerts}
    for rule in alerts:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


def test_every_metric_that_is_named_exists_and_every_metric_is_shown():
    shown = set().union(*(dashboard.metrics_in(expression) for _, expression in dashboard.queries()))
    alerted = set().union(*(dashboard.metrics_in(rule["expr"]) for rule in rules()))
    assert shown | alerted <= KNOWN
    assert shown == KNOWN


def test_the_dashboard_is_in_order():
    """Ids are unique, no panel covers another, each has a title and a unit, each query its letter."""
    panels = dashboard.load()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            letters = [target["refId"] for target in panel["targets"]]
            assert len(set(letters)) == len(letters)


@dataclass
class Prometheus:
    """A running Prometheus with our rules; `instance` is the server that it scrapes."""

    url: str
    instance: str
    log: Path

    def is_ready(self) -> bool:
        try:
            self.ask("status/buildinfo")
        except (OSError, AssertionError):
            return False
        return True

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def samples(self, expression: str, at_s: float | None = None) -> list[float]:
        """The values now, or at a time."""
        found = self.ask("query", query=expression, time=str(at_s or time.time()))
        assert found["resultType"] == "vector", expression
        return [float(each["value"][1]) for each in found["result"]]

    def wait_for(self, expression: str, at_least: float) -> None:
        reached = lambda: max(self.samples(expression), default=0) >= at_least  # noqa: E731
        what = lambda: f"{expression} is {at_least:g} or more\n{tail(self.log)}"  # noqa: E731
        wait_until(reached, START_TIMEOUT_S, what, interval_s=0.1)


def start_prometheus(stack: ExitStack, directory: Path, instance: str) -> Prometheus:
    """With the configuration of deploy/, but for the address of the server and the pace."""
    text = (SHIPPED / "prometheus.yml").read_text()
    assert text.count("lmcache:8080") == 1
    assert text.count("interval: 15s") == 2
    text = text.replace("lmcache:8080", instance).replace("interval: 15s", "interval: 250ms")
    (directory / "prometheus.yml").write_text(text)
    (directory / "rules.yml").write_text((SHIPPED / "rules.yml").read_text())
    port = free_port()
    command = [
        str(tools.find("prometheus")),
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    process = stack.enter_context(ChildProcess("prometheus", command))
    prometheus = Prometheus(f"http://127.0.0.1:{port}", instance, process.log)
    process.wait_until_ready(prometheus.is_ready, START_TIMEOUT_S, interval_s=0.05)
    return prometheus


def traffic(server: LMCacheServer, first: int) -> None:
    """Stores of twice what L1 holds, and of each prompt a hit that is loaded, a miss, and a retry."""
    engine = RawEngine(server.address, [group()]).start()
    try:
        for seed in range(first, first + 12):
            tokens = range(seed * 10_000, seed * 10_000 + 512)
            keys = chain(tokens, engine.chunk_size)
            tables = [range(1, 1 + len(keys))]
            for block in tables[0]:
                engine.fill(0, block, seed)
            engine.store_prompt(keys, tables)
            found = engine.lookup(keys)
            engine.load(found, keys, tables)
            engine.end(found, keys)
            engine.lookup(chain([seed, *tokens], engine.chunk_size))
            engine.store_prompt(keys, tables)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with ExitStack() as stack:
        server = stack.enter_context(LMCacheServer(l1_size_gb=0.012, chunk_size=16))
        directory = tmp_path_factory.mktemp("prometheus")
        watching = start_prometheus(stack, directory, f"127.0.0.1:{server.http_port}")
        watching.wait_for("count_over_time(lmcache_sessions[30s])", 1)
        traffic(server, 0)
        watching.wait_for("lmcache_evicted_chunks_total", 1)
        traffic(server, 100)
        evicted = server.metrics()["lmcache_evicted_chunks_total"]
        watching.wait_for("lmcache_evicted_chunks_total", evicted)
        yield watching


@pytest.mark.parametrize("instance", ["one", "all"])
def test_every_query_of_the_dashboard_shows_something(prometheus, instance):
    """With one server chosen, and with Grafana's All."""
    chosen = prometheus.instance if instance == "one" else None
    asked = 0
    for title, expression in dashboard.queries():
        found = prometheus.samples(dashboard.filled_in(expression, chosen, WINDOW))
        assert [each for each in found if each == each], f"{title}: {expression}"
        asked += 1
    assert asked > 30


def test_another_server_is_not_shown(prometheus):
    """So the variable is in every query."""
    for title, expression in dashboard.queries():
        assert not prometheus.samples(dashboard.filled_in(expression, "127.0.0.1:1", WINDOW)), title


def test_the_figures_are_right(prometheus):
    """Hit rates of traffic of which every second lookup hit; every token in one outcome; L1 added up."""
    now_s = time.time()

    def shown(title: str) -> list[float]:
        expressions = [expression for name, expression in dashboard.queries() if name == title]
        filled = [dashboard.filled_in(each, prometheus.instance, WINDOW) for each in expressions]
        return [sum(prometheus.samples(each, now_s)) for each in filled]

    assert 0.4 < shown("Hit rate")[0] < 0.6
    outcomes, looked_up = shown("Where each looked-up token went")
    assert outcomes == pytest.approx(looked_up, rel=0.01)
    assert looked_up > 0
    ready, reserved, free, capacity, *_ = shown("Occupancy")
    assert ready + reserved + free == capacity > 0
    assert shown("Failed copies") == [0]


def test_every_rule_is_evaluated_and_none_fires_for_a_server_that_is_well(prometheus):
    prometheus.wait_for("lmcache:hit_ratio:rate15m", 0.1)
    found = [rule for each in prometheus.ask("rules")["groups"] for rule in each["rules"]]
    assert len(found) == len(rules())
    for rule in found:
        assert rule["health"] == "ok", rule
        assert rule.get("state", "inactive") != "firing", rule["name"]
