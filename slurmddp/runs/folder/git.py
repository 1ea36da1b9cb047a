"""Run git in a project's folder, and find out whether git can list the folder's files."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_OTHER_REPOSITORY = frozenset({
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE",
    "GIT_PREFIX",
})  # fmt: skip
"""Variables that make git use another repository than the folder's; git sets them for its hooks."""


@dataclass(frozen=True)
class GitTrouble:
    """Why git can't list the files of a folder."""

    kind: Literal["no_git", "no_repository", "unreadable"]
    """unreadable: the folder may belong to a repository, but git reports an error."""
    reason: str
    """The reason, as a clause."""


def has_git() -> bool:
    """Return whether this machine has git."""
    return shutil.which("git") is not None


def trouble_of(folder: Path) -> GitTrouble | None:
    """Return why git can't list the files of a folder; None if it can."""
    if not has_git():
        return GitTrouble("no_git", "there is no git on this machine")
    result = run_git(folder, "rev-parse", "--is-inside-work-tree")
    if result.returncode == 0 and result.stdout.strip() == b"true":
        return None

    # git has the same exit code for all errors, so a missing repository is recognised by the message.
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    if lines and "not a git repository" not in lines[0]:
        return GitTrouble("unreadable", f"git reports {lines[0]!r}")
    return GitTrouble("no_repository", f"{folder} is not in a git repository")


def run_git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`, without variables such as GIT_DIR; return the completed process and its output."""
    environ = {name: value for name, value in os.environ.items() if name not in _OTHER_REPOSITORY}
    # Messages in English, because `trouble_of` reads them.
    environ["LC_ALL"] = "C"
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environ,
        check=False,
    )
