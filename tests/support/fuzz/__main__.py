"""`python -m fuzz TARGET SECONDS`, in tests/support: fuzz for so long, guided by coverage (atheris).

Prints how many inputs went through; ends with an error and leaves the input behind when something breaks.
"""

import contextlib
import logging
import resource
import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["lmcache_client", "lmcache_server"]):
    from fuzz.all_targets import TARGETS

EVERY_S = 10.0
GROWTH_MIB = 2048
"""More memory than this means that the target leaks."""


class Progress:
    def __init__(self, what: str) -> None:
        self.what = what
        self.started_s = self.told_s = time.monotonic()

    def tell(self, inputs: int, detail: str = "") -> None:
        now_s = time.monotonic()
        if now_s - self.told_s >= EVERY_S:
            self.told_s = now_s
            rss = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]
            rate = inputs / (now_s - self.started_s)
            print(
                f"{self.what}: {inputs} inputs, {rate:.0f}/s, RSS {int(rss) >> 10} MiB {detail}", flush=True
            )


def main() -> None:
    what, seconds = sys.argv[1], sys.argv[2]
    logging.disable(logging.CRITICAL)
    seeds, make = TARGETS[what]
    corpus = Path(tempfile.mkdtemp(prefix="lmcache-fuzz-"))
    for number, seed in enumerate(seeds()):
        (corpus / str(number)).write_bytes(seed)
    progress = Progress(what)
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(make())

        def one(data: bytes) -> None:
            target.run(data)
            progress.tell(target.inputs, target.detail())

        # A program that is executed inherits the peak of the process that forked for it.
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        limits = (f"-max_total_time={seconds}", "-max_len=1024", f"-rss_limit_mb={peak_mib + GROWTH_MIB}")
        atheris.Setup([sys.argv[0], *limits, str(corpus)], one)
        atheris.Fuzz()


main()
