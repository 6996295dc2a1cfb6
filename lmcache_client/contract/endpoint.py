"""Where the server listens: a Unix socket derived from the port, or TCP when a host is given."""

import contextlib
import hashlib
import ipaddress
import os
import pwd
import re
import socket
import stat
import struct
from pathlib import Path

from lmcache_client.contract.key_file import read_key

MAX_SOCKET_PATH = 100
LENT_BYTES = 4
KEY_FILE = "?key_file="
_HOST = re.compile(r"[\w.-]+|[0-9a-fA-F:]+[0-9.]*(%[\w.-]+)?")
_SUFFIXES = ".sock", ".lock", ".memory"
"""Of the files in a runtime directory."""


class EndpointError(ValueError):
    """The address cannot be used; the message says what to do."""


class ForeignDirectoryError(EndpointError):
    """The directory of the sockets belongs to another user."""

    def __init__(self, directory: Path, owner_id: int) -> None:
        super().__init__(
            f"{directory} belongs to user {user_name(owner_id)}: run this as that user, or set "
            "LMCACHE_RUNTIME_DIR to a directory of your own"
        )
        self.owner_id = owner_id


def runtime_directory() -> Path:
    """The directory of the Unix sockets: $LMCACHE_RUNTIME_DIR, or one per user under /tmp."""
    return Path(os.environ.get("LMCACHE_RUNTIME_DIR") or f"/tmp/lmcache-mp-{os.getuid()}")


def lending_path(pid: int) -> Path:
    """Where process `pid` lends file descriptors of its GPU memory: it sends that whose number it is sent, in
    LENT_BYTES bytes, the lowest first."""
    return runtime_directory() / f"{pid}.memory"


def check_runtime_directory(directory: Path, must_own: bool = False) -> None:
    """Raises EndpointError unless only this user may enter `directory`: anyone who can open the socket can
    make the server copy memory of this user's processes. Unless it must own it, root may use the directory of
    another user that LMCACHE_RUNTIME_DIR names."""
    info, user = directory.lstat(), os.getuid()
    if not stat.S_ISDIR(info.st_mode):
        raise EndpointError(f"{directory} is no directory: set LMCACHE_RUNTIME_DIR to another one")
    is_named = bool(os.environ.get("LMCACHE_RUNTIME_DIR"))
    if info.st_uid != user and (must_own or user or not is_named):
        raise ForeignDirectoryError(directory, info.st_uid)
    if stat.S_IMODE(info.st_mode) & 0o077:
        # Whoever closed /tmp or a home directory would harm others.
        are_ours = [each.stem.isdigit() and each.suffix in _SUFFIXES for each in directory.iterdir()]
        new = directory / "lmcache"
        fix = f"set LMCACHE_RUNTIME_DIR to one that is closed to others, such as a new {new}"
        if are_ours and all(are_ours):
            fix = f"run 'chmod 700 {directory}', or set LMCACHE_RUNTIME_DIR to another directory"
        raise EndpointError(f"others than user {user_name(info.st_uid)} may enter {directory}: {fix}")


def whose(path: str) -> str:
    """The owner and mode of a file or, where it cannot be looked at, of the directory above it."""
    try:
        info = os.stat(path)
    except OSError:
        return whose(os.path.dirname(os.path.abspath(path)))
    return f"{path} belongs to user {user_name(info.st_uid)} and has mode {stat.S_IMODE(info.st_mode):o}"


def user_name(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return f"id {user_id}"


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


def address(host: str, port: int, key_file: str = "") -> str:
    """The server's address for `split`: TCP if `host` is given, otherwise the Unix socket of `port`, where
    `key_file` has no effect. Raises EndpointError if the host, socket's path or key file cannot be used."""
    if host:
        if not _HOST.fullmatch(name := host_name(host)):
            raise EndpointError(f"{host!r:.100} is no host: name one such as 10.0.0.1, without a port")
        place = f"tcp://[{name}]:{port}" if ":" in name else f"tcp://{name}:{port}"
        place += f"{KEY_FILE}{os.path.abspath(key_file)}" if key_file else ""
        split(place)
        return place
    path = runtime_directory() / f"{port}.sock"
    faults = {
        "does not begin with /": not path.is_absolute(),
        "cannot be printed": not str(path).isprintable(),
        "is too long for a socket": len(os.fsencode(path)) > MAX_SOCKET_PATH,
    }
    for fault in (fault for fault, has_it in faults.items() if has_it):
        raise EndpointError(f"{path} {fault}: set LMCACHE_RUNTIME_DIR to another directory")
    return f"ipc://{path}"


def split(endpoint: str) -> tuple[str, bytes]:
    """ZeroMQ's part of an address that `address` returned, and the secret key of its connections, or no
    bytes if it names no key file. Raises EndpointError."""
    plain, _, path = endpoint.partition(KEY_FILE)
    try:
        # Whoever uses one file for connections and for a tier has two keys.
        return plain, hashlib.sha256(b"lmcache-mp TCP" + read_key(path)).digest() if path else b""
    except ValueError as error:
        raise EndpointError(f"cannot use the key file: {error}") from error


def start_command(endpoint: str) -> str:
    """What starts a server at an address that `address` returned."""
    endpoint, _, key_file = endpoint.partition(KEY_FILE)
    place, _, port = endpoint.removesuffix(".sock").rpartition(":" if endpoint.startswith("tcp") else "/")
    host = f" --host {host_name(place)}" if endpoint.startswith("tcp") else ""
    return f"lmcache server{host} --port {port}" + (f" --key-file {key_file}" if key_file else "")


def peer_pid(descriptor: int) -> int | None:
    """The process at the other end of a Unix socket, by the kernel's account; None for a TCP socket. 0 if it
    is in a process namespace that is not visible here, or if the connection has ended."""
    with contextlib.suppress(OSError, ValueError):  # it is closed, or no socket
        connection = socket.socket(fileno=descriptor)
        try:
            return None if connection.family != socket.AF_UNIX else credentials(connection)[0]
        finally:
            connection.detach()  # libzmq closes it
    return 0


def credentials(connection: socket.socket) -> tuple[int, ...]:
    """Process, user and group at the other end of a Unix socket, by the kernel's account. Raises OSError."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
