"""The command `lmcache`, run here or in a process of its own."""

import os
import subprocess
import sys
import tempfile

import pytest

from harness.waiting import PATIENCE_S
from lmcache_server.commands import cli

LMCACHE = [sys.executable, "-m", "lmcache_server"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="lmc-") as directory:
        monkeypatch.setenv("LMCACHE_RUNTIME_DIR", directory)
        yield


def lmcache(*arguments):
    done = subprocess.run(
        [*LMCACHE, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


def sentence(capsys, code, *arguments):
    """The one line of stderr with which a command, run here, ends with exit code `code`."""
    returned, output, errors = in_process(capsys, *arguments)
    lines = [line for line in errors.splitlines() if " INFO " not in line]
    assert (returned, output, len(lines)) == (code, "", 1), errors
    assert lines[0].isprintable()
    return lines[0]


def in_process(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    output = capsys.readouterr()
    return ended.value.code or 0, output.out, output.err
