"""Imports once what an engine or a server needs, and forks one for everyone who asks.

Imports take longer than all else that a tiny engine or a server does. Started with `engine`, `lmcache` or
`python`, and the path of a Unix socket to listen at. A request is the arguments, the environment and the
directory, as JSON, with the three standard streams of the process to be. The answers are its process ID and,
when it has ended, its exit code as `os.waitstatus_to_exitcode` gives it, with the milliseconds of CPU time
that it took.
"""

import array
import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import pickle
import runpy
import select
import signal
import socket
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1
# What each engine imports by itself after `from vllm import LLM`. Versions of vLLM differ in these names.
OF_AN_ENGINE = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.renderers.hf",
    "vllm.lora.layers",
    "vllm.v1.metrics.loggers",
    *(
        f"vllm.model_executor.models.{model}"
        for model in (
            *("llama", "gemma3", "gemma4", "gpt_oss", "llama4", "qwen3_next", "falcon_h1", "deepseek_v2"),
            *("nemotron_h", "granitemoehybrid", "zamba2", "mamba2", "lfm2", "lfm2_moe"),
        )
    ),
)


def import_for_engines() -> Callable[[Sequence[str]], int]:
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    from vllm import LLM, SamplingParams  # noqa: F401

    import lmcache_client.connector.connector  # noqa: F401
    from harness import changed_vllm, engine_process, models

    for name in OF_AN_ENGINE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # vLLM looks through all attributes of all modules for kernels that its CPU build replaces. That has been
    # done now; what is imported later gets the replacement.
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if hasattr(current_platform, "register_triton_kernel_overrides"):
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
    registry._run_in_subprocess = _in_a_fork
    # On a CPU, vLLM starts its other processes afresh; on a GPU, it forks them.
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _method=None: fork  # type: ignore[assignment]
    # An engine that ends would look through all that was imported here for garbage, for longer than it ran.
    gc.unfreeze = lambda: None
    # A pool of threads would not be there in the fork, and OpenMP waits for its own forever.
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads before a fork"

    def run(arguments: Sequence[str]) -> int:
        """Of a model to make, its name and directory; of an engine, its settings; of a program for a changed
        vLLM, `-c`, the change and its text; of another program of vLLM, its module and flags."""
        if arguments[0] == "-c":
            changed_vllm.change("\n".join(arguments[1:]))
            return 0
        if len(arguments) == 2:
            models.make(arguments[0], Path(arguments[1]))
            return 0
        if len(arguments) > 2:
            sys.argv = list(arguments)
            runpy.run_module(arguments[0], run_name="__main__")
            return 0
        sys.argv = ["engine_process.py", *arguments]
        return engine_process.main()

    return run


def _in_a_fork(make: Callable[[], Any]) -> Any:
    """vLLM looks at a model's class in a fresh interpreter, to keep its own clean. A fork is as clean."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            with os.fdopen(writing, "wb") as out:
                out.write(pickle.dumps(make()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        value = answer.read()
    os.waitpid(pid, 0)
    return pickle.loads(value)


def import_for_servers() -> Callable[[Sequence[str]], int]:
    import lmcache_server.app  # noqa: F401
    from lmcache_server.commands.cli import main

    def run(arguments: Sequence[str]) -> int:
        sys.argv = ["lmcache", *arguments]
        main()
        return 0

    return run


def import_for_workers() -> Callable[[Sequence[str]], int]:
    """Of pytest-xdist. Most files of tests import vLLM, and each worker reads them all."""
    from vllm import LLM, SamplingParams  # noqa: F401

    import lmcache_client.connector.connector  # noqa: F401

    def run(arguments: Sequence[str]) -> int:
        """An interpreter with a program's text, or a fork server, which imports what it needs afresh."""
        if arguments[0] == "-c":
            main_module = sys.modules["__main__"] = types.ModuleType("__main__")
            sys.argv = ["-c"]
            exec(arguments[1], vars(main_module))
        else:
            os.execv(sys.executable, [sys.executable, __file__, *arguments])
        return 0

    return run


def forked(run: Callable[[Sequence[str]], int], request: dict[str, Any], streams: list[int]) -> None:
    """In the new process: becomes what was asked for."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1 << 12)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    code = 1
    try:
        code = run(request["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # As the end of an interpreter would, but for the modules of the process that this one came from.
        import atexit
        import threading

        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        os._exit(code)


def serve(listener: socket.socket, run: Callable[[Sequence[str]], int]) -> None:
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([listener, *running], [], [])[0]:
            if ready is listener:
                client, _ = listener.accept()
                message, streams, _, _ = socket.recv_fds(client, MAX_BYTES, 3)
                if (pid := os.fork()) == 0:
                    listener.close()
                    forked(run, json.loads(message), streams)
                for stream in streams:
                    os.close(stream)
                with contextlib.suppress(OSError):
                    client.send(array.array("i", [pid]).tobytes())
                running[os.pidfd_open(pid)] = pid, client
                continue
            pid, client = running.pop(ready)
            os.close(ready)
            _, status, usage = os.wait4(pid, 0)
            cpu_ms = int(1000 * (usage.ru_utime + usage.ru_stime))
            with contextlib.suppress(OSError):
                client.send(array.array("i", [os.waitstatus_to_exitcode(status), cpu_ms]).tobytes())
            client.close()


KINDS = {"engine": import_for_engines, "lmcache": import_for_servers, "python": import_for_workers}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # This file's directory has modules with names of others.
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    kind, path = sys.argv[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # Who sees the path can connect.
        listener.bind(f"{path}.new")
        listener.listen()
        os.rename(f"{path}.new", path)
        run = KINDS[kind]()
        gc.collect()
        gc.freeze()
        serve(listener, run)


if __name__ == "__main__":
    main()
