"""Imports what an engine needs, once, and forks an engine for everyone who asks.

`import vllm` takes longer than all else that a tiny engine does. Started with the path of a Unix socket to
listen at. A request is the arguments of engine_process.py and the environment, as JSON, with the three
standard streams of the engine to be; the answer, when it has ended, its exit code.
"""

import array
import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

MAX_BYTES = 1 << 20


def forked(request: dict, streams: list[int]) -> None:
    """In the new process: becomes the engine."""
    os.setpgid(0, request["group"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1 << 12)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.argv = ["engine_process.py", request["arguments"]]
    import engine_process

    code = 1
    try:
        code = engine_process.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # As the end of an interpreter would, but for the modules of the process that this one came from.
        import atexit
        import threading

        threading._shutdown()
        atexit._run_exitfuncs()
        os._exit(code)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        import engine_process  # noqa: F401
        from vllm import LLM, SamplingParams  # noqa: F401

        import lmcache_client.connector.connector  # noqa: F401

        gc.collect()
        gc.freeze()
        serve(listener)


def serve(listener: socket.socket) -> None:
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([listener, *running], [], [])[0]:
            if ready is listener:
                client, _ = listener.accept()
                message, streams, _, _ = socket.recv_fds(client, MAX_BYTES, 3)
                if (pid := os.fork()) == 0:
                    listener.close()
                    forked(json.loads(message), streams)
                for stream in streams:
                    os.close(stream)
                running[os.pidfd_open(pid)] = pid, client
                continue
            pid, client = running.pop(ready)
            os.close(ready)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):
                client.send(array.array("i", [code]).tobytes())
            client.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
