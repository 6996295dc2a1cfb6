"""Asks a running server one question, for the command line."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from lmcache_client.contract import messages
from lmcache_client.contract.codec import Natural, ProtocolError
from lmcache_client.contract.control import Inspect, Status, StatusReport
from lmcache_client.contract.endpoint import (
    EndpointError,
    ForeignDirectoryError,
    address,
    check_runtime_directory,
    host_name,
    runtime_directory,
    user_name,
)
from lmcache_client.contract.messages import Clear, Done, Hello, Message, Pin, Ping, Refused, Unpin, Welcome
from lmcache_client.contract.version import VERSION
from lmcache_client.transport import SYSTEM, Connection, ConnectionLostError
from lmcache_server.commands import nearby
from lmcache_server.commands.shared_flags import Address
from lmcache_server.errors import CommandError
from lmcache_server.net.claim import listener
from lmcache_server.options import parts
from lmcache_server.telemetry.metrics import OBJECTS, REASONS

REQUEST_ID = 1
POLL_S = 0.002
Real = Annotated[float, msgspec.Meta(ge=0, lt=1 << 63)]
Reply = TypeVar("Reply", bound=Message)


def json_object(strings: str, numbers: str, **others: Any) -> Any:
    """The type of a JSON object, from the names of its strings and whole numbers and the types of others."""
    kinds = dict.fromkeys(strings.split(), str) | dict.fromkeys(numbers.split(), Natural) | others
    return msgspec.defstruct("Object", kinds.items())


_GROUP = json_object("kind", "block_size window layers block_bytes")
_NUMBERS = "chunk_size capacity_tokens lookahead_tokens chunks world_size"
_TOKENS = json_object("", "computed hit miss tail")
_MISSED = json_object("", " ".join(REASONS))
_NAMESPACE = json_object(
    "namespace model", _NUMBERS, ephemeral=bool, engines=list[str], groups=list[_GROUP],  # type: ignore[valid-type]
    tokens=_TOKENS | None, missed=_MISSED | None,
)  # fmt: skip
_EXPLAINED = json_object("engine namespace model", "", fields=dict[str, str])
_SESSION = json_object(
    "role engine_id client_version vllm_version not_cached", "session_id pid rank", age_s=Real
)
_L1 = json_object("", "total_bytes free_bytes ready_bytes reserved_bytes populated_bytes chunks leases")
_CONFIG = json_object("", "", chunk_size=Natural | None, l1_size_gb=Real, l1_hugetlb=bool)
SHARE = Annotated[float, msgspec.Meta(ge=0, le=1)]
_REPORT = json_object(
    "version", "pid namespaces_left_out sessions_left_out", uptime_s=Real,
    hit_rate=SHARE, test_hit_tokens=Natural, l1=_L1,
    tokens=json_object("", "hit miss computed"), config=_CONFIG,
    objects=json_object("", " ".join(OBJECTS)),
    explained=list[_EXPLAINED],  # type: ignore[valid-type]
    namespaces=list[_NAMESPACE], sessions=list[_SESSION],  # type: ignore[valid-type]
)  # fmt: skip
"""The parts of a status report that the commands read."""


class ControlError(CommandError):
    """No server answers, or its answer is of no use; the message is one sentence."""


class UnreachableError(ControlError):
    """No server answers at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.advice = endpoint, nearby.instead(endpoint)
        super().__init__(f"no lmcache server answers at {endpoint}: {self.advice}")


def _silent(endpoint: str, is_connected: bool = False) -> ControlError:
    """Nobody answered there in time."""
    pid = listener(Path(endpoint.removeprefix("ipc://"))) if endpoint.startswith("ipc") else None
    if pid is None and not is_connected:
        return UnreachableError(endpoint)
    process = f", process {pid}," if pid else ""
    told = f"the lmcache server at {endpoint}{process} does not answer in time"
    return ControlError(f"{told}: see its log and its /healthz")


def report(server: Address, timeout_s: float, explain: bool = False) -> dict[str, Any]:
    """The status of a server, which has everything that the commands read. Raises ControlError."""
    reply = ask(server, Status(explain), StatusReport, timeout_s)
    try:
        status: dict[str, Any] = json.loads("".join(reply.pieces))
        for kind in (_REPORT, *(json_object("", "", **more) for more in parts("text", "REPORT"))):
            msgspec.convert(status, kind)
    except (ValueError, RecursionError, msgspec.ValidationError):
        told = f"the lmcache server at {address(*server)} sent a status that this version cannot read"
        fix = "install the same version of lmcache-mp for the server and for this command"
        raise ControlError(f"{told}: {fix}") from None
    return status


def ask(server: Address, message: Message, expected: type[Reply], timeout_s: float) -> Reply:
    """Send Status, Clear, Inspect, Pin or Unpin to a server and return its reply. Raises ControlError."""
    with _connected(server, timeout_s) as connection:
        if isinstance(message, Clear | Inspect | Pin | Unpin):
            # The server takes these only from a client that has greeted.
            hello = Hello(os.getpid(), os.urandom(messages.CLIENT_ID_BYTES), VERSION)
            _exchange(connection, server, hello, Welcome, timeout_s)
        return _exchange(connection, server, message, expected, timeout_s)


def round_trip_s(server: Address, timeout_s: float) -> float:
    """The seconds that a server takes to answer one request on an open connection. Raises ControlError."""
    with _connected(server, timeout_s) as connection:
        for _ in range(2):  # the first one may find the server asleep
            started_s = time.perf_counter()
            _exchange(connection, server, Ping(), Done, timeout_s)
        return time.perf_counter() - started_s


def _exchange(
    connection: Connection, server: Address, message: Message, expected: type[Reply], timeout_s: float
) -> Reply:
    endpoint, limit_s = address(*server), time.monotonic() + timeout_s
    with contextlib.suppress(ConnectionLostError):
        connection.send(messages.encode_request(REQUEST_ID, message))
    while (frame := connection.receive()) is None:
        if (left_s := limit_s - time.monotonic()) <= 0:
            raise _silent(endpoint, is_connected=True)
        connection.wait(left_s)
    try:
        _, request_id, reply = messages.decode_reply(frame)
    except ProtocolError as error:
        raise ControlError(f"{endpoint} is not a compatible lmcache server: {error}") from error
    if isinstance(reply, Refused):
        raise ControlError(reply.message)
    if request_id != REQUEST_ID or not isinstance(reply, expected):
        raise ControlError(f"{endpoint} is not a compatible lmcache server: its answer is of another kind")
    return reply


def _endpoint(server: Address) -> str:
    host, port, _ = server
    try:
        endpoint = address(*server)
        if not host:
            check_runtime_directory(runtime_directory())
            os.stat(endpoint.removeprefix("ipc://"))
    except EndpointError as error:
        told = str(error)
        # In this user's own directory, no other user has a server.
        if isinstance(error, ForeignDirectoryError) and os.environ.get("LMCACHE_RUNTIME_DIR"):
            again = nearby.again(runtime_directory(), error.owner_id, port)
            told = f"{runtime_directory()} belongs to user {user_name(error.owner_id)}: {again}"
        raise ControlError(told) from error
    except FileNotFoundError:
        raise UnreachableError(endpoint) from None
    except OSError as error:
        told = f"cannot use {runtime_directory()} for the socket ({error.strerror})"
        raise ControlError(f"{told}: set LMCACHE_RUNTIME_DIR to the server's directory") from error
    return endpoint


@contextlib.contextmanager
def _connected(server: Address, timeout_s: float) -> Iterator[Connection]:
    endpoint, limit_s = _endpoint(server), time.monotonic() + timeout_s
    try:
        if server.host:
            socket.getaddrinfo(host_name(server.host), server.port)
        connection = SYSTEM.connect(endpoint)
    except socket.gaierror as error:
        told = f"cannot find the address of --host {server.host} ({error.strerror}): pass another --host"
        raise ControlError(told) from error
    except (ConnectionLostError, ValueError) as error:
        told = f"{endpoint} is not the address of a server ({error}): pass another --host or --port"
        raise ControlError(told) from error
    with contextlib.closing(connection):
        while not connection.event():
            if connection.refusal:
                raise ControlError(f"the lmcache server at {connection.refusal}")
            if time.monotonic() > limit_s:
                raise _silent(endpoint)
            time.sleep(POLL_S)
        yield connection
