"""Where else on this machine a server is, for whoever asked at the wrong place or as the wrong user."""

import errno
import http.client
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmcache_client.contract.endpoint import user_name
from lmcache_client.contract.messages import DEFAULT_PORT
from lmcache_server.config import FLAGS

SYSTEM_DIRECTORY = Path("/run/lmcache")
USERS_DIRECTORIES = Path("/tmp"), "lmcache-mp-"
HTTP_TIMEOUT_S = 0.5


def instead() -> str:
    """What to type instead, if a server is at a usual place; empty if none is found."""
    for directory in _directories():
        owner_id = directory.stat().st_uid
        try:
            found = sorted(directory / name for name in os.listdir(directory) if name.endswith(".sock"))
        except PermissionError:
            return f"one may be in {directory}: run '{again(directory, owner_id)}'"
        if ports := [int(path.stem) for path in found if _listens(path)]:
            return f"one is in {directory}: run '{again(directory, owner_id, ports[0])}'"
    port = FLAGS["http_port"].default
    return f"one is shown at http://127.0.0.1:{port}" if _is_page(port) else ""


def again(directory: Path, owner_id: int, port: int = DEFAULT_PORT) -> str:
    """This command, as it reaches a server in `directory`, which belongs to user `owner_id`."""
    name = user_name(owner_id) if not user_name(owner_id).startswith("id ") else f"\\#{owner_id}"
    sudo = f"sudo -u {name} env " if os.getuid() not in (0, owner_id) else ""
    words = [*_without_address(sys.argv[1:]), *(("--port", str(port)) if port != DEFAULT_PORT else ())]
    return f"{sudo}LMCACHE_RUNTIME_DIR={shlex.quote(str(directory))} lmcache {shlex.join(words)}"


def _directories() -> Iterator[Path]:
    parent, prefix = USERS_DIRECTORIES
    asked = os.environ.get("LMCACHE_RUNTIME_DIR")
    # Anyone may make others there. What is printed here may be run by root.
    users = (path for path in parent.glob(f"{prefix}*") if path.name == f"{prefix}{path.lstat().st_uid}")
    for path in (SYSTEM_DIRECTORY, *sorted(users)):
        if path.is_dir() and not path.is_symlink() and str(path) != asked:
            yield path


def _listens(path: Path) -> bool:
    if not re.fullmatch("[0-9]{1,5}", path.stem):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN)  # or its queue is full


def _is_page(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HTTP_TIMEOUT_S)
    try:
        connection.request("HEAD", "/healthz")
        return connection.getresponse().getheader("Server") == "lmcache"
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _without_address(words: Sequence[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        if word in ("--port", "--host"):
            next(rest, None)
        elif not word.startswith(("--port=", "--host=")):
            yield word
