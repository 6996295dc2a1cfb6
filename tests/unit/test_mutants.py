"""The faults of `make mutants` can still be made, and the tests that are to find them exist."""

import sys

from harness.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import mutants


def test_each_fault_can_be_made() -> None:
    for mutant in mutants.table().values():
        before = (ROOT / mutant.file).read_text()
        assert mutants.changed(before, mutant) != before
        assert all((ROOT / test).is_file() for test in mutant.tests), mutant.tests
