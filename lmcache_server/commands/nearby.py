"""Where else on this machine a server is, for whoever asked at the wrong place or as the wrong user."""

import errno
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmcache_client.contract.endpoint import peer_pid, start_command, user_name
from lmcache_client.contract.messages import DEFAULT_PORT
from lmcache_server.config import FLAGS, unknown_variables
from lmcache_server.host.machine import is_page

SYSTEM_DIRECTORY = Path("/run/lmcache")
USERS_DIRECTORIES = Path("/tmp"), "lmcache-mp-"
READING = ("status", "ping", "inspect", "doctor")
"""The commands that change nothing."""


def instead(endpoint: str) -> str:
    """What to do if no server answers at `endpoint`."""
    mistyped = [each for each in unknown_variables(os.environ) if "did you mean" in each]
    return "; ".join([*mistyped[:1], _other_server(endpoint)])


def _other_server(endpoint: str) -> str:
    asked = int((re.search(r"/(\d+)\.sock$", endpoint) or [0, DEFAULT_PORT])[1])
    closed = []
    for directory in _directories():
        owner_id = directory.stat().st_uid
        try:
            names = [each for each in os.listdir(directory) if re.fullmatch(r"[0-9]{1,5}\.sock", each)]
        except PermissionError:
            closed.append((directory, owner_id))
            continue
        if ports := [int(each[:-5]) for each in names if listener(directory / each) is not None]:
            port = asked if asked in ports else min(ports)
            return f"one is in {directory}: {again(directory, owner_id, port)}"
    others = "".join(f"; another user's may be in {each[0]}: {again(*each, asked)}" for each in closed[:1])
    if is_page("127.0.0.1", port := FLAGS["http_port"].default):
        return f"one is shown at http://127.0.0.1:{port}{others}"
    start = f"start one with '{start_command(endpoint)}', or pass the --host and --port"
    key = "" if endpoint.startswith("ipc") else " (and the --key-file)"
    return f"{start}{key} that it was started with{others}"


def again(directory: Path, owner_id: int, port: int) -> str:
    """How this command reaches a server in `directory`, which belongs to user `owner_id`. Whoever asked may
    have meant another server, so nothing is suggested that changes this one."""
    name = user_name(owner_id) if not user_name(owner_id).startswith("id ") else f"\\#{owner_id}"
    words = list(_without_address(sys.argv[1:]))
    if not words or words[0] not in READING:
        words = ["status"]
    words += ["--port", str(port)] if port != DEFAULT_PORT else []
    variable, arguments = f"LMCACHE_RUNTIME_DIR={shlex.quote(str(directory))}", shlex.join(words)
    if os.getuid() in (0, owner_id):
        return f"run '{variable} lmcache {arguments}'"
    # Another user may have another PATH.
    command = f"{variable} {shlex.quote(sys.executable)} -m lmcache_server {arguments}"
    return f"run 'sudo -u {name} env {command}'" if shutil.which("sudo") else f"as root, run '{command}'"


def _directories() -> Iterator[Path]:
    parent, prefix = USERS_DIRECTORIES
    asked = os.environ.get("LMCACHE_RUNTIME_DIR")
    # Anyone may make others there. What is printed here may be run by root.
    users = (path for path in parent.glob(f"{prefix}*") if path.name == f"{prefix}{path.lstat().st_uid}")
    for path in (SYSTEM_DIRECTORY, *sorted(users)):
        if path.is_dir() and not path.is_symlink() and str(path) != asked:
            yield path


def listener(path: Path) -> int | None:
    """The process that listens at a Unix socket, None if none does; 0 if it is not to be seen from here, or
    is too busy to be asked."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        if error := probe.connect_ex(str(path)):
            return 0 if error == errno.EAGAIN else None  # its queue is full
        return peer_pid(probe.fileno())


def _without_address(words: Sequence[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        if word in ("--port", "--host"):
            next(rest, None)
        elif not word.startswith(("--port=", "--host=")):
            yield word
