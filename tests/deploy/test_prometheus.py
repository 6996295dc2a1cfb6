"""Alerts and dashboard, in a real Prometheus that scrapes a real server with real traffic."""

import importlib.util
import itertools
import json
import math
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from harness import pages, tools
from harness.paths import ROOT
from harness.processes import ChildProcess, free_port, tail
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S, wait_until

from deploy import charts, dashboard
from deploy.programs import run
from lmcache_server.options import parts
from lmcache_server.telemetry import metrics

SHIPPED = ROOT / "deploy" / "prometheus"
# Longer than these tests take on a busy machine: the traffic must not leave it.
WINDOW = "5m"
START_TIMEOUT_S = PATIENCE_S
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
SOURCE = 'prompt_tokens_by_source_total{{source="{}",'
BOUND = 'time_to_first_token_seconds_bucket{{le="{}",'
TABLE = [*metrics.TABLE, *(row for server in parts("server", "Server") for row in server.METRICS)]
KNOWN = {metric.name for metric in TABLE}


def test_promtool_finds_nothing_wrong():
    promtool = tools.find("promtool")
    run(promtool, "check", "config", SHIPPED / "prometheus.yml")
    run(promtool, "check", "rules", "--lint=all", "--lint-fatal", SHIPPED / "rules.yml")
    run(promtool, "test", "rules", SHIPPED / "rules_test.yml")


def rules() -> list[dict[str, Any]]:
    return [rule for each in charts.load(SHIPPED / "rules.yml")["groups"] for rule in each["rules"]]


def test_every_alert_is_tested_and_says_what_to_do():
    tests = charts.load(SHIPPED / "rules_test.yml")["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
    alerts = [rule for rule in rules() if "alert" in rule]
    assert fired == {rule["alert"] for rule in alerts}
    for rule in alerts:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        named = "job" if "absent(" in rule["expr"] else "instance"
        assert f"{{{{ $labels.{named} }}}}" in rule["annotations"]["summary"]
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert anchor == rule["alert"].lower()
        assert anchor in pages.anchors(ROOT / page)
        assert rule["annotations"]["description"].endswith(".")


def test_every_metric_that_is_named_exists_and_every_metric_is_shown():
    """Those of vLLM are in this vLLM or in the connector."""
    queries, alerts = [each for _, each in dashboard.queries()], [rule["expr"] for rule in rules()]
    shown = set().union(*map(dashboard.metrics_in, queries))
    assert shown == KNOWN
    assert set().union(*map(dashboard.metrics_in, alerts)) <= KNOWN
    declared = importlib.util.find_spec("vllm")
    assert declared is not None
    loggers = Path(declared.origin or "").parent / "v1/metrics/loggers.py"
    texts = loggers.read_text() + (ROOT / "lmcache_client/connector/stats.py").read_text()
    named = set().union(*map(dashboard.vllm_metrics_in, [*queries, *alerts]))
    assert len(named) >= 4
    for name in named:
        assert f'"{name}"' in texts or f'"{name.removeprefix("vllm:lmcache_mp_")}"' in texts, name


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
            with urllib.request.urlopen(url, timeout=60) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def samples(self, expression: str, at_s: float | None = None) -> list[float]:
        found = self.ask("query", query=expression, time=str(at_s or time.time()))
        assert found["resultType"] == "vector", expression
        return [float(each["value"][1]) for each in found["result"]]

    def wait_for(self, expression: str, at_least: float) -> None:
        reached = lambda: max(self.samples(expression), default=0) >= at_least  # noqa: E731
        what = lambda: f"{expression} is {at_least:g} or more\n{tail(self.log)}"  # noqa: E731
        wait_until(reached, START_TIMEOUT_S, what, interval_s=0.1)


@contextmanager
def vllm_series() -> Iterator[str]:
    """The address of the series of vLLM that the dashboard shows, which grow. That they are vLLM's is for
    another test to say."""
    scrapes = itertools.count(1)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            grown = 100 * next(scrapes)
            values = dict.fromkeys(["prompt_tokens_total{", *map(SOURCE.format, SOURCES)], grown)
            values |= dict.fromkeys(map(BOUND.format, ("0.5", "1.0", "+Inf")), grown)
            values |= {"lmcache_mp_connected{": 1, "lmcache_mp_late_lookups_total{": 0}
            lines = [f'vllm:{name}model_name="served",engine="0"}} {value}' for name, value in values.items()]
            body = ("\n".join(lines) + "\n").encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def start_prometheus(stack: ExitStack, directory: Path, instance: str) -> Prometheus:
    """With the configuration of deploy/, but for the addresses of the server and of vLLM, and the pace."""
    text = (SHIPPED / "prometheus.yml").read_text()
    assert text.count("lmcache:8080") == text.count("vllm:8000") == 1
    assert text.count("interval: 15s") == 2
    text = text.replace("lmcache:8080", instance).replace("vllm:8000", stack.enter_context(vllm_series()))
    text = text.replace("interval: 15s", "interval: 250ms")
    (directory / "prometheus.yml").write_text(text)
    (directory / "rules.yml").write_text((SHIPPED / "rules.yml").read_text())
    port = free_port()
    command = [str(tools.find("prometheus")), "--log.level=warn", f"--web.listen-address=127.0.0.1:{port}"]
    command += [f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}"]
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
        (hit_rate,) = (expression for title, expression in dashboard.queries() if title == "Hit rate")
        watching.wait_for(dashboard.filled_in(hit_rate, WINDOW), 0.4)
        yield watching


def test_a_server_that_nobody_uses_shows_no_error_and_nothing_that_is_no_number(tmp_path):
    """Where a quotient has nothing to divide by, the panel says so, or shows nothing."""
    with ExitStack() as stack:
        idle = stack.enter_context(LMCacheServer(l1_size_gb=0.012))
        watching = start_prometheus(stack, tmp_path, f"127.0.0.1:{idle.http_port}")
        # Two scrapes make a rate.
        watching.wait_for("count_over_time(lmcache_sessions[30s])", 3)
        shown = {}
        for title, expression in dashboard.queries():
            if "vllm:" not in expression:
                query = dashboard.filled_in(expression, WINDOW, instance=watching.instance)
                shown[title] = watching.samples(query)
                assert all(map(math.isfinite, shown[title])), f"{title}: {expression}"
        panels = {panel["title"]: panel.get("fieldConfig") for panel in dashboard.load()["panels"]}
        assert shown["Hit rate"] == []
        assert panels["Hit rate"]["defaults"]["noValue"] == "no lookups"
        assert sum(map(bool, shown.values())) > 10, "most of them are 0"


def test_every_query_of_the_dashboard_shows_something_and_nothing_of_another_server_or_model(prometheus):
    """With one server chosen, and with Grafana's All: the variables are in every query."""
    by_model = [metric.name for metric in TABLE if metric.by_model]
    asked = 0
    for title, expression in dashboard.queries():

        def samples(expression: str = expression, **chosen: str) -> list[float]:
            return prometheus.samples(dashboard.filled_in(expression, WINDOW, **chosen))

        for chosen in ({}, {"instance": prometheus.instance}):
            assert [each for each in samples(**chosen) if each == each], f"{title}: {expression}"
        others = {"served": "none"} if "vllm:" in expression else {"instance": "127.0.0.1:1"}
        assert not samples(**others), title
        assert not any(name in expression for name in by_model) or not samples(model="none"), title
        asked += 1
    assert asked > 30


def totals(expression: str) -> str:
    """The expression with the counters themselves instead of their rates. Prometheus estimates the rate of a
    young counter, and its estimates of a sum and of the parts differ."""
    return re.sub(r"rate\(([^\[\]]*)\[[^\]]*\]\)", r"\1", expression)


def test_the_figures_are_right(prometheus):
    """Hit rates of traffic of which every second lookup hit; every token in one outcome; L1 added up."""
    now_s = time.time()

    def shown(title: str, change: Callable[[str], str] = str) -> list[float]:
        expressions = [change(expression) for name, expression in dashboard.queries() if name == title]
        filled = [dashboard.filled_in(each, WINDOW, instance=prometheus.instance) for each in expressions]
        return [sum(prometheus.samples(each, now_s)) for each in filled]

    assert 0.4 < shown("Hit rate")[0] < 0.6
    assert shown("Where each looked-up token went")[1] > 0
    outcomes, looked_up = shown("Where each looked-up token went", totals)
    assert outcomes == looked_up > 0
    ready, reserved, free, capacity, *_ = shown("Occupancy")
    assert ready + reserved + free == capacity > 0
    assert shown("Failed copies") == [0]
    why = "Why tokens were not found"
    assert shown(why)[0] > 0
    (missed,) = (expression for name, expression in dashboard.queries() if name == why)
    by_reason = dashboard.filled_in(missed, WINDOW, instance=prometheus.instance)
    assert sum(each > 0 for each in prometheus.samples(by_reason, now_s)) == 1, "never stored"


def test_every_rule_is_evaluated_and_none_fires_for_a_server_that_is_well(prometheus):
    prometheus.wait_for("lmcache:hit_ratio:rate15m", 0.1)
    found = [rule for each in prometheus.ask("rules")["groups"] for rule in each["rules"]]
    assert len(found) == len(rules())
    for rule in found:
        assert rule["health"] == "ok", rule
        assert rule.get("state", "inactive") != "firing", rule["name"]
