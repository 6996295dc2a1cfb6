"""Where the server listens: a Unix socket derived from the port, or TCP when a host is given."""

import ipaddress
import os
import socket
import stat
import struct
from pathlib import Path

MAX_SOCKET_PATH = 100


class EndpointError(ValueError):
    """The address cannot be used; the message says what to do."""


def runtime_directory() -> Path:
    """The directory of the Unix sockets: $LMCACHE_RUNTIME_DIR, or one per user under /tmp."""
    return Path(os.environ.get("LMCACHE_RUNTIME_DIR") or f"/tmp/lmcache-mp-{os.getuid()}")


def check_runtime_directory(directory: Path) -> None:
    """Raises EndpointError unless only this user may enter `directory`: anyone who can open the socket can
    make the server copy memory of this user's processes."""
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise EndpointError(
            f"{directory} must be a directory of user id {os.getuid()} that nobody else may enter: "
            f"remove it, run 'chmod 700 {directory}', or set LMCACHE_RUNTIME_DIR to another directory"
        )


def host_name(host: str) -> str:
    """Strips LMCache's `tcp://` prefix and IPv6 brackets from `host`."""
    return host.removeprefix("tcp://").rstrip("/").removeprefix("[").removesuffix("]")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. `localhost` is the only name trusted to mean that."""
    name = host_name(host)
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def address(host: str, port: int) -> str:
    """The server's ZeroMQ address: TCP if `host` is given, otherwise the Unix socket of `port`. Raises
    EndpointError if the path of the socket is too long for the kernel or cannot be printed."""
    if host:
        name = host_name(host)
        return f"tcp://[{name}]:{port}" if ":" in name else f"tcp://{name}:{port}"
    path = runtime_directory() / f"{port}.sock"
    if not str(path).isprintable():
        raise EndpointError(
            f"{path} cannot be printed: set LMCACHE_RUNTIME_DIR to a directory with a plain name"
        )
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise EndpointError(
            f"{path} is too long for a socket: set LMCACHE_RUNTIME_DIR to a shorter directory"
        )
    return f"ipc://{path}"


def peer_pid(descriptor: int) -> int | None:
    """The process at the other end of a Unix socket, by the kernel's account; None for a TCP socket. 0 if it
    is in a process namespace that is not visible here, or if the connection has ended."""
    try:
        connection = socket.socket(fileno=descriptor)
    except (OSError, ValueError):  # none, or not a socket
        return 0
    try:
        if connection.family != socket.AF_UNIX:
            return None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("3i", credentials)[0])
    except OSError:
        return 0
    finally:
        connection.detach()  # libzmq closes it
