"""The owner of a run folder: refuse folders of other accounts, and warn if others can write."""

from __future__ import annotations

import logging
import os
import pwd
import stat
from pathlib import Path

from slurmddp.errors import ConfigError

log = logging.getLogger(__name__)

_NOBODY = 65534
"""The owner of a file whose owner this machine can't name: in a container, or on a share with root squash."""

_OWN_RUN = "Start a run of your own: give it another name= or runs_dir=, or another folder to save in."
READ_ONLY = (
    "Only that account may change the run; `slurmddp status` and `slurmddp logs` read it for others, too."
)

_warned: set[Path] = set()


def foreign_owner(path: Path) -> str | None:
    """Return the name of the account that owns `path`; None if this account owns it, or is root.

    A link of another account counts as foreign, whatever its target is.
    """
    here = os.geteuid()
    for status in (path.lstat, path.stat):
        try:
            owner = status().st_uid
        except OSError:
            return None
        if here != 0 and owner not in (here, _NOBODY):
            return account(owner)
    return None


def refuse_foreign(root: Path, hint: str = _OWN_RUN) -> None:
    """Raise ConfigError if `root`, a run or its folder of checkpoints, belongs to another account."""
    is_run = not root.exists() and (root.parent / "config.yaml").exists()
    folder = root.parent if is_run else root
    owner = foreign_owner(folder)
    if owner is not None:
        raise ConfigError(
            f"{folder} belongs to {owner}, and this process runs as {account(os.geteuid())}. "
            "Nothing was written.",
            hint=hint,
        )


def warn_if_exposed(root: Path) -> None:
    """Warn, once per folder, if other accounts can replace runs or checkpoints under `root`."""
    for folder in (root, *root.parents):
        who = _other_writers(folder)
        if who and folder not in _warned:
            _warned.add(folder)
            log.warning(
                "%s is writable for %s, who can replace the runs and checkpoints in it. "
                "Its owner can change that with `chmod go-w`.",
                folder,
                who,
            )


def _other_writers(folder: Path) -> str:
    """Return who besides the owner may rename and delete in a folder; empty with the sticky bit."""
    status = folder.stat()
    if status.st_mode & stat.S_ISVTX:
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    # A group with the number of the owner is a private group: many systems create one per account.
    if status.st_mode & stat.S_IWGRP and status.st_gid != status.st_uid:
        return "its group"
    return ""


def account(number: int) -> str:
    """Return the name of the account with this number."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"account {number}"
