"""What the pages tell people to type is typed here, and what they say comes of it comes of it."""

import runpy
from pathlib import Path

import pytest
from harness import pages
from harness.paths import MODELS, ROOT
from harness.processes import new_log
from harness.reader import Reader, differences

PAGES = [page for page in pages.pages() if any(block.is_executed for block in pages.blocks(page))]


@pytest.fixture(scope="module")
def demo_model() -> None:
    """The model that `make demo` leaves behind; made once, in about a minute."""
    script = runpy.run_path(str(ROOT / "scripts" / "demo_model.py"))
    if script["model_directory"](MODELS) is None:
        script["convert_into"](MODELS, new_log("demo-model"))


@pytest.mark.timeout(1200)  # of vLLM, on a machine that does much else
@pytest.mark.usefixtures("demo_model")
@pytest.mark.parametrize("page", PAGES, ids=map(pages.name, PAGES))
def test_what_a_page_says_is_what_happens(page: Path) -> None:
    with Reader() as reader:
        shown = None
        for block in pages.blocks(page):
            if block.is_shell:
                shown = reader.follow(block) if block.is_executed else None
            elif block.language == "text" and shown is not None:
                assert not differences(block.text, shown), f"{block.where}: on the screen is\n{shown}"


def test_pages_for_readers_have_commands() -> None:
    assert {"README.md", "docs/laptop.md", "docs/operations.md"} <= {pages.name(page) for page in PAGES}
