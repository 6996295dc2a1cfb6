"""What `lmcache doctor` says of tiers: server/test_doctor_command.py has the rest."""

import os
import threading
from pathlib import Path

import pytest
from harness.waiting import PATIENCE_S

from lmcache_server.host.preflight import FAIL, OK, Check
from lmcache_server.options.tiers import doctor


def test_a_directory_that_hangs_does_not_keep_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the room of a mounted file system whose server is gone."""
    released, room_of = threading.Event(), os.statvfs
    monkeypatch.setattr(doctor, "WAIT_S", 0.2)
    monkeypatch.setattr(doctor, "_tried", lambda name, _url: Check(name, OK, ""))
    monkeypatch.setattr(os, "statvfs", lambda path: released.wait(PATIENCE_S) and room_of(path))
    try:
        _, room = doctor.checks({"tier": [f"dir://{tmp_path}?size_gb=1"]}, {})
    finally:
        released.set()
    assert (room.name, room.verdict) == ("tier 1, room", FAIL)
    assert "gave no answer" in room.finding
