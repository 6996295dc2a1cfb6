"""What the pages tell people to type is typed here, and what they say comes of it comes of it."""

import runpy
from contextlib import nullcontext
from pathlib import Path

import pytest
from harness import pages
from harness.pages import Block
from harness.paths import MODELS, ROOT
from harness.processes import new_log
from harness.reader import Reader, differences

PAGES = [page for page in pages.pages() if any(block.is_executed for block in pages.blocks(page))]


@pytest.fixture(scope="module")
def demo_model() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "demo_model.py"))
    if script["model_directory"](MODELS) is None:
        script["convert_into"](MODELS, new_log("demo-model"))


@pytest.mark.timeout(1200)  # of vLLM, on a machine that does much else
@pytest.mark.usefixtures("demo_model")
@pytest.mark.parametrize("page", PAGES, ids=map(pages.name, PAGES))
def test_what_a_page_says_is_what_happens(page: Path) -> None:
    blocks = pages.blocks(page)
    with Reader(blocks) as reader:
        shown = None
        for block in blocks:
            if block.is_shell:
                shown = reader.follow(block) if block.is_executed else None
            elif block.language == "text" and shown is not None:
                assert not differences(block.text, shown), f"{block.where}: on the screen is\n{shown}"


def test_pages_for_readers_have_commands() -> None:
    assert {"README.md", "docs/laptop.md", "docs/operations.md"} <= {pages.name(page) for page in PAGES}


@pytest.mark.parametrize("activates", [True, False])
def test_a_page_activates_the_environment_in_each_terminal(activates: bool) -> None:
    activation = ". .venv/bin/activate\n" if activates else ""
    first = Block("page:1", "sh", "", "", ". .venv/bin/activate\nlmcache --version", True)
    second = Block("page:2", "sh", "", "", f"{activation}lmcache --version", True)
    with Reader([first, second]) as reader:
        assert "lmcache" in (reader.follow(first) or "")
        with nullcontext() if activates else pytest.raises(AssertionError, match="exit code 127"):
            reader.follow(second)


def test_a_page_says_where_a_terminal_is_opened() -> None:
    blocks = [block for block in pages.blocks(ROOT / "docs" / "laptop.md") if block.is_executed]
    assert sum(block.opens_terminal for block in blocks) == 4
