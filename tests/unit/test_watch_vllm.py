"""scripts/watch_vllm.py on two small trees in place of two versions of vLLM; its table on the real one."""

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

Report = Callable[..., tuple[int, list[str]]]
SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
OLD = '''
"""A module."""
class Pool:
    """Blocks."""
    size: int = 1
    """How many."""

    def touch(self, blocks):
        """Hold them."""
        return len(blocks)

    @property
    def free(self):
        return 0

async def answer():
    pass
'''


@pytest.fixture
def watch_vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("watch_vllm")


@pytest.fixture
def report(watch_vllm: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """Call it with the new code and the watched names of its file: the exit status, and the lines printed."""

    def run(new: str | None, *names: str) -> tuple[int, list[str]]:
        for version, text in (("old", OLD), ("new", new)):
            (tmp_path / version / "core").mkdir(parents=True, exist_ok=True)
            (tmp_path / version / "core" / "pool.py").unlink(missing_ok=True)
            if text is not None:
                (tmp_path / version / "core" / "pool.py").write_text(text)
        code = watch_vllm.report(tmp_path / "old", tmp_path / "new", {"core/pool.py": names})
        return code, [line for line in capsys.readouterr().out.splitlines() if line]

    return run


def test_docstrings_comments_and_style_are_no_changes(report: Report) -> None:
    new = OLD.replace('"""Hold them."""', "# Not for long.").replace('"""How many."""', '"""Of them."""')
    new = new.replace('"""A module."""', "").replace("len(blocks)", "len(\n            blocks\n        )")
    assert new != OLD
    assert report(new, "*", "Pool", "Pool.touch", "answer", "~blocks") == (
        0,
        ["5 same, 0 changed, 0 gone, 0 new"],
    )


def test_a_changed_body_is_shown_with_what_changed_in_it(report: Report) -> None:
    code, lines = report(OLD.replace("len(blocks)", "sum(blocks)"), "Pool.touch", "Pool.free", "answer")
    assert code == 1
    assert lines == [
        "changed: core/pool.py Pool.touch",
        "    @@ -1,2 +1,2 @@",
        "     def touch(self, blocks):",
        "    -    return len(blocks)",
        "    +    return sum(blocks)",
        "2 same, 1 changed, 0 gone, 0 new",
    ]


@pytest.mark.parametrize(
    ("name", "old_and_new", "changed"),
    [
        ("Pool", ("size: int = 1", "size: int = 2"), 1),
        ("Pool", ("@property", "@cached_property"), 1),
        ("Pool", ("def touch(self, blocks)", "def touch(self, blocks, hold=True)"), 1),
        # A setter is a part of its property.
        (
            "Pool.free",
            ("async def", "    @free.setter\n    def free(self, n):\n        pass\n\nasync def"),
            1,
        ),
        # Lines with a text are compared without those around them.
        ("~blocks", ("return 0", "return 1"), 0),
        ("~blocks", ("len(blocks)", "blocks.number"), 1),
    ],
)
def test_defaults_decorators_arguments_and_setters_count(report, name, old_and_new, changed):
    code, lines = report(OLD.replace(*old_and_new), name)
    assert code == changed
    assert lines[-1] == f"{1 - changed} same, {changed} changed, 0 gone, 0 new"
    assert lines[0] == f"changed: core/pool.py {name}" or not changed


def test_a_name_that_is_gone_and_one_that_is_new_are_shown(report: Report) -> None:
    code, lines = report(OLD.replace("def touch", "def hold"), "Pool.touch", "Pool.hold")
    assert code == 1
    assert lines[0] == "gone: core/pool.py Pool.touch"
    assert "    -    return len(blocks)" in lines
    assert "new: core/pool.py Pool.hold" in lines
    assert lines[-1] == "0 same, 0 changed, 1 gone, 1 new"


def test_with_a_file_all_its_names_are_gone_and_a_name_in_neither_version_is_an_error(report: Report) -> None:
    assert report(None, "*", "answer", "~blocks")[1][-1] == "0 same, 0 changed, 3 gone, 0 new"
    code, lines = report(OLD, "answer", "Pool.untouch", "touch")
    assert code == 2
    assert lines == [
        "in neither: core/pool.py Pool.untouch",
        "in neither: core/pool.py touch",
        "1 same, 0 changed, 0 gone, 0 new",
        "2 in neither version: correct WATCHED in scripts/watch_vllm.py",
    ]


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_every_watched_name_exists_in_the_vllm_that_is_installed(watch_vllm: ModuleType) -> None:
    vllm = watch_vllm.installed()
    assert watch_vllm.installed_version()
    for file, names in watch_vllm.WATCHED.items():
        module = watch_vllm.parsed(vllm / file)
        assert [name for name in names if not watch_vllm.code_of(module, name)] == [], file
