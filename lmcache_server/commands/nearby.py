"""Where else on this machine a server is, for whoever asked at the wrong place or as the wrong user."""

import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lmcache_client.contract.codec import Natural
from lmcache_client.contract.endpoint import start_command, user_name
from lmcache_client.contract.messages import DEFAULT_PORT
from lmcache_server.config import FLAGS, unknown_variables
from lmcache_server.host.machine import page
from lmcache_server.net.claim import listener

SYSTEM_DIRECTORY = Path("/run/lmcache")
USERS_DIRECTORIES = Path("/tmp"), "lmcache-mp-"
READING = ("status", "ping", "inspect", "doctor")
"""The commands that change nothing."""
LOGGED = "its log names its address: pass that --host and --port, or set LMCACHE_RUNTIME_DIR to its directory"
_PLAIN = re.compile(r"[\w.:/%\[\]-]{1,255} [\w.:/%@+=,-]{0,1000}", re.ASCII)
"""The host and key file that a page may name in a command: without characters special to a shell."""
_CONFIG = msgspec.defstruct("Config", [("host", str), ("key_file", str), ("port", Natural)])
_PAGE: Any = msgspec.defstruct("Page", [("config", _CONFIG)])


def instead(endpoint: str) -> str:
    """What to do if no server answers at `endpoint`."""
    mistyped = [each for each in unknown_variables(os.environ) if "did you mean" in each]
    return "; ".join([*mistyped[:1], _other_server(endpoint)])


def _other_server(endpoint: str) -> str:
    asked = int((re.search(r"/(\d+)\.sock$", endpoint) or [0, DEFAULT_PORT])[1])
    if endpoint.startswith("ipc") and (pid := _lock_holder(Path(endpoint[6:]).with_suffix(".lock"))):
        if os.path.exists(endpoint[6:]):
            return f"process {pid} is its server, which starts or stops: try again soon"
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
    if (answer := page("127.0.0.1", port := FLAGS["http_port"].default, "/status")) is not None:
        return f"one is shown at http://127.0.0.1:{port}: {_way_to(answer)}{others}"
    place = Path(endpoint[6:]).parent if endpoint.startswith("ipc") else ""
    owner_id = os.stat(place).st_uid if os.path.isdir(place) else os.getuid()
    user = f" as user {user_name(owner_id)}" if owner_id != os.getuid() else ""
    start = f"start one{user} with '{start_command(endpoint)}', or pass the --host and --port"
    key = "" if endpoint.startswith("ipc") else " (and the --key-file)"
    return f"{start}{key} that it was started with{others}"


def _way_to(answer: bytes) -> str:
    """How this command reaches the server whose /status is `answer`, which any program may have sent."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        config = msgspec.json.decode(answer, type=_PAGE).config
        key = ["--key-file", config.key_file] if config.key_file else []
        command = f"lmcache {shlex.join([*_asked(config.port), '--host', config.host, *key])}"
        if _PLAIN.fullmatch(f"{config.host} {config.key_file}"):
            return _run(command)
    return LOGGED


def again(directory: Path, owner_id: int, port: int) -> str:
    """How this command reaches a server in `directory`, which belongs to user `owner_id`."""
    name = user_name(owner_id) if not user_name(owner_id).startswith("id ") else f"\\#{owner_id}"
    variable, arguments = f"LMCACHE_RUNTIME_DIR={shlex.quote(str(directory))}", shlex.join(_asked(port))
    if os.getuid() in (0, owner_id):
        return _run(f"{variable} lmcache {arguments}")
    # Another user may have another PATH. Without -I, Python would run what lies in the current directory.
    command = f"{variable} {shlex.quote(sys.executable)} -I -m lmcache_server {arguments}"
    return _run(f"sudo -u {name} env {command}") if shutil.which("sudo") else f"as root, {_run(command)}"


def _run(command: str) -> str:
    quote = '"' if "'" in command else "'"
    return f"run {quote}{command}{quote}"


def _asked(port: int) -> list[str]:
    """The words of this command, with `port` as its only address. Whoever asked may have meant another
    server, so nothing is suggested that changes this one."""
    kept = re.sub("\0--(port|host|key-file)[=\0][^\0]*", "", "\0".join(sys.argv[1:])).split("\0")
    words = kept if kept[0] in READING else ["status"]
    return words + (["--port", str(port)] if port != DEFAULT_PORT else [])


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
