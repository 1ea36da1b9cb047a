"""The owner of a file or folder: refuse what other accounts could change, and warn if others can write."""

from __future__ import annotations

import grp
import logging
import os
import pwd
import shlex
import stat
from pathlib import Path

from slurmddp.errors import ConfigError, unreadable
from slurmddp.host.regular_file import open_regular
from slurmddp.runs.folder.late_files import is_there
from slurmddp.runs.folder.layout import RunFolder

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
    # The folder of all runs holds no such file; a listing of it would take long.
    is_run = (root.parent / RunFolder.config_file).exists() and not is_there(root)
    folder = root.parent if is_run else root
    owner = foreign_owner(folder)
    if owner is not None:
        raise ConfigError(
            f"{folder} belongs to {owner}, and this process runs as {account(os.geteuid())}. "
            "Nothing was written.",
            hint=hint,
        )


def refuse_files_of_others(root: Path) -> None:
    """Raise ConfigError if another account decides what a configuration in the folder `root` says.

    A configuration names commands and classes that run as this account.
    """
    seen: set[Path] = set()
    # Hydra follows links to folders, and Python runs the compiled file in place of its source.
    for name, folders, files in os.walk(root, followlinks=True):
        folder = Path(name)
        if folder.resolve() in seen:
            folders.clear()
            continue
        seen.add(folder.resolve())
        refuse_file_of_others(folder)
        for file in files:
            if file.endswith((".yaml", ".yml", ".py", ".pyc")):
                refuse_file_of_others(folder / file)


def refuse_file_of_others(
    path: Path, hint: str = "Copy the project to a folder of your own, for example with `git clone`."
) -> None:
    """Raise ConfigError if neither this account nor root owns a file, or if others can write into it."""
    if not path.exists():
        return
    for status in (path.lstat(), path.stat()):
        if status.st_uid not in _trusted():
            raise ConfigError(
                f"{path} belongs to {account(status.st_uid)}, and what it says would run as "
                f"{account(os.geteuid())}.",
                hint=hint,
            )
    who = _writers(path)
    if who and not path.is_dir() and _is_within_reach(path.resolve()):
        raise ConfigError(
            f"{path} is writable for {who}, and what it says would run as {account(os.geteuid())}.",
            hint=f"Take the right away: chmod go-w {shlex.quote(str(path))}",
        )


def _trusted() -> set[int]:
    """Return the accounts whose files may decide what runs: this one, root, and who called sudo."""
    trusted = {os.geteuid(), 0}
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdecimal():
        trusted.add(int(os.environ["SUDO_UID"]))
    return trusted


def read_own(path: Path) -> bytes | None:
    """Return the content of a file that this account alone can write; None without such a file.

    Raises:
        ConfigError: another account owns the file, or can write into it.
        SlurmddpError: the file can't be read, or is a link.
    """
    if not is_there(path):
        return None
    try:
        stream = open_regular(path, os.O_NOFOLLOW)
    except OSError as error:
        raise unreadable(path, error) from error
    with stream:
        status = os.fstat(stream.fileno())
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{path} belongs to {account(status.st_uid)}, and reading it could run their code.",
                hint="Let that account read it.",
            )
        if who := _writers(stream.fileno()):
            raise ConfigError(
                f"{path} is writable for {who}, and reading it could run their code.",
                hint="If you trust its content: chmod go-w " + shlex.quote(str(path)),
            )
        return stream.read()


def warn_if_exposed(root: Path) -> None:
    """Warn, once per folder, if other accounts can replace runs or checkpoints under `root`."""
    for folder in (root, *root.parents):
        who = other_writers(folder)
        if who and folder not in _warned:
            _warned.add(folder)
            log.warning(
                "%s is writable for %s, who can replace the runs and checkpoints in it. "
                "Its owner can change that with `chmod go-w`.",
                folder,
                who,
            )


def other_writers(folder: Path) -> str:
    """Return who besides the owner may rename and delete in a folder; empty with the sticky bit."""
    return "" if folder.stat().st_mode & stat.S_ISVTX else _writers(folder)


def _is_within_reach(path: Path) -> bool:
    """Return whether other accounts can enter all folders on the way to a file."""
    return all(map(_can_be_entered, path.parents))


def _can_be_entered(folder: Path) -> bool:
    status = folder.stat()
    if status.st_mode & stat.S_IXOTH:
        return True
    return bool(status.st_mode & stat.S_IXGRP) and (_has_acl(folder) or not _is_private_group(status))


def _writers(file: Path | int) -> str:
    """Return who besides the owner may write into a file or folder, or an open one; empty for nobody."""
    status = os.fstat(file) if isinstance(file, int) else file.stat()
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if not status.st_mode & stat.S_IWGRP:
        return ""
    if _has_acl(file):
        return "accounts of its access control list"
    return "" if _is_private_group(status) else "its group"


def _has_acl(file: Path | int) -> bool:
    """Return whether a list names further accounts; the bits of the group then hold for all of them."""
    try:
        return bool(os.getxattr(file, "system.posix_acl_access"))
    except OSError:  # The file has no such list, or its file system knows none.
        return False


def _is_private_group(status: os.stat_result) -> bool:
    """Return whether the group is the one that many systems create for each account: of the same number."""
    if status.st_gid != status.st_uid:
        return False
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
        group = grp.getgrgid(status.st_gid)
    except KeyError:  # This machine has no name for one of them, as in a container.
        return True
    return group.gr_name == owner and set(group.gr_mem) <= {owner}


def account(number: int) -> str:
    """Return the name of the account with this number."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"account {number}"
