"""Available memory: the machine's, or what the tightest cgroup above this process leaves. Whose memory
the server may open."""

import os
import subprocess

import pytest

from lmcache_server.host.machine import available_bytes, is_descendant, local_processors, memory_info
from lmcache_server.service import memory_owner
from lmcache_server.service.memory_owner import closed_to

MIB = 1 << 20


def write(directory, **files):
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_without_cgroups_it_is_what_the_machine_has(tmp_path):
    available, reason = available_bytes(tmp_path)
    assert 0 < available <= memory_info()["MemTotal"]
    assert reason == "MemAvailable of this machine"


@pytest.mark.parametrize("where", ["service", "service/worker"])
def test_cgroup_v2_counts_at_every_level_and_page_cache_is_free(tmp_path, where):
    write(tmp_path / "proc/self", cgroup="0::/service/worker\n")
    for level in ("service", "service/worker"):
        write(
            tmp_path / "sys/fs/cgroup" / level,
            memory__max=f"{8 * MIB}\n" if level == where else "max\n",
            memory__current=f"{5 * MIB}\n",
            memory__stat=f"anon 0\ninactive_file {2 * MIB}\nactive_file {MIB}\n",
        )
    available, reason = available_bytes(tmp_path)
    assert available == 6 * MIB
    assert reason == f"the memory limit of its cgroup, {tmp_path / 'sys/fs/cgroup' / where}"


@pytest.mark.parametrize(
    ("path", "limit", "available"),
    [
        # There the path in /proc/self/cgroup is that of the host, and the mount is the container's own.
        ("/docker/abc", 8 * MIB, 0),
        # No limit is no limit.
        ("/", 9223372036854771712, None),
    ],
)
def test_cgroup_v1_in_a_container(tmp_path, path, limit, available):
    write(tmp_path / "proc/self", cgroup=f"5:memory:{path}\n3:cpu:/docker/abc\n")
    write(
        tmp_path / "sys/fs/cgroup/memory",
        memory__limit_in_bytes=f"{limit}",
        memory__usage_in_bytes=f"{9 * MIB}",
        memory__stat="total_inactive_file 0\n",
    )
    found, reason = available_bytes(tmp_path)
    assert (reason == "MemAvailable of this machine") == (available is None)
    assert available in (None, found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5\n", {5}), ("\n", set()), (None, set())],
)
def test_processors_near_a_device(tmp_path, text, expected):
    if text is not None:
        write(tmp_path / "sys/bus/pci/devices/0000:1a:00.0", local_cpulist=text)
    assert local_processors("0000:1A:00.0", tmp_path) == expected


def test_a_process_descends_from_itself_and_from_what_started_it():
    with subprocess.Popen(["sleep", "60"]) as child:
        assert is_descendant(child.pid, child.pid)
        assert is_descendant(child.pid, os.getpid())
        assert not is_descendant(os.getpid(), child.pid)
        child.kill()
    for pid in (0, 2, child.pid):
        assert not is_descendant(pid, 0), "a process that is not visible has started nothing"


def test_what_differs_is_named(monkeypatch):
    assert closed_to(None) == (
        "both need the same user and, in containers, a shared process namespace (--pid=host)"
    )
    assert "in a process namespace that the server does not see: share it (docker: --pid=host" in closed_to(0)
    with subprocess.Popen(["sleep", "1000"]) as client:
        try:
            assert closed_to(client.pid).startswith("user and process namespace are the same")
            monkeypatch.setattr(memory_owner, "process_namespace", str)
            assert "in another process namespace than the server: share it" in closed_to(client.pid)
            user = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)
            assert closed_to(client.pid) == (
                f"vLLM runs as user {user}, the server as user {user + 1}: run both as one user"
            )
        finally:
            client.kill()
    assert closed_to(client.pid) == "its process has ended"
