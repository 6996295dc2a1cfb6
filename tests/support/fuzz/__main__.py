"""`python -m fuzz decoder|router SECONDS`, in tests/support: fuzz for so long, guided by coverage (atheris).

Prints how many frames went through; ends with an error and leaves the input behind when something breaks.
"""

import contextlib
import logging
import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["lmcache_client.contract", "lmcache_server"]):
    from fuzz.targets import RouterTarget, check_decoder, decoder_seeds, owner, router_seeds

EVERY_S = 10.0


class Progress:
    def __init__(self, what: str) -> None:
        self.what = what
        self.started_s = self.told_s = time.monotonic()

    def tell(self, frames: int, detail: str = "") -> None:
        now_s = time.monotonic()
        if now_s - self.told_s >= EVERY_S:
            self.told_s = now_s
            rss = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]
            rate = frames / (now_s - self.started_s)
            print(
                f"{self.what}: {frames} frames, {rate:.0f}/s, RSS {int(rss) >> 10} MiB {detail}", flush=True
            )


def main() -> None:
    what, seconds = sys.argv[1], sys.argv[2]
    logging.disable(logging.WARNING)
    seeds = decoder_seeds() if what == "decoder" else router_seeds()
    corpus = Path(tempfile.mkdtemp(prefix="lmcache-fuzz-"))
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)
    progress, count = Progress(what), 0
    with contextlib.ExitStack() as stack:
        target = RouterTarget(*stack.enter_context(owner())) if what == "router" else None

        def one(data: bytes) -> None:
            nonlocal count
            if target is None:
                check_decoder(data)
                count += 1
                progress.tell(count)
            else:
                target.run(data)
                progress.tell(target.frames, str(dict(target.replies.most_common())))

        limits = (f"-max_total_time={seconds}", "-max_len=1024", "-rss_limit_mb=2048")
        atheris.Setup([sys.argv[0], *limits, str(corpus)], one)
        atheris.Fuzz()


main()
