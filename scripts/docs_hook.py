"""What `make docs` changes in the pages: links out of docs/ are for readers of the repository."""

import re
from typing import Any

_OUT_OF_DOCS = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with each link to a file beside docs/ replaced by its text: the site has no such file."""
    return _OUT_OF_DOCS.sub(r"\1", markdown)
