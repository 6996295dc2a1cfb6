"""`lmcache bench` against a real server: figures of copies that happened, and nothing stays behind."""

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.paths import ROOT
from harness.processes import group_members
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer, server_of_a_file
from harness.waiting import PATIENCE_S, wait_until

from lmcache_client.contract.messages import Done, Load
from lmcache_server.commands.bench import run
from lmcache_server.commands.bench.client import Client, Workload
from lmcache_server.commands.bench.crew import Crew, Sample, Tally, load, lookup, store
from lmcache_server.errors import CommandError

SMALL = ("--requests", "2", "--layers", "2", "--page-kb", "8")
COPIES = ("--only", "store,load")
LOOKUPS = [f"lookup_{chunks}" for chunks in (1, 8, 64, 512)]


server = server_of_a_file()


def copied(server, direction):
    return server.metrics()[f'lmcache_test_transfer_bytes_total{{direction="{direction}",test="bench"}}']


def bench(server, *arguments, sessions=0):
    """(the JSON report, what is said beside it) of a run that succeeds and leaves only `sessions`."""
    done = server.cli("bench", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    if not sessions:
        server.wait_at_rest()
    assert len(server.status()["sessions"]) == sessions
    return json.loads(done.stdout), done.stderr


def refusal(server, *arguments):
    done = server.cli("bench", *arguments)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_every_figure_is_there_and_makes_sense_and_nothing_is_kept(server):
    def answered():
        names = ("lookup", "release", "goodbye")
        metrics = server.metrics()
        return [metrics[f'lmcache_requests_total{{op="{name}",outcome="ok"}}'] for name in names]

    before = answered()
    report, said = bench(server, *SMALL)
    made = [now - then for now, then in zip(answered(), before, strict=True)]
    assert made == [4 * 50 + 2, 4 * 50 + 1, 4], "each lease is given back, and each client says goodbye"
    assert said.startswith("storing 32 MiB in L1, where 512 MiB are free ")
    assert said.count("\n") == 1
    assert report["settings"] == {
        "workers": 1, "clients": 1, "page_kb": 8, "layers": 2, "groups": "full", "chunks": 4, "requests": 2,
        "seconds": None, "only": "lookup,store,load", "chunk_size": 256,
    }  # fmt: skip
    assert report["server_version"] == server.status()["version"]
    assert list(report["results"]) == ["ping", *LOOKUPS, "store", "load"]
    for name, figures in report["results"].items():
        copy = name in ("store", "load")
        assert figures["count"] == (2 if copy else 50)
        assert figures["lost"] == 0
        assert 0 < figures["p50_s"] <= figures["p90_s"] <= figures["p99_s"] <= figures["max_s"]
        assert figures["max_s"] <= figures["wall_s"]
        assert (figures["gb_per_s"] > 0) == copy
        assert figures["per_s"] == pytest.approx(figures["count"] / figures["wall_s"], rel=0.1)


@pytest.mark.parametrize(("groups", "stored", "restored"), [("full", 4, 4), ("hybrid", 7, 4 + 0.5 + 0.25)])
def test_the_bytes_are_those_that_the_server_copied(server, groups, stored, restored):
    # Blocks of a chunk: 4 of full attention; 2 that the window reaches, 1 state. A hit at the end of 4 chunks
    # needs the window of the last chunk and its state alone.
    before = [copied(server, direction) for direction in ("store", "load")]
    report, _ = bench(server, *COPIES, *SMALL, "--workers", "2", "--groups", groups)
    moved = [copied(server, each) - b for each, b in zip(("store", "load"), before, strict=True)]
    copies = [report["results"][name] for name in ("store", "load")]
    assert [each["bytes"] for each in copies] == moved
    assert moved == [2 * 2 * 4 * per_chunk * 2 * 8192 for per_chunk in (stored, restored)]
    assert [each["count"] for each in copies] == [4, 4]


def test_what_it_announces_is_what_it_stores_until_it_ends(server):
    crews = run.crews(
        "model", None, {}, workers=2, clients=2, page_kb=8, layers=3, groups="hybrid", chunks=4, requests=2,
        seconds=None, only="lookup,store",
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for crew in crews:
            for number in range(crew.size):
                client = stack.enter_context(Client(server.address, crew.workload, number))
                for _, measurement, argument in crew.phases:
                    list(measurement(client, argument))
        stored = server.status()["l1"]
        assert stored["ready_bytes"] == sum(crew.l1_bytes for crew in crews)
        assert run.announcement(crews, stored).startswith(
            f"storing {stored['ready_bytes'] / (1 << 20):,.0f} MiB"
        )
    server.wait_at_rest()
    status = server.status()
    assert (status["l1"]["chunks"], status["l1"]["ready_bytes"], status["namespaces"]) == (0, 0, [])


def test_a_server_that_is_cleared_meanwhile_is_not_said_to_have_no_room_only(server):
    workload = Workload("model", 256, False, 1, 4096, 1, 3)
    with Client(server.address, workload, 0) as client:
        samples = lookup(client, 1)
        assert [next(samples).lost, next(samples).lost] == [False, False]
        assert server.cli("clear").returncode == 0
        with pytest.raises(
            CommandError, match=r"the chunks to look up are gone \(no room, or cleared\): try"
        ):
            next(samples)


def test_errors_are_one_sentence(server):
    before = copied(server, "store")
    said = refusal(server, "--requests", "100")
    assert said.startswith(
        "lmcache: this would store 1,632 MiB, more than a quarter of the server's L1 of 512"
    )
    assert "--requests" in said
    assert "not both" in refusal(server, "--requests", "1", "--seconds", "1")
    assert refusal(server, "--only", "everything").startswith("lmcache: --only takes some of lookup,store")
    assert copied(server, "store") == before


def test_more_memory_than_there_is_is_not_taken(monkeypatch):
    monkeypatch.setattr(run, "available_bytes", lambda: (1 << 30, "this test"))
    l1 = {"total_bytes": 1 << 30, "free_bytes": 1 << 30}
    few, many = (Crew(size, Workload("model", 256, False, 1, 4096, 1, 1), (), 0) for size in (25, 26))
    assert "taking 1,001 MiB" in run.announcement([few], l1)
    with pytest.raises(CommandError, match=r"and 1\.0 GiB are available: choose fewer --clients, --workers"):
        run.announcement([many], l1)


def test_without_a_number_of_requests_it_fits_itself_to_l1(server):
    report, said = bench(server)
    assert said.startswith("storing 128 MiB in L1, where 512 MiB are free ")
    assert report["results"]["load"]["count"] == 6
    assert not any(figures["lost"] for figures in report["results"].values())


@pytest.mark.parametrize(
    ("l1_size_gb", "sizes", "fitting"),
    [
        (1, {"page_kb": 64, "layers": 16, "groups": "full"}, 14),  # the server of docs/laptop.md
        (4, {"page_kb": 64, "layers": 32, "groups": "hybrid"}, 16),  # docs/tuning.md, on a default server
        (100, {"page_kb": 64, "layers": 32, "groups": "hybrid"}, 20),
    ],
)
def test_so_many_requests_fit(l1_size_gb, sizes, fitting):
    l1 = {"total_bytes": l1_size_gb << 30, "free_bytes": l1_size_gb << 30}
    others = {"workers": 1, "clients": 1, "chunks": 4, "requests": None, "only": "lookup,store,load"}
    for seconds in (None, 1):
        crews = run.crews("model", None, l1, **sizes, **others, seconds=seconds)
        assert run.announcement(crews, l1)
        assert crews[1].workload.requests == fitting
        full = {**l1, "free_bytes": 0}
        crews = run.crews("model", None, full, **sizes, **others, seconds=seconds)
        room = (1 << 30) * l1_size_gb / (20 if seconds else 4)
        assert crews[1].l1_bytes <= max(room, crews[1].workload.request_l1_bytes)


def holding_64_mib(server):
    """An engine that has stored 64 chunks of 1 MiB, and their keys."""
    server.wait_until_populated()
    engine = RawEngine(server.address, [group(page_bytes=1 << 16, layers=1)], 17).start()
    keys = chain(range(64 * 256), 256)
    tables = [list(range(1, 17)) * 64]
    for some in range(1, 65):
        engine.store_prompt(keys[:some], tables)
    return engine, keys


def test_a_sustained_load_replaces_its_own_chunks_and_not_those_of_engines():
    with LMCacheServer(l1_size_gb=0.125) as server:
        engine, keys = holding_64_mib(server)
        report, said = bench(server, *COPIES, "--layers", "2", "--seconds", "2", sessions=2)
        assert said.startswith(
            "measuring 2 operations for 2 s each; filling the free part of L1, 64 MiB, then replacing the "
            "bench's own chunks (engines lose at most 6 MiB of theirs); "
        )
        for figures in report["results"].values():
            assert figures["wall_s"] > 1.9
            assert figures["lost"] == 0
        stored = report["results"]["store"]["bytes"]
        assert stored > 64 << 20, "the free part was filled, and its chunks replaced"
        assert server.metrics()["lmcache_evicted_bytes_total"] >= stored - (64 << 20)
        assert engine.lookup(keys).resume_tokens == 64 * 256


def test_a_run_of_any_length_takes_the_same_memory():
    tally = Tally()
    for number in range(100_000):
        tally.add(Sample(1e-5 * (1 + number % 1000), 2))
    assert len(pickle.dumps(tally)) < 10_000
    assert (tally.count, tally.num_bytes, tally.lost, tally.max_s) == (100_000, 200_000, 0, 1e-2)
    for share in (0.5, 0.9, 0.99):
        assert tally.quantile_s(share) == pytest.approx(share * 1e-2, rel=0.02)
    both = Tally()
    both.merge(tally)
    both.add(Sample(1.0))
    both.add(Sample(lost=True))
    assert (both.count, both.lost, both.quantile_s(1.0)) == (100_001, 1, 1.0)
    assert Tally().quantile_s(0.5) == 0


def test_what_the_server_has_no_room_for_is_said_not_counted():
    with LMCacheServer(l1_size_gb=0.0625) as server:
        engine, keys = holding_64_mib(server)
        promised = engine.lookup(keys)
        assert promised.resume_tokens == 64 * 256, "all of L1 is leased"
        report, _ = bench(server, *COPIES, *SMALL, sessions=2)
        assert [report["results"][name]["lost"] for name in ("store", "load")] == [2, 2]
        assert [report["results"][name]["count"] for name in ("store", "load")] == [0, 0]
        text = server.cli("bench", *COPIES, *SMALL).stdout
        assert text.split()[:6] == ["count", "p50", "p90", "p99", "max", "rate"]
        assert "2 of 2 requests to store are not in these figures" in text


@pytest.mark.parametrize("honest", [1, 3])
def test_copies_that_did_not_happen_are_noticed(server, honest):
    class Deceived(Client):
        """After `honest` of them, loads are answered but not made."""

        copies = honest

        def ask(self, channel, message, expected, wait_s=1.0):
            if isinstance(message, Load):
                self.copies -= 1
                if self.copies < 0:
                    return Done()
            return Client.ask(channel, message, expected, wait_s)

    requests = max(honest, 2)
    workload = Workload(f"model {honest}", 256, True, 2, 4096, 4, requests)
    with Deceived(server.address, workload, 0) as client:
        assert len(list(store(client, 0))) == 1 + requests
        if honest == requests:
            assert len(list(load(client, 0))) == 1 + requests
        else:
            with pytest.raises(CommandError, match="wrong bytes"):
                list(load(client, 0))
    server.wait_at_rest()


def started(server, *arguments):
    """A bench in a process group of its own, when its first client has greeted."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcache_server", "bench", "--port", str(server.port), *SMALL, *arguments],
        cwd=ROOT,
        env=server.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    server.wait_for_status(lambda status: status["sessions"] or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    return process


def last_words(process):
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in errors
    wait_until(lambda: not group_members(process.pid), what="all processes of the bench have ended")
    return errors.splitlines()[-1] if errors else ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_bench_that_is_interrupted_leaves_nothing(server, number):
    process = started(server, "--requests", "100", "--workers", "2")
    # Ctrl-C goes to every process of a terminal; only the command is to mind it.
    for client in set(group_members(process.pid)) - {process.pid}:
        status = Path(f"/proc/{client}/status").read_text()
        masks = [int(mask, 16) for mask in re.findall(r"^Sig(?:Ign|Blk):\s*(\w+)$", status, re.MULTILINE)]
        assert any(mask & 1 << signal.SIGINT - 1 for mask in masks)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    said = last_words(process)
    assert process.returncode == (1 if number == signal.SIGINT else -number), said
    server.wait_at_rest()


def test_a_client_or_a_server_that_dies_ends_the_bench_with_a_sentence():
    with LMCacheServer() as server:
        process = started(server, "--requests", "100", "--workers", "2")
        is_client = lambda pid: b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()  # noqa: E731
        os.kill(next(filter(is_client, group_members(process.pid))), signal.SIGKILL)
        assert last_words(process) == "lmcache: a bench process was killed: is there enough memory for it?"
        assert process.returncode == 1
        server.wait_at_rest()

        before, process = copied(server, "store"), started(server, "--requests", "100")
        wait_until(lambda: copied(server, "store") > before, what="the bench has stored something")
        server.kill()
        assert last_words(process).startswith("lmcache: the connection to the lmcache server broke")
        assert process.returncode == 1
