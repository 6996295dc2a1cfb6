"""The status page in Chromium: a real server, a real engine, what a person sees."""

import json
import re
import socket

import pytest
from harness.browser import chromium
from harness.rawclient import TIMEOUT_S, RawEngine, chain, group
from harness.server import LMCacheServer, server_of_a_file
from harness.waiting import wait_until

from lmcache_client.contract.messages import Pin
from lmcache_client.server_channel import ChannelError

HOSTILE = "<img src=x onerror='window.pwned=1'> & <script>window.pwned=1</script>"
LONG = "organisation/" + "ModelWithAVeryLongName" * 5
TABLE = [list(range(1, 65))]


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


idle = server_of_a_file(l1_size_gb=0.1)
"""A server that nobody has used."""


@pytest.fixture(scope="module")
def server():
    """One with two engines, hits, misses, and a load that came too late."""
    with LMCacheServer(l1_size_gb=0.1, port=5555) as running:
        hybrid = [group("sliding_window", 16, 128), group("full")]
        engines = [
            RawEngine(running.address, [group()], 65, LONG, HOSTILE).start(),
            RawEngine(running.address, hybrid, 65, "<b>hybrid</b>", LONG).start(),
        ]
        for engine in engines:
            keys = chain(range(3 * 256), 256)
            engine.end(engine.lookup(keys))
            engine.store_prompt(keys, TABLE * len(engine.groups))
            engine.end(engine.lookup(keys[:1]))
            found = engine.lookup(keys)
            engine.load(found, keys, TABLE * len(engine.groups))
            engine.end(found)
            with pytest.raises(ChannelError):
                engine.load(found, keys, TABLE * len(engine.groups))
        engines[0].scheduler.call(Pin("", "a request to pin"), TIMEOUT_S)
        engines[0]._scheduler.release((), keys, "a request to pin")
        engines[0].scheduler.call(Pin(HOSTILE[:64], "a request to pin"), TIMEOUT_S)
        yield running


class Visit:
    """A page that has shown something, and what it asked for and complained of meanwhile."""

    def __init__(self, browser, server, **options):
        self.url = f"http://127.0.0.1:{server.http_port}/"
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(10_000)
        self.requests, self.errors = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.clock.install()
        self.page.goto(self.url)
        self.page.locator("#state", has_text="live").wait_for()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.page.close()

    def value(self, name):
        return float(self.page.get_attribute(f"#{name}", "value"))

    def text(self, selector):
        return self.page.inner_text(selector)

    def rows(self, name):
        return [row.inner_text() for row in self.page.query_selector_all(f"#{name} tr")]


def test_figures_are_those_of_the_status_and_names_of_clients_are_text(browser, server):
    with Visit(browser, server) as visit:
        status = server.status()
        assert status["tokens"]["hit"] == 2 * (1 + 3) * 256
        assert visit.value("hit_rate") == status["hit_rate"] == 0.5714
        assert visit.text("#hit_rate") == "57.1 %"
        assert visit.value("tokens") == status["tokens"]["hit"]
        assert visit.text("#tokens") == "2,048"
        assert visit.value("chunks") == status["l1"]["chunks"] == 6
        assert visit.value("sessions") == len(status["sessions"]) == 4
        assert visit.text("#engines") == "2 engines"
        for name in ("ready_bytes", "reserved_bytes", "free_bytes"):
            assert visit.value(name) == status["l1"][name]
        share = status["l1"]["ready_bytes"] / status["l1"]["total_bytes"]
        shown = visit.page.evaluate("parseFloat(document.querySelector('#bar .ready').style.width)")
        assert shown == pytest.approx(100 * share)
        assert visit.page.title() == f"lmcache · {status['host']}"
        assert status["host"] == socket.gethostname()
        plain, hybrid = visit.rows("namespaces")
        assert "57.1 %" in plain
        assert "not found: 42.9 % never stored" in plain
        assert "full attention, blocks of 16, 2 layers" in plain
        assert "sliding window of 128, blocks of 16, 2 layers" in hybrid
        assert "256 tokens" in hybrid
        assert len(visit.rows("session_rows")) == 4
        assert visit.rows("pins") == [f"{HOSTILE[:64]}\t3\t384 KiB"]
        assert visit.text("#pinned") == "384 KiB of at most 51.2 MiB together"
        rates = status["demand"]["windows"]["hour"]["hit_rates"]
        sizes = visit.rows("plan")
        assert len(sizes) == len(rates) == 7
        assert "102 MiB, as now" in sizes[2]
        assert f"{100 * rates['1']:.1f} %" in sizes[2]
        assert "without limit" in sizes[-1]
        failures = visit.rows("failures")
        assert len(failures) == len(status["failures"]) == 2
        assert "load refused" in failures[0]
        assert status["failures"][0]["sentence"] in failures[0]

        assert any(HOSTILE in row for row in visit.rows("namespaces"))
        assert any("<b>hybrid</b>" in row for row in visit.rows("session_rows"))
        assert visit.page.evaluate("window.pwned") is None
        assert visit.page.evaluate("document.querySelectorAll('img, main script, b b').length") == 0


def test_tiers_and_what_they_lost(browser, server):
    read, written = (
        ("read", "gone", "damaged", "failed"),
        ("written", "present", "full", "evicted", "dropped", "failed"),
    )
    sizes = {"waiting_objects": 1, "read_bytes": 3 << 20, "written_bytes": 1 << 30}
    tier = {"url": HOSTILE, "failing": "", "used_bytes": None, **sizes}
    known = {"used_bytes": 3 << 20, "capacity_bytes": 1 << 30, "records": 28, "evicted_records": 44}
    known |= {"oldest_age_seconds": 5400, "stored_bytes": 3 << 28}
    well = (
        tier | known | {"read_objects": dict.fromkeys(read, 0), "written_objects": dict.fromkeys(written, 0)}
    )
    ill = tier | {
        "failing": "it is on fire",
        "read_objects": {name: number for number, name in enumerate(read)},
        "written_objects": {name: 1000 * number for number, name in enumerate(written)},
    }
    with Visit(browser, server) as visit:
        assert not visit.page.is_visible("#tiers_card")
        hits = {"tier_hit_tokens": 3, "tokens": server.status()["tokens"] | {"hit": 12}}
        status = json.dumps(server.status() | {"tiers": [well, ill], **hits})
        visit.page.route(
            "**/status", lambda route: route.fulfill(body=status, content_type="application/json")
        )
        visit.page.clock.run_for(2100)
        visit.page.locator("#tiers tr").first.wait_for()
        first, second = visit.rows("tiers")
        url, state, *rest = first.split("\t")
        assert (url, rest) == (HOSTILE, ["3.0 MiB", "1.0 GiB as 768 MiB", "1 object"])
        holds = "holds 3.0 MiB of 1.0 GiB in 28 records, the oldest use 1 h 30 min ago, 44 evicted"
        assert state.split("\n")[:2] == ["works", holds]
        assert (
            visit.page.inner_text("#tier_hits") == "; 25.0 % of the hits were fetched while requests waited"
        )
        assert visit.page.inner_text("#state") == "1 tier failing", "the top of the page says so, too"
        assert "failing: it is on fire" in second
        assert (
            "1 gone, 2 damaged, 3 not read, 2,000 without room, 3,000 evicted first, 4,000 dropped" in second
        )
        assert visit.page.evaluate("window.pwned") is None
        assert not visit.errors


def test_it_asks_nobody_else_and_complains_of_nothing(browser, server):
    with Visit(browser, server) as visit:
        # The page asks again only when it has been answered.
        for _ in range(3):
            with visit.page.expect_response("**/status"):
                visit.page.clock.run_for(2100)
            visit.page.wait_for_timeout(50)
        assert visit.errors == []
        paths = [request.removeprefix(visit.url) for request in visit.requests]
        assert all(request.startswith(visit.url) or request.startswith("data:") for request in visit.requests)
        assert {path for path in paths if not path.startswith("data:")} == {"", "status", "history"}
        assert paths.count("status") >= 3
        # And its policy stops what a hole would let in.
        visit.page.evaluate("""() => {
            const script = document.createElement("script");
            script.textContent = "window.pwned = 1";
            document.body.append(script);
        }""")
        assert visit.page.evaluate("window.pwned") is None
        assert any("Content Security Policy" in error for error in visit.errors)


def light(colour):
    """How light a colour is, as WCAG defines it."""
    digits = colour[1:] if len(colour) > 4 else "".join(2 * each for each in colour[1:])
    parts = bytes.fromhex(digits) if colour[0] == "#" else map(int, re.findall(r"\d+", colour)[:3])

    def linear(part):
        return part / 255 / 12.92 if part / 255 <= 0.03928 else ((part / 255 + 0.055) / 1.055) ** 2.4

    return sum(weight * linear(each) for weight, each in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def contrast(one, other):
    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


def test_dark_and_light_can_be_read_and_free_memory_is_seen(browser, server):
    backgrounds = set()
    for scheme in ("light", "dark"):
        with Visit(browser, server, color_scheme=scheme) as visit:
            root, find, named = "getComputedStyle(document.documentElement)", "document.querySelector", {}
            for name in ("text", "soft", "bad", "good", "hit", "load", "store", "card", "page"):
                named[name] = visit.page.evaluate(f"{root}.getPropertyValue('--{name}').trim()")
            for name in named.keys() - {"card", "page"}:
                for behind in ("card", "page"):
                    assert contrast(named[name], named[behind]) >= 4.5, f"{name} on {behind}, {scheme}"
            dot, bar, body = (
                visit.page.evaluate(f"getComputedStyle({each}).backgroundColor")
                for each in (f"{find}('.key.free'), '::before'", f"{find}('#bar')", "document.body")
            )
            assert contrast(dot, named["card"]) >= 2.9
            assert dot == bar, "the dot has the colour of the free part of the bar"
            backgrounds.add(body)
    assert len(backgrounds) == 2


# In one go, because the page draws its own history every few seconds.
DRAWN = """([growth, ended]) => {
    showHistory({ interval_s: 5, ended, growth });
    const lines = [...document.querySelectorAll("#copy_plot path:not(.grid, .at, .area)")];
    return {
        width: document.querySelector("#hit_plot path.hit:not(.area)").getBoundingClientRect().width,
        lines: lines.map(e => [e.getAttribute("class"), getComputedStyle(e).strokeDasharray]),
        keys: document.querySelector("#copy_keys").textContent,
    };
}"""


def test_one_sample_is_seen_and_no_line_hides_another(browser, server):
    with Visit(browser, server) as visit:
        same = [0, 5 << 20, 0, 5 << 20]
        growth = {"hit_tokens": [0, 7, 0, 0], "miss_tokens": [0, 7, 0, 0], "store_bytes": same,
                  "load_bytes": same, "test_bytes": [0, 0, 0, 0]}  # fmt: skip
        drawn = visit.page.evaluate(DRAWN, [growth, 4])
        assert drawn["width"] >= 4, "a point, not a single pixel"
        load, store = drawn["lines"]
        assert load == ["load", "none"]
        assert store[0] == "store", "above the line of loads"
        assert store[1] != "none", "which shows through it"
        assert "tests" not in drawn["keys"]
        drawn = visit.page.evaluate(DRAWN, [{**growth, "test_bytes": [0, 0, 0, 10 << 20]}, 4])
        assert "tests 2.0 MiB/s" in drawn["keys"]
        assert len(drawn["lines"]) == 3


RIGHTMOST = "Math.max(...[...document.querySelectorAll('body *')].map(e => e.getBoundingClientRect().right))"


def test_no_width_scrolls_sideways(browser, server):
    with Visit(browser, server) as visit:
        for width in (320, 375, 768, 1440):
            visit.page.set_viewport_size({"width": width, "height": 700})
            assert visit.page.evaluate("document.documentElement.scrollWidth") == width
            assert visit.page.evaluate(RIGHTMOST) <= width


def test_charts_show_the_history_and_can_be_heard(browser, server):
    history = lambda: json.loads(server.get("/history"))["growth"]  # noqa: E731
    wait_until(lambda: sum(history()["hit_tokens"]), what="the history has a hit", interval_s=0.1)
    growth = history()
    with Visit(browser, server) as visit:
        visit.page.wait_for_selector("#hit_plot svg path.area", state="attached")
        hit, miss = sum(growth["hit_tokens"]), sum(growth["miss_tokens"])
        assert float(visit.page.get_attribute("#hit_keys data", "value")) == hit / (hit + miss) == 4 / 7
        load = float(visit.page.get_attribute("#copy_keys data", "value"))
        growth = history()
        assert load in [bytes_ / 5 for bytes_ in growth["load_bytes"]]
        label = visit.page.get_attribute("#hit_plot svg", "aria-label")
        assert label == "Hit rate over the last 5 minutes: between 57.1 % and 57.1 %"
        assert visit.page.get_attribute("#copy_plot svg", "aria-label").startswith("Throughput over the last")
        assert visit.page.get_attribute("#bar", "aria-label").endswith("%")
        visit.page.hover("#hit_plot", position={"x": 1, "y": 50})
        assert visit.text("#hit_keys").startswith("no lookups 4 min 55 s ago")
        headings = visit.page.evaluate("[...document.querySelectorAll('h1, h2')].map(e => e.tagName)")
        assert headings[0] == "H1"
        assert set(headings[1:]) == {"H2"}


def test_what_a_bench_copies_is_drawn_as_tests_alone(browser, server):
    before = server.status()
    done = server.cli("bench", "--requests", "2", "--only", "store,load", "--layers", "2", "--page-kb", "8")
    assert done.returncode == 0, done.stderr
    figure = 'lmcache_test_transfer_bytes_total{direction="%s",test="bench"}'
    copied = sum(server.metrics()[figure % direction] for direction in ("store", "load"))
    history = lambda: json.loads(server.get("/history"))["growth"]  # noqa: E731
    wait_until(lambda: sum(history()["test_bytes"]) == copied > 0, what="the history has it", interval_s=0.1)
    with Visit(browser, server) as visit:
        visit.page.wait_for_selector("#copy_plot svg path.test", state="attached")
        assert "tests" in visit.text("#copy_keys")
        assert visit.value("hit_rate") == before["hit_rate"]
        assert visit.value("tokens") == before["tokens"]["hit"]
        assert len(visit.rows("namespaces")) == 2


def test_without_an_engine_it_says_how_to_start_one(browser, idle):
    with Visit(browser, idle) as visit:
        line = visit.text("#line")
        assert line.startswith("vllm serve MODEL --kv-transfer-config '{")
        assert json.loads(line.split("'")[1]) == {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.port": idle.port},
        }
        assert not visit.page.is_visible("#pins_card")
        assert visit.text("#no_session") == "No client is connected."
        assert visit.text("#no_failure").startswith("None")
        assert not visit.page.is_visible("#namespace_table")
        assert not visit.text("#hit_rate").endswith("%")


def test_a_server_that_stops_is_seen_and_one_that_is_back_too(browser, idle):
    with Visit(browser, idle) as visit:
        idle.kill()
        visit.page.clock.run_for(2100)
        assert visit.text("#state") == "live"
        visit.page.clock.run_for(10_000)
        assert visit.text("#state").startswith("last heard 1")
        assert visit.text("#state").endswith(" s ago")
        assert "stale" in visit.page.get_attribute("body", "class")
        idle.start()
        visit.page.clock.run_for(2100)
        visit.page.locator("#state", has_text="live").wait_for()
        assert visit.page.get_attribute("body", "class") == ""
