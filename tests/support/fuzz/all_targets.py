"""Everything that is fuzzed, by name."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

from fuzz.choices import Target
from fuzz.options import OptionsTarget
from fuzz.pages import PagesTarget
from fuzz.replies import RepliesTarget
from fuzz.targets import DecoderTarget, RouterTarget, owner


@contextmanager
def _router() -> Iterator[RouterTarget]:
    with owner() as (pid, address), closing(RouterTarget(pid, address)) as target:
        yield target


def _files() -> AbstractContextManager[Target]:
    from fuzz.l1_files import FilesTarget

    return closing(FilesTarget())


def _records() -> AbstractContextManager[Target]:
    from fuzz.records import RecordsTarget

    return closing(RecordsTarget())


TARGETS: dict[str, Callable[[], AbstractContextManager[Target]]] = {
    "decoder": lambda: closing(DecoderTarget()),
    "router": _router,
    "pages": lambda: closing(PagesTarget()),
    "files": _files,
    "options": lambda: closing(OptionsTarget()),
    "replies": lambda: closing(RepliesTarget()),
    "records": _records,
}
