"""The tests' own tools: engines say why they fail, and never outlive the tests."""

import os
import signal
import subprocess
import sys
import textwrap

from harness.engine import Engine
from harness.paths import SUPPORT
from harness.processes import group_members
from harness.prompts import prompt
from harness.waiting import wait_until


def test_engine_in_three_processes_and_its_end() -> None:
    tokens = prompt(300)
    with Engine("llama", multiprocessing=True) as engine:
        group = engine.pid
        assert len(group_members(group)) >= 2
        assert engine.run(tokens).output == engine.run(tokens).output
        assert engine.corrupt_kv() == 64 << 20
        engine.kill()
    assert group_members(group) == []


def test_engine_dies_with_the_tests_and_a_cold_one_computes_what_a_forked_one_does() -> None:
    script = """
        import time
        from harness.engine import Engine
        from harness.prompts import prompt
        with Engine("gemma3", cold=True) as engine:
            print(engine.pid, engine.run(prompt(300)).output, flush=True)
            time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(SUPPORT), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        cold, output = parent.stdout.readline().strip().split(" ", 1)
    group = int(cold)
    with Engine("gemma3") as forked:
        assert str(forked.run(prompt(300)).output) == output
        assert group_members(forked.pid) != group_members(group) != []
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not group_members(group), what="the engine has ended with the tests that started it")
