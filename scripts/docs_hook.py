"""Edits the pages for `make docs`, and names the version at the bottom of each page.

Links to files outside docs/ work only in the repository. A quotation that begins in bold is a warning there,
which the site can show as one.
"""

import re
from typing import Any

from lmcache_client.contract.version import VERSION

_OUT_OF_DOCS = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
_WARNING = re.compile(r"^> \*\*(.+?)\*\* *((?:.*\n)(?:^>.*\n)*)", re.MULTILINE)


def on_config(config: Any) -> Any:
    """The configuration, with the version that `lmcache --version` prints."""
    config.copyright = f"lmcache-mp {VERSION}"
    return config


def _warning(quotation: re.Match[str]) -> str:
    title, text = quotation.groups()
    lines = (line.removeprefix(">").strip() for line in text.splitlines())
    return "\n".join([f'!!! warning "{title}"', *(f"    {line}" for line in lines), ""])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page, with every link to a file outside docs/ replaced by its text, and with warnings."""
    return _WARNING.sub(_warning, _OUT_OF_DOCS.sub(r"\1", markdown))
