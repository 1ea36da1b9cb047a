"""Refuse files and folders that other accounts own or can change; warn if others can replace runs."""

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
"""The account of files whose owner is unknown on this machine: in a container, or with root squash."""

_OWN_RUN = "Start a run of your own: give it another name= or runs_dir=, or another folder to save in."
READ_ONLY = (
    "Only that account may change the run; `slurmddp status` and `slurmddp logs` read it for others, too."
)

_warned: set[Path] = set()


def foreign_owner(path: Path) -> str | None:
    """Return the name of the other account that owns `path`.

    The result is None if this account owns it or is root, if the owner is unknown, or if the path does not
    exist.
    """
    user = os.geteuid()
    if user == 0:
        return None

    # For a link, the owner of the link counts as well as the owner of the target: the first can let the link
    # lead to another target.
    for status in (path.lstat, path.stat):
        try:
            owner = status().st_uid
        except OSError:
            return None
        if owner not in (user, _NOBODY):
            return account(owner)
    return None


def refuse_foreign(root: Path, hint: str = _OWN_RUN) -> None:
    """Raise ConfigError if `root`, a run folder or a folder of checkpoints, belongs to another account.

    Args:
        root: the folder.
        hint: the advice of the error.
    """
    # For a folder of checkpoints that does not exist yet, the owner of its run counts. `is_there` lists the
    # parent folder, so it is called only if the parent is a run: listing thousands of runs takes long.
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
    """Raise ConfigError if another account can change a YAML or Python file in the folder `root`.

    The check is necessary because a configuration names commands and classes that run as this account.
    """
    seen: set[Path] = set()
    # Links to folders are followed, because Hydra follows them as well.
    for name, folders, files in os.walk(root, followlinks=True):
        folder = Path(name)
        # A link may lead to a folder above it, which would never end.
        if folder.resolve() in seen:
            folders.clear()
            continue

        seen.add(folder.resolve())
        refuse_file_of_others(folder)
        # .pyc files are checked as well: Python runs them in place of the source.
        for file in files:
            if file.endswith((".yaml", ".yml", ".py", ".pyc")):
                refuse_file_of_others(folder / file)


def refuse_file_of_others(
    path: Path, hint: str = "Copy the project to a folder of your own, for example with `git clone`."
) -> None:
    """Raise ConfigError if an account that is not trusted (see `_trusted`) owns a file or can write into it.

    Args:
        path: a file, or a folder of which only the owner is checked; nothing happens if it does not exist.
        hint: the advice of the error if another account owns the file.
    """
    if not path.exists():
        return

    for status in (path.lstat(), path.stat()):
        if status.st_uid not in _trusted():
            raise ConfigError(
                f"{path} belongs to {account(status.st_uid)}, and its content would run as "
                f"{account(os.geteuid())}.",
                hint=hint,
            )

    writers = _writers(path)
    if writers and not path.is_dir() and _is_within_reach(path.resolve()):
        raise ConfigError(
            f"{path} is writable for {writers}, and its content would run as {account(os.geteuid())}.",
            hint=f"Remove the write permission: chmod go-w {shlex.quote(str(path))}",
        )


def _trusted() -> set[int]:
    """Return the user ids whose files this process trusts: this account, root, and the caller of sudo."""
    trusted = {os.geteuid(), 0}
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdecimal():
        trusted.add(int(os.environ["SUDO_UID"]))
    return trusted


def read_own(path: Path, *, unshared: bool = True) -> bytes | None:
    """Return the content of a file of this account; None if the file does not exist.

    Args:
        path: the file.
        unshared: whether to refuse a file into which other accounts can write.

    Raises:
        ConfigError: another account owns the file, or can write into it and `unshared` is true.
        SlurmddpError: the file can't be read, or is a link.
    """
    if not is_there(path):
        return None

    try:
        stream = open_regular(path, os.O_NOFOLLOW)
    except OSError as error:
        raise unreadable(path, error) from error
    with stream:
        # The open file is checked, not its path: another file may be renamed to this path at any time.
        status = os.fstat(stream.fileno())
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{path} belongs to {account(status.st_uid)}, and reading it could run their code.",
                hint="Let that account read it.",
            )
        writers = _writers(stream.fileno())
        if unshared and writers:
            raise ConfigError(
                f"{path} is writable for {writers}, and reading it could run their code.",
                hint="If you trust its content: chmod go-w " + shlex.quote(str(path)),
            )
        return stream.read()


def warn_if_exposed(root: Path) -> None:
    """Log a warning, once per folder, if other accounts can rename or replace `root` or an entry of it.

    All folders above `root` are checked as well.
    """
    for folder in (root, *root.parents):
        writers = other_writers(folder)
        if writers and folder not in _warned:
            _warned.add(folder)
            log.warning(
                "%s is writable for %s, who can replace the runs and checkpoints in it. "
                "Its owner can change that with `chmod go-w`.",
                folder,
                writers,
            )


def other_writers(folder: Path) -> str:
    """Return who besides the owner may rename and delete files in a folder; empty if nobody else may."""
    # Nobody, with the sticky bit (as in /tmp): an account may then rename and delete only its own files.
    if folder.stat().st_mode & stat.S_ISVTX:
        return ""
    return _writers(folder)


def _is_within_reach(path: Path) -> bool:
    """Return whether other accounts can enter all folders on the way to a file."""
    return all(map(_can_be_entered, path.parents))


def _can_be_entered(folder: Path) -> bool:
    status = folder.stat()
    if status.st_mode & stat.S_IXOTH:
        return True
    if not status.st_mode & stat.S_IXGRP:
        return False
    return _has_acl(folder) or not _is_private_group(status)


def _writers(file: Path | int) -> str:
    """Return a phrase about who besides the owner may write into a file or folder, such as "its group".

    Args:
        file: a path, or the descriptor of an open file.

    Returns:
        "" if nobody else may write.
    """
    status = os.fstat(file) if isinstance(file, int) else file.stat()

    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if not status.st_mode & stat.S_IWGRP:
        return ""
    if _has_acl(file):
        return "accounts of its access control list"
    return "" if _is_private_group(status) else "its group"


def _has_acl(file: Path | int) -> bool:
    """Return whether a file has a POSIX access control list."""
    # With a list, the group bits of the mode are its mask: the maximum of rights for the accounts in the
    # list. So they do not mean the group alone.
    try:
        return bool(os.getxattr(file, "system.posix_acl_access"))
    except OSError:
        # The file has no list, or its file system has none.
        return False


def _is_private_group(status: os.stat_result) -> bool:
    """Return whether the owner of a file is the only member of its group.

    Many systems create such a group for each account.
    """
    # A private group has the same number as its account.
    if status.st_gid != status.st_uid:
        return False
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        # The machine does not know the account or the group, as in a container: equal numbers must suffice.
        return True
    return group.gr_name == owner and set(group.gr_mem) <= {owner}


def account(number: int) -> str:
    """Return the name of the account with this user id."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"account {number}"
