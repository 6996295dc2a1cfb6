"""docs/benchmarks.md: what it begins with, its bars, and that a page of several runs says so."""

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness.paths import ROOT
from harness.processes import ChildProcess, free_port
from harness.rawclient import RawEngine
from harness.waiting import answers, get

sys.path.append(str(ROOT / "benchmarks"))

import report
import run
import summary

PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = "benchmarks/overview.svg"


def section(name: str, **more: Any) -> dict[str, Any]:
    plain = {"name": name, "title": f"Title of {name}", "text": "", "tables": [], "bars": [], "run": "today"}
    return {**plain, **more}


def engine(**more: Any) -> dict[str, Any]:
    series = {
        "cold": [(512, 1.0), (8000, 12.0)],
        "local hit": [(512, 0.1), (8000, 0.2)],
        "ours": [(512, 0.11), (8000, 0.3)],
        "LMCache": [(512, 0.2), (8000, 0.6)],
    }
    rows = [["prefill", "ours", "0.968"], ["prefill", "LMCache", "0.888"], ["decode", "ours", "1.010"]]
    table = {"caption": "", "columns": ["work", "connector", "throughput"], "rows": rows}
    plot = {"name": "first-token", "title": "", "x": "", "y": "", "series": series}
    return section("engine", tables=[table], plots=[plot], **more)


def replay(**more: Any) -> dict[str, Any]:
    rows = [["2,500", "0.18", "0.18"], ["all", "0.65", "0.65"]]
    return section("replay", tables=[{"columns": ["room", "oracle", "server"], "rows": rows}], **more)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the report goes; it draws nothing."""
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(report, "PLOTS", tmp_path)
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "prepare_plots", lambda: None)
    monkeypatch.setattr(report, "draw", lambda _plot: None)
    monkeypatch.setattr(summary, "draw", lambda _sections, _folder: None)
    return tmp_path / "page.md"


def stored(results: Path, sections: list[Mapping[str, Any]]) -> None:
    results.mkdir(parents=True, exist_ok=True)
    for each in sections:
        (results / f"{each['name']}.json").write_text(json.dumps(each))


def test_the_page_begins_with_five_sentences_and_a_picture_and_each_workload_has_its_own_bar() -> None:
    """An average over all of them hid that prefill missed its bar."""
    text = PAGE.read_text()
    blocks = text.split("\n\n")
    assert blocks[0] == "# Benchmarks"
    assert len(re.findall(r"[a-z]\.(?: |$)", blocks[1])) == 5
    assert PICTURE in blocks[2]
    assert (ROOT / "docs" / PICTURE).exists()
    assert text.index(PICTURE) < text.index("| bar |")
    rows = [row.split("|")[2:5] for row in text.splitlines() if "side by side | throughput at least" in row]
    assert len(rows) == 3
    for _, measured, verdict in rows:
        assert ("met" in verdict) == (float(measured.strip(" %")) >= 98) != ("missed" in verdict), rows


def test_the_sentences_have_the_figures_of_the_sections() -> None:
    said = summary.sentences({"engine": engine(), "replay": replay()})
    assert len(said) == 5
    text = " ".join(said)
    figures = ("8,000", "40 times", "0.30 s", "12.0 s", "0.20 s", "LMCache it comes after 0.60 s", "96.8%")
    more = ("101.0% in decode", "18% with room for 2,500 chunks", "65% with room for all chunks")
    assert [each for each in (*figures, *more) if each not in text] == []
    assert "88.8%" not in text, "that is LMCache's throughput"


def test_a_page_of_several_runs_says_so_in_every_section_and_one_of_one_run_names_it_once(page: Path) -> None:
    stored(run.RESULTS, [engine(run="Monday"), replay(run="Monday")])
    assert run.main(["--report"]) == 0
    assert page.read_text().count("Monday") == 1
    assert "several runs" not in page.read_text()
    stored(run.RESULTS, [replay(run="Tuesday")])
    assert run.main(["--report"]) == 0
    text = page.read_text()
    assert "**This page is of several runs**" in text
    assert re.findall(r"Measured in the run of (\w+)\.", text) == ["Monday", "Tuesday"]


def test_the_page_begins_with_what_users_ask_and_each_section_has_all_of_its_bars(page: Path) -> None:
    asked = {"bar": "as soon as LMCache", "measured": "0.5", "met": True, "top": True}
    other = {"bar": "a narrow one", "measured": "7", "met": False, "top": False}
    stored(run.RESULTS, [engine(), replay(bars=[asked, other])])
    assert run.main(["--report"]) == 0
    beginning, _, rest = page.read_text().partition("\n## Title of replay")
    rows = ["as soon as LMCache | 0.5 | met |", "a narrow one | 7 | **missed** |"]
    assert [row in beginning for row in rows] == [True, False]
    assert all(f"| {row}" in rest for row in rows)
    assert "Of all 2, 1 were missed" in beginning


def test_named_benchmarks_leave_the_page_as_it_is(page, monkeypatch, capsys):
    page.write_text("the page of a whole run")
    stored(run.RESULTS, [engine(), replay()])
    asked = []
    monkeypatch.setattr(run, "measure", lambda name, _run: asked.append(name) is None)
    assert run.main(["replay"]) == 0
    assert asked == ["replay"]
    assert page.read_text() == "the page of a whole run"
    assert "stays as it is" in capsys.readouterr().out


def test_all_results_of_a_whole_run_have_its_name(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, folder = ("first", "second"), page.parent / "programs"
    folder.mkdir()
    for name in names:
        result = run.RESULTS / f"{name}.json"
        measured = json.dumps({**replay(run="none"), "name": name})
        (folder / f"{name}.py").write_text(f"open({str(result)!r}, 'w').write({measured!r})")
    monkeypatch.setattr(run, "BENCH", folder)
    monkeypatch.setattr(run, "ORDER", names)
    assert run.main([]) == 0
    runs = {json.loads((run.RESULTS / f"{name}.json").read_text())["run"] for name in names}
    assert len(runs) == 1
    assert f"All of it is one run, of {runs.pop()}" in page.read_text()


def test_the_rest_of_a_run_is_measured_as_a_part_of_it(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(run.RESULTS, [engine(run="Monday")])
    asked: list[tuple[str, str]] = []

    def measure(name: str, of: str) -> bool:
        asked.append((name, of))
        if name == "replay":
            stored(run.RESULTS, [replay(run=of)])
        return name == "replay"

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "ORDER", ("engine", "replay", "start"))
    assert run.main(["--rest"]) == 1
    assert asked == [("replay", "Monday"), ("start", "Monday")]
    assert "All of it is one run, of Monday" in page.read_text()
    assert "because it failed: start" in page.read_text()
    stored(run.RESULTS, [engine(run="Tuesday")])
    with pytest.raises(SystemExit, match="of 2 runs"):
        run.main(["--rest"])


def test_the_server_with_a_big_index_has_what_the_benchmark_asks_for(tmp_path: Path) -> None:
    """Its cache takes the place of the server's own, and must fit there."""
    from big_index_server import BLOCKS, CHUNK_TOKENS, GROUPS, MODEL, key

    ports = free_port(), free_port()
    command = [sys.executable, str(ROOT / "benchmarks" / "big_index_server.py"), "1024"]
    command += ["--l1-size-gb", "0.01", "--chunk-size", "256"]
    command += ["--port", str(ports[0]), "--http-port", str(ports[1])]
    server = ChildProcess("big-index", command, {**os.environ, "LMCACHE_RUNTIME_DIR": str(tmp_path)})
    try:
        server.wait_until_ready(lambda: answers(f"http://127.0.0.1:{ports[1]}/readyz"), 60)
        assert json.loads(get(f"http://127.0.0.1:{ports[1]}/status"))["l1"]["chunks"] == 1024
        engine = RawEngine(f"ipc://{tmp_path}/{ports[0]}.sock", GROUPS, BLOCKS, "engine", MODEL.model).start()
        assert engine.lookup(tuple(map(key, range(700, 1000)))).resume_tokens == 300 * CHUNK_TOKENS
        engine.close()
    finally:
        assert server.stop(20) == 0
