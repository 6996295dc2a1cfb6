"""Edits the pages for `make docs`: links to files outside docs/ work only in the repository."""

import re
from typing import Any

_OUT_OF_DOCS = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page, with every link to a file outside docs/ replaced by its text."""
    return _OUT_OF_DOCS.sub(r"\1", markdown)
