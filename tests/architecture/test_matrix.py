"""`make matrix`: its versions are the ends of what pyproject.toml admits, and no row is green unseen."""

from __future__ import annotations

import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from support import ROOT


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = spec_from_loader("matrix", SourceFileLoader("matrix", str(ROOT / ".ci" / "matrix")))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "matrix", module)
    spec.loader.exec_module(module)
    return module


def test_the_rows_run_the_ends_of_the_ranges(matrix: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {item.name: item.specifier for item in map(Requirement, project["dependencies"])}
    for words in (matrix.OLDEST, matrix.NEWEST):
        for name, version in (word.split("==") for word in words.split()):
            assert ranges[name].contains(version, prereleases=True), (name, version)
    lower = {
        f"{name}=={clause.version}" for name in ranges for clause in ranges[name] if clause.operator == ">="
    }
    for word in matrix.OLDEST.split():
        assert word in lower or word.removesuffix(".0") in lower
    pythons = SpecifierSet(project["requires-python"])
    tried = {row.python.removeprefix("python") for row in matrix.ROWS} - {"3"}
    assert tried == {version for version in (f"3.{minor}" for minor in range(30)) if version in pythons}


@pytest.mark.parametrize(
    ("lines", "exit_code", "expected"),
    [
        (["....", "12 passed in 3.20s"], 0, ("passed", "12", "")),
        (["2 failed, 10 passed, 1 error in 63.00s (0:01:03)"], 1, ("failed", "10", "2 failed, 1 error")),
        (["12 passed in 3.20s", "make: *** Error 1"], 2, ("failed", "12", "exit code 2")),
        (
            ["ERROR: No matching distribution", ""],
            1,
            ("not run", "", "exit code 1: ERROR: No matching distribution"),
        ),
        ([], 0, ("not run", "", "exit code 0: no output")),
        (["no tests ran in 0.02s"], 5, ("not run", "", "exit code 5: no tests ran in 0.02s")),
    ],
)
def test_a_row_is_green_only_if_its_tests_have_passed(
    matrix: ModuleType, lines: list[str], exit_code: int, expected: tuple[str, str, str]
) -> None:
    assert matrix.summary(lines, exit_code) == expected


def test_a_row_that_cannot_run_fails_the_matrix(
    matrix: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix.ROWS[:] = [matrix.Row("Python 4.7", "tests/host", python="python4.7")]
    assert matrix.main([]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.split("  ")[:2] == ["Python 4.7", "not run"] and line.endswith("  there is no python4.7")
    assert matrix.main(["no such row"]) == 1
