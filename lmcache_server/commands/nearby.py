"""Where else on this machine a server is, for whoever asked at the wrong place or as the wrong user."""

import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lmcache_client.contract.endpoint import host_name, start_command, user_name
from lmcache_client.contract.messages import DEFAULT_PORT
from lmcache_server.config import FLAGS, unknown_variables
from lmcache_server.host.machine import page
from lmcache_server.net.claim import listener

SYSTEM_DIRECTORY = Path("/run/lmcache")
USERS_DIRECTORIES = Path("/tmp"), "lmcache-mp-"
READING = ("status", "ping", "inspect", "doctor")
"""The commands that change nothing."""


_CONFIG = msgspec.defstruct("Config", [("host", str), ("port", int), ("key_file", str)])
_PAGE: Any = msgspec.defstruct("Page", [("config", _CONFIG)])
"""What an HTTP page says of where its server listens. Any user can make such a page."""


def instead(endpoint: str) -> str:
    """What to do if no server answers at `endpoint`."""
    mistyped = [each for each in unknown_variables(os.environ) if "did you mean" in each]
    return "; ".join([*mistyped[:1], _other_server(endpoint)])


def _other_server(endpoint: str) -> str:
    asked = int((re.search(r"/(\d+)\.sock$", endpoint) or [0, DEFAULT_PORT])[1])
    if endpoint.startswith("ipc") and (pid := _lock_holder(Path(endpoint[6:]).with_suffix(".lock"))):
        return f"its socket was removed, but process {pid} still is the server: restart that"
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
    if found := page("127.0.0.1", port := FLAGS["http_port"].default):
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            config = msgspec.json.decode(found, type=_PAGE).config
            words = ["--host", host_name(config.host), "--port", str(config.port)]
            words += ["--key-file", config.key_file] if config.key_file else []
            others = f": run 'lmcache {_command(*words)}'{others}" if config.host else others
        return f"one is shown at http://127.0.0.1:{port}{others}"
    start = f"start one with '{start_command(endpoint)}', or pass the --host and --port"
    key = "" if endpoint.startswith("ipc") else " (and the --key-file)"
    return f"{start}{key} that it was started with{others}"


def again(directory: Path, owner_id: int, port: int) -> str:
    """How this command reaches a server in `directory`, which belongs to user `owner_id`. Whoever asked may
    have meant another server, so nothing is suggested that changes this one."""
    name = user_name(owner_id) if not user_name(owner_id).startswith("id ") else f"\\#{owner_id}"
    arguments = _command("--port", str(port)) if port != DEFAULT_PORT else _command()
    variable = f"LMCACHE_RUNTIME_DIR={shlex.quote(str(directory))}"
    if os.getuid() in (0, owner_id):
        return f"run '{variable} lmcache {arguments}'"
    # Another user may have another PATH.
    command = f"{variable} {shlex.quote(sys.executable)} -m lmcache_server {arguments}"
    return f"run 'sudo -u {name} env {command}'" if shutil.which("sudo") else f"as root, run '{command}'"


def _command(*address: str) -> str:
    """The words of this command, with another address."""
    words = list(_without_address(sys.argv[1:]))
    return shlex.join([*(words if words[:1] and words[0] in READING else ["status"]), *address])


def _directories() -> Iterator[Path]:
    parent, prefix = USERS_DIRECTORIES
    asked = os.environ.get("LMCACHE_RUNTIME_DIR")
    # Anyone may make others there. What is printed here may be run by root.
    users = (path for path in parent.glob(f"{prefix}*") if path.name == f"{prefix}{path.lstat().st_uid}")
    for path in (SYSTEM_DIRECTORY, *sorted(users)):
        if path.is_dir() and not path.is_symlink() and str(path) != asked:
            yield path


def _lock_holder(lock: Path) -> str:
    """The process that has locked a file, by the kernel's account; empty if none is to be seen from here."""
    with contextlib.suppress(OSError):
        info = lock.stat()
        file = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
        if found := re.search(rf"FLOCK .* (\d+) {file} ", Path("/proc/locks").read_text()):
            return found[1]
    return ""


def _without_address(words: Sequence[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        if word in ("--port", "--host", "--key-file"):
            next(rest, None)
        elif not word.startswith(("--port=", "--host=", "--key-file=")):
            yield word
