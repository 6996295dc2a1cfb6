"""One question to a running server, for the command line."""

import json
import os
from typing import Any, TypeVar

import zmq

from lmcache_client.contract import messages
from lmcache_client.contract.codec import ProtocolError
from lmcache_client.contract.endpoint import (
    EndpointError,
    address,
    check_runtime_directory,
    runtime_directory,
)
from lmcache_client.contract.messages import Message, Refused, Status, StatusReport
from lmcache_server.errors import CommandError

REQUEST_ID = 1
MAX_NUMBER = 1 << 63
Reply = TypeVar("Reply", bound=Message)


def _all(kind: type, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_GROUP = _all(str, "kind") | _all(int, "block_size window layers block_bytes")
_NAMESPACE = _all(str, "namespace model") | _all(int, "chunk_size chunks world_size")
_SESSION = _all(str, "role engine_id client_version vllm_version not_cached") | _all(
    int, "session_id pid rank"
)
_REPORT = {
    **{"version": str, "pid": int, "uptime_s": float, "hit_rate": float},
    "l1": _all(int, "total_bytes free_bytes ready_bytes reserved_bytes populated_bytes chunks leases"),
    "tokens": _all(int, "hit miss computed"),
    "config": {"chunk_size": int | None, "l1_size_gb": float, "l1_path": str, "l1_hugetlb": bool},
    "namespaces": [{**_NAMESPACE, "engines": [str], "groups": [_GROUP]}],
    "sessions": [{**_SESSION, "age_s": float}],
}
"""What the commands read of a status report: the type of each value, by its name."""


class ControlError(CommandError):
    """No server answers, or none that answered what was asked; the message is one sentence."""


class UnreachableError(ControlError):
    """No server answers at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            f"no lmcache server answers at {endpoint}: start one with 'lmcache server', "
            "or pass the --host and --port that it was started with"
        )
        self.endpoint = endpoint


def report(host: str, port: int, timeout_s: float) -> dict[str, Any]:
    """The status of a server, with everything in it that the commands read. Raises ControlError."""
    reply = ask(host, port, Status(), StatusReport, timeout_s)
    try:
        status: dict[str, Any] = json.loads("".join(reply.pieces))
    except (ValueError, RecursionError):
        status = {}
    if not _has_shape(status, _REPORT):
        raise ControlError(
            f"the lmcache server at {address(host, port)} sent a status that this version cannot read: "
            "install the same version of lmcache-mp for the server and for this command"
        )
    return status


def _has_shape(value: Any, shape: Any) -> bool:
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            name in value and _has_shape(value[name], part) for name, part in shape.items()
        )
    if isinstance(shape, list):
        return isinstance(value, list) and all(_has_shape(part, shape[0]) for part in value)
    if isinstance(value, int | float):
        return 0 <= value < MAX_NUMBER and isinstance(value, shape | int if shape is float else shape)
    return isinstance(value, shape)


def ask(host: str, port: int, message: Message, expected: type[Reply], timeout_s: float) -> Reply:
    """The answer of the server at `host` and `port` to Ping, Status or Clear. Raises ControlError."""
    endpoint = _endpoint(host, port)
    frame = _exchange(endpoint, messages.encode_request(REQUEST_ID, message), timeout_s)
    try:
        _, request_id, reply = messages.decode_reply(frame)
    except ProtocolError as error:
        raise ControlError(f"{endpoint} is not a compatible lmcache server: {error}") from error
    if isinstance(reply, Refused):
        raise ControlError(reply.message)
    if request_id != REQUEST_ID or not isinstance(reply, expected):
        raise ControlError(
            f"{endpoint} is not a compatible lmcache server: it answered another question than "
            f"{type(message).__name__}"
        )
    return reply


def _endpoint(host: str, port: int) -> str:
    try:
        endpoint = address(host, port)
        if not host:
            check_runtime_directory(runtime_directory())
    except EndpointError as error:
        raise ControlError(str(error)) from error
    except FileNotFoundError:
        raise UnreachableError(endpoint) from None
    except OSError as error:
        raise ControlError(
            f"cannot use {runtime_directory()} for the socket ({error.strerror}): name another directory in "
            "LMCACHE_RUNTIME_DIR"
        ) from error
    if not host and not os.path.exists(endpoint.removeprefix("ipc://")):
        raise UnreachableError(endpoint)
    return endpoint


def _exchange(endpoint: str, request: bytes, timeout_s: float) -> bytes:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            socket.connect(endpoint)
        except (zmq.ZMQError, ValueError) as error:  # ValueError: text that no address can have
            raise ControlError(
                f"{endpoint} is not the address of a server ({error}): pass another --host or --port"
            ) from error
        socket.send(request)
        if not socket.poll(int(timeout_s * 1000)):
            raise UnreachableError(endpoint)
        return socket.recv()
