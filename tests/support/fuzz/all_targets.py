"""Everything that is fuzzed, by name: the inputs to start from, and what takes them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Protocol

from fuzz.l1_files import FilesTarget, file_seeds
from fuzz.options import OptionsTarget, option_seeds
from fuzz.pages import PagesTarget, page_seeds
from fuzz.replies import RepliesTarget, reply_seeds
from fuzz.targets import DecoderTarget, RouterTarget, decoder_seeds, owner, router_seeds


class Target(Protocol):
    """`run` raises when something breaks; `inputs` counts what went in."""

    inputs: int

    def run(self, data: bytes) -> None: ...
    def detail(self) -> str: ...
    def close(self) -> None: ...


@contextmanager
def _router() -> Iterator[RouterTarget]:
    with owner() as (pid, address), closing(RouterTarget(pid, address)) as target:
        yield target


Seeds = Callable[[], Sequence[bytes]]
TARGETS: dict[str, tuple[Seeds, Callable[[], AbstractContextManager[Target]]]] = {
    "decoder": (decoder_seeds, lambda: closing(DecoderTarget())),
    "router": (router_seeds, _router),
    "pages": (page_seeds, lambda: closing(PagesTarget())),
    "files": (file_seeds, lambda: closing(FilesTarget())),
    "options": (option_seeds, lambda: closing(OptionsTarget())),
    "replies": (reply_seeds, lambda: closing(RepliesTarget())),
}
