"""A Valkey behind TLS: the server's connections are encrypted, and it trusts what its machine trusts."""

import asyncio
import contextlib
import datetime
import http.server
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from harness import stores, tools
from harness.exercise import is_served, served
from harness.server import LMCacheServer
from harness.tiers import fails, memory
from harness.waiting import wait_until

PIECE_BYTES = 1 << 16


def certificate(folder: Path) -> tuple[Path, Path]:
    """The files of a certificate for this machine, which signs itself, and of its key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name.from_rfc4514_string("CN=localhost")
    now, number = datetime.datetime.now(datetime.timezone.utc), x509.random_serial_number()
    own = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    day = datetime.timedelta(days=1)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), number, now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([own]), False)
        .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return files


class Terminator:
    """Speaks TLS at `port`, and passes what it decrypts to a port of the loopback. The Valkey that the tests
    have was built without TLS."""

    def __init__(self, to_port: int, files: tuple[Path, Path]) -> None:
        self._to_port = to_port
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(*files)
        self.port = self.connections = 0
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        store_reader, store_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(pump(reader, store_writer), pump(store_reader, writer))

    def __enter__(self) -> "Terminator":
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.1))
        self._loop.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    finally:
        writer.close()


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[tuple[Terminator, Path]]:
    files = certificate(tmp_path)
    with stores.valkey(tmp_path) as store, Terminator(store.port, files) as front:
        yield front, files[0]


def is_written(server: LMCacheServer, number: int) -> bool:
    """Whether this prompt is in the tier as a whole. On a busy machine, calls that hang too long fail."""
    failed = server.tier()["written_objects"]["failed"]
    assert served(server, f"first {number}", number) == 0
    server.wait_until_written()
    return bool(server.tier()["written_objects"]["failed"] == failed)


def test_records_pass_through_tls(tls: tuple[Terminator, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    front, trusted = tls
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    with LMCacheServer(l1_size_gb=0.2, tier=f"valkey://127.0.0.1:{front.port}?tls=1") as server:
        number = next(number for number in range(1, 6) if is_written(server, number))
        server.restart()
        assert is_served(server, "second", number)
        (tier,) = server.status()["tiers"]
        assert tier["read_objects"]["read"] > 0
        assert front.connections


def test_a_certificate_that_nobody_signed_is_a_tier_that_fails(tls: tuple[Terminator, Path]) -> None:
    front, _ = tls
    url = f"valkey://127.0.0.1:{front.port}?tls=1"
    with LMCacheServer(l1_size_gb=0.2, tier=url) as server:
        assert served(server, "first", 1) == 0
        wait_until(lambda: server.status()["tiers"][0]["failing"], 60)
        server.wait_for_log("whether this machine trusts its certificate")
        assert served(server, "second", 1) == 3 * 256, "L1 serves without the tier"


class Redirecting(http.server.BaseHTTPRequestHandler):
    """An object store that sends its clients to another server, `elsewhere`; or that server, without one."""

    asked: ClassVar[list[int]]
    elsewhere: ClassVar[int] = 0

    def do_GET(self) -> None:
        self.asked.append(self.server.server_address[1])  # type: ignore[arg-type]
        self.send_response(307 if self.elsewhere else 404)
        self.send_header("Location", f"http://127.0.0.1:{self.elsewhere}/latest/meta-data")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass


def test_an_object_store_behind_tls_sends_nobody_to_a_server_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example to the address at which a cloud tells its machines their secrets."""
    tools.module("obstore", "s3")
    from lmcache_server.options.tiers.object_store import Objects

    asked: list[int] = []
    files = certificate(tmp_path)
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "c"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
    with contextlib.ExitStack() as stack:
        ports = []
        for elsewhere in (lambda: 0, lambda: ports[0]):
            handler = type("Handler", (Redirecting,), {"asked": asked, "elsewhere": elsewhere()})
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            ports.append(server.server_address[1])
        front = stack.enter_context(Terminator(ports[1], files))
        tier = Objects("s3", "records", endpoint=f"https://127.0.0.1:{front.port}")
        stack.callback(tier.close)
        for call in (lambda: tier.present(["a"]), lambda: tier.read("a", memory(1))):
            assert "redirect" in fails(call)
    assert set(asked) == {ports[1]}
