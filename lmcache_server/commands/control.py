"""One question to a running server, for the command line."""

import os

import zmq

from lmcache_client.contract import messages
from lmcache_client.contract.codec import ProtocolError
from lmcache_client.contract.endpoint import (
    EndpointError,
    address,
    check_runtime_directory,
    runtime_directory,
)
from lmcache_client.contract.messages import Message, Refused

REQUEST_ID = 1


class ControlError(Exception):
    """No server, or none that answered what was asked: one sentence."""


class UnreachableError(ControlError):
    """No server answers there."""


def ask(host: str, port: int, message: Message, timeout_s: float) -> Message:
    """The answer of the server at `host` and `port` to Ping, Status or Clear. Raises ControlError."""
    try:
        endpoint = address(host, port)
        if not host:
            check_runtime_directory(runtime_directory())
    except EndpointError as error:
        raise ControlError(str(error)) from error
    except FileNotFoundError:
        raise _unreachable(endpoint) from None
    if not host and not os.path.exists(endpoint.removeprefix("ipc://")):
        raise _unreachable(endpoint)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ControlError(f"{endpoint} is no address of a server: {error}") from error
        socket.send(messages.encode_request(REQUEST_ID, message))
        if not socket.poll(int(timeout_s * 1000)):
            raise _unreachable(endpoint)
        frame = socket.recv()
    try:
        _, request_id, reply = messages.decode_reply(frame)
    except ProtocolError as error:
        raise ControlError(f"what answers at {endpoint} is no fitting lmcache server: {error}") from error
    if isinstance(reply, Refused):
        raise ControlError(reply.message)
    if request_id != REQUEST_ID:
        raise ControlError(f"what answers at {endpoint} answered another question")
    return reply


def _unreachable(endpoint: str) -> UnreachableError:
    return UnreachableError(
        f"no lmcache server answers at {endpoint}: start one with 'lmcache server', "
        "or pass the --host and --port that it was started with"
    )
