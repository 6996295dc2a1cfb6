"""The site: built with warnings as errors, and complete without any other host."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.paths import ROOT

from lmcache_client.contract.version import VERSION

ASSET = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?([^\"'\s>]+)")


def build(root: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    result = build(ROOT, directory)
    assert result.returncode == 0, result.stderr
    return directory


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    html = sorted(site.rglob("*.html"))
    assets = {asset for page in html for asset in ASSET.findall(page.read_text())}
    assert len(html) >= 15
    assert any(asset.endswith(".css") for asset in assets)
    assert any(asset.endswith(".js") for asset in assets)
    assert not [asset for asset in assets if "//" in asset]
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text()), style


def test_every_page_can_be_found(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f'"location":"{page.stem}/"' in index.replace(": ", ":") or page.stem == "index"


def test_a_warning_looks_like_one_and_the_version_is_named(site: Path) -> None:
    for page in (site / "index.html", site / "gpu-node" / "index.html"):
        text = page.read_text()
        warning = re.findall(r'<div class="admonition warning">.*?</div>', text, re.DOTALL)
        assert len(warning) == 1, page
        assert "This release has run on a GPU for 15 minutes only" in warning[0]
        assert "</a>" in warning[0], "the text below the title, with its links"
        assert "<blockquote>" not in text
        assert f"lmcache-mp {VERSION}" in text


def test_mistakes_end_the_build(tmp_path: Path) -> None:
    for name in ("docs", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write(
            "\n[page](no-page.md) [heading](failures.md#no-heading) ![picture](images/no-picture.png)\n"
        )
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode != 0
    assert all(name in result.stderr for name in ("no-page", "no-heading", "no-picture"))
