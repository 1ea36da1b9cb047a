"""The working folder has the path that the person sees, not the path without links."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.host.working_folder import working_folder


@pytest.fixture
def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project reached through a link, as the current folder."""
    (tmp_path / "disk7/project").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "disk7")
    monkeypatch.chdir(tmp_path / "home/project")
    return tmp_path


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{}/home/project", "home/project"),
        ("{}/disk7/project", "disk7/project"),
        ("{}/home/../home/project", "disk7/project"),  # A shell never shows such a path.
        ("{}/home", "disk7/project"),  # of the shell, before the program changed its folder
        ("{}/gone", "disk7/project"),
        ("project", "disk7/project"),
        ("", "disk7/project"),
    ],
)
def test_the_path_of_the_shell_counts_if_it_is_the_current_folder(
    linked: Path, monkeypatch: pytest.MonkeyPatch, shown: str, expected: str
) -> None:
    monkeypatch.setenv("PWD", shown.format(linked))
    assert working_folder() == linked / expected


def test_without_a_path_of_the_shell_the_physical_one_counts(
    linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PWD")
    assert working_folder() == linked / "disk7/project"
