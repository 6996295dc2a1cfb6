"""What keeps the server from opening the memory of a client, as far as the kernel tells."""

import os
import subprocess

import pytest

from lmcache_server.service import memory_owner
from lmcache_server.service.memory_owner import closed_to


def test_what_differs_is_named(monkeypatch: pytest.MonkeyPatch):
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
