"""Network namespaces that stand for hosts, with a namespace between them that routes, as a switch would."""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")
PREFIX = "lmcache-fleet-"
NEEDS = (
    "needs a Linux machine where this user may make network namespaces (root), and the programs ip (iproute2)"
    " and nsenter (util-linux)"
)

_libc = ctypes.CDLL(None, use_errno=True)


class NetworkError(Exception):
    """This machine has no namespaces for us; the message says what is missing."""


def ip(*words: str, host: str = "") -> None:
    """Runs `ip`, in the namespace of `host` if there is one. Raises NetworkError."""
    place = ("-n", PREFIX + host) if host else ()
    done = subprocess.run(["ip", *place, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{NEEDS}; ip {' '.join((*place, *words))}: {done.stderr.strip()}")


def inside(host: str, command: Sequence[str]) -> list[str]:
    """The command that runs `command` on a host."""
    return [str(shutil.which("nsenter")), f"--net={NAMESPACES / (PREFIX + host)}", "--", *command]


def address(number: int) -> str:
    """The address of host number 0, 1, ..."""
    return f"10.77.{number + 1}.2"


def gateway(number: int) -> str:
    """The router's address, as this host sees it."""
    return f"10.77.{number + 1}.1"


def link(number: int, state: str) -> None:
    """Plugs a host's cable in (up) or out (down), at the router's end."""
    ip("link", "set", f"fleet{number}", state, host="router")
    if state == "up":
        ip("addr", "replace", f"{gateway(number)}/24", "dev", f"fleet{number}", host="router")


def enter(host: str) -> None:
    """Moves this thread's future sockets, and its future child processes, to a host."""
    with (NAMESPACES / (PREFIX + host)).open("rb") as namespace:
        if _libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise NetworkError(f"{NEEDS}; setns: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def network(hosts: Sequence[str]) -> Iterator[None]:
    """One namespace a host, and `router` between them. Raises NetworkError. All are gone at the end, with
    what they connected."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("nsenter") is None:
        raise NetworkError(NEEDS)
    remove([*hosts, "router"])
    try:
        ip("netns", "add", PREFIX + "router")
        ip("link", "set", "lo", "up", host="router")
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        subprocess.run(inside("router", ["sh", "-c", forward]), check=True)
        for number, host in enumerate(hosts):
            ip("netns", "add", PREFIX + host)
            ip("link", "set", "lo", "up", host=host)
            ends = ("type", "veth", "peer", "name", "eth0", "netns", PREFIX + host)
            ip("link", "add", f"fleet{number}", *ends, host="router")
            ip("addr", "add", f"{address(number)}/24", "dev", "eth0", host=host)
            ip("link", "set", "eth0", "up", host=host)
            link(number, "up")
            ip("route", "add", "default", "via", gateway(number), host=host)
        yield
    finally:
        remove([*hosts, "router"])


def remove(hosts: Sequence[str]) -> None:
    for host in hosts:
        with contextlib.suppress(NetworkError):
            ip("netns", "delete", PREFIX + host)
