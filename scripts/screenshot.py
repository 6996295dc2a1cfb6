"""Takes pictures of the status page for the documents: a real server after some minutes of work, in Chromium.

`python scripts/screenshot.py [SECONDS]` writes docs/images/status-page-{light,dark,phone}.png.
"""

import random
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from harness.browser import chromium  # noqa: E402
from harness.rawclient import RawEngine, chain, group  # noqa: E402
from harness.server import LMCacheServer  # noqa: E402
from PIL import Image  # noqa: E402

from lmcache_client.server_channel import ChannelError  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SECONDS = 265
MODELS = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (group("recurrent", 544, 0, 36), group("full", 544, 0, 12)),
    "google/gemma-3-27b-it": (group("sliding_window", 16, 1024, 52), group("full", 16, 0, 10)),
    "meta-llama/Llama-3.1-8B-Instruct": (group("full", 16, 0, 32),),
}
SHOTS = {"light": ("light", 1120, 0), "dark": ("dark", 1120, 0), "phone": ("dark", 390, 1260)}
"""Colour scheme, width and height; height 0 takes the whole page."""


class Talk:
    """A conversation that grows by one chunk per turn, after a system prompt that all talks share."""

    def __init__(self, number: int, engine: RawEngine) -> None:
        self.engine = engine
        self.seed = number
        self.chunks = random.randint(2, 5)

    def turn(self) -> None:
        engine, size = self.engine, self.engine.chunk_size
        shared = range(size)
        tokens = [*shared, *range(1000 * self.seed, 1000 * self.seed + (self.chunks - 1) * size)]
        keys = chain(tokens, size)
        blocks = len(tokens) // min(group.block_size for group in engine.groups)
        tables = [
            [1 + (at + 7 * self.seed) % (engine.num_blocks - 1) for at in range(blocks)]
            for _ in engine.groups
        ]
        hit = engine.lookup(keys)
        if hit.resume_tokens:
            if random.random() < 0.004:
                engine.end(hit)  # so that the load comes too late and fails
            with suppress(ChannelError):
                engine.load(hit, keys, tables)
        engine.store_prompt(keys, tables)
        engine.end(hit, keys)
        self.chunks += 1


def work(engines: list[RawEngine], seconds: float) -> None:
    talks: list[Talk] = []
    started_s = time.monotonic()
    number = 0
    while (at := time.monotonic() - started_s) < seconds:
        share = at / seconds
        # The load peaks in the middle; later, fewer talks are new.
        load = 0.25 + 0.75 * max(0.0, 1 - abs(2.2 * share - 1.1)) + 0.1 * random.random()
        if len(talks) < 4 or random.random() < 0.5 - 0.35 * share:
            number += 1
            talks.append(Talk(number, random.choice(engines)))
        random.choice(talks[-14:]).turn()
        time.sleep(0.12 / load * random.random())


def shoot(url: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    with chromium() as browser:
        for name, (scheme, width, height) in SHOTS.items():
            page = browser.new_page(
                color_scheme=scheme, viewport={"width": width, "height": height or 800}, device_scale_factor=2
            )
            page.goto(url)
            page.wait_for_selector("#hit_plot svg")
            path = IMAGES / f"status-page-{name}.png"
            page.screenshot(path=path, full_page=not height)
            with Image.open(path) as image:
                image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    random.seed(7)
    with ExitStack() as stack:
        server = stack.enter_context(LMCacheServer(l1_size_gb=1.0, checksums=False))
        engines = []
        for number, (model, groups) in enumerate(MODELS.items()):
            for replica in range(2 if number == 2 else 1):
                name = f"{model.split('/')[1].split('-')[0].lower()}-{replica}"
                engine = RawEngine(server.address, groups, 512, name, model).start()
                stack.callback(engine.close)
                engines.append(engine)
        worker = threading.Thread(target=work, args=(engines, seconds + 40))
        worker.start()
        time.sleep(seconds)
        shoot(f"http://127.0.0.1:{server.http_port}/")
        worker.join()


if __name__ == "__main__":
    main()
