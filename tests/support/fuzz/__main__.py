"""`python -m fuzz TARGET SECONDS`, in tests/support: fuzz for so long, guided by coverage (atheris).

Ends with an error and leaves the input behind when something breaks.
"""

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


def main() -> None:
    what, seconds = sys.argv[1], sys.argv[2]
    logging.disable(logging.CRITICAL)
    corpus = Path(tempfile.mkdtemp(prefix="lmcache-fuzz-"))
    with TARGETS[what]() as target:
        for number, seed in enumerate(target.seeds):
            (corpus / str(number)).write_bytes(seed)
        told_s = time.monotonic()

        def one(data: bytes) -> None:
            nonlocal told_s
            target.run(data)
            if time.monotonic() - told_s >= EVERY_S:
                told_s = time.monotonic()
                print(f"{what}: {target.inputs} inputs: {dict(target.outcomes.most_common())}", flush=True)

        # A program that is executed inherits the peak of the process that forked for it.
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        limits = (f"-max_total_time={seconds}", "-max_len=1024", f"-rss_limit_mb={peak_mib + GROWTH_MIB}")
        atheris.Setup([sys.argv[0], *limits, str(corpus)], one)
        atheris.Fuzz()


main()
