"""Receive the code of a submission on the login node: request missing files, check them, place them.

The host checks every digest before it changes a file, and replaces each file atomically. It holds the lock of
the folder until the submission has ended, so that the code of two submissions never mixes.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO

from slurmddp.control.events import Note, Report, Waiting
from slurmddp.errors import ConfigError, LoginNodeError, plain
from slurmddp.runs.folder import sent_code
from slurmddp.runs.folder.create import free_name
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.lock import RunLock
from slurmddp.runs.folder.owner import refuse_foreign, warn_if_exposed
from slurmddp.runs.folder.sent_code import SentFile

_BLOCK_BYTES = 1 << 20
_DEFAULT_PARENT = "slurmddp"
"""Folder in the home directory for projects without `ssh_folder` (see `default_folder`)."""


def default_folder(project_dir: Path) -> str:
    """Return the folder on the host for a project without `ssh_folder`, relative to the home directory."""
    return f"{_DEFAULT_PARENT}/{project_dir.name}"


def open_folder(path: Path) -> None:
    """Create the folder for a project's code on this host, or check that an existing one is usable.

    An existing folder is usable if it is empty, or slurmddp created it for an earlier submission.

    Raises:
        LoginNodeError: the folder can't be created.
        ConfigError: the folder holds files that slurmddp did not send, belongs to another account, or is the
            home directory.
    """
    if path.resolve() in (Path("/"), Path.home().resolve()):
        raise ConfigError(
            f"The code can't be sent to {path} itself.",
            hint="Choose a folder inside it in the cluster file: ssh_folder: /path/of/yours.",
        )

    try:
        _create(path)
        if not sent_code.is_marked(path):
            _refuse_filled(path)
        (path / sent_code.FOLDER).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise LoginNodeError(
            f"The folder {path} can't be created: {error.strerror or error}.",
            hint="Choose another folder in the cluster file: ssh_folder: /path/of/yours.",
        ) from error


def _create(path: Path) -> None:
    """Create a folder, if it is missing, and take write permissions from all other accounts.

    Raises:
        ConfigError: another account owns the folder.
    """
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        path.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(before)

    refuse_foreign(path, "Choose a folder of your own in the cluster file: ssh_folder: /path/of/yours.")
    _keep_others_out(path)
    if path.parent == Path.home() / _DEFAULT_PARENT:
        _keep_others_out(path.parent)

    warn_if_exposed(path)


def _keep_others_out(folder: Path) -> None:
    """Remove write permissions of group and others, which a default ACL or an earlier umask may have set."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o022:
        folder.chmod(mode & ~0o022)


def _refuse_filled(path: Path) -> None:
    """Raise ConfigError if a folder that no submission has created is not empty."""
    names = sorted(entry.name for entry in path.iterdir() if entry.name != sent_code.FOLDER)
    if not names:
        return

    raise ConfigError(
        f"{path} holds files that slurmddp did not send, such as {names[0]}. Nothing was changed in it.",
        hint="Choose another folder in the cluster file (ssh_folder: /path/of/yours), or move the files.",
    )


@contextmanager
def locked(folder: Path, report: Report) -> Iterator[None]:
    """Hold the lock of a project's folder during the block, in which code arrives and is submitted.

    Args:
        folder: the folder with the project's code on this host.
        report: called with `Waiting` if another submission holds the lock.
    """
    waiting = Waiting(str(folder), f"Another submission from {folder} is in progress; waiting for it.")
    with RunLock(RunFolder(folder / sent_code.FOLDER)) as lock:
        lock.wait(lambda: False, waiting=lambda: report(waiting))
        yield


def missing(folder: Path, files: Sequence[SentFile]) -> list[SentFile]:
    """Return the files that the laptop has to send, because the folder lacks them or has other contents."""

    def is_in_place(file: SentFile) -> bool:
        # If a parent of the file is a symbolic link, `Receiver` replaces the link by a folder. So the content
        # has to be sent, even if the link leads to a file with the same content.
        return _leads_through_folders(folder, file.name) and file.matches(folder / file.name)

    return [file for file in files if file.link is None and not is_in_place(file)]


class Receiver:
    """Writes the files of a submission into the project's folder on this host.

    Args:
        folder: the folder, whose lock the caller holds.
        files: all files of the project.
        report: called with a `Note` for each file that was changed on this host and is kept under a new name.
    """

    def __init__(self, folder: Path, files: Sequence[SentFile], report: Report) -> None:
        self._folder = folder
        self._report = report
        self._files = {file.name: file for file in files}
        self._known: dict[str, list[SentFile]] = {}
        for file in sent_code.known(folder):
            self._known.setdefault(file.name, []).append(file)

    def receive(self, stream: IO[bytes], coming: Sequence[SentFile]) -> None:
        """Read the contents of files, and make the folder hold exactly the code of the project.

        Files that were changed on this host are kept under new names.

        Args:
            stream: the contents, one after another.
            coming: the files whose contents follow, in this order.

        Raises:
            LoginNodeError: a content is cut off or has a wrong digest, and nothing was changed; or the folder
                can't be written.
        """
        try:
            self._receive(stream, coming)
        except OSError as error:
            raise LoginNodeError(
                f"The code can't be written to {self._folder}: {plain(error)}. Nothing was started.",
                hint="Check permissions and free space of the host. The same command sends missing files.",
            ) from error

    def _receive(self, stream: IO[bytes], coming: Sequence[SentFile]) -> None:
        """Receive the files as `receive` does, but raise each OSError unchanged."""
        record = self._folder / sent_code.FOLDER
        with tempfile.TemporaryDirectory(prefix="arriving-", dir=record) as arriving:
            # All contents go to a temporary folder first: if the connection breaks or a digest is wrong, no
            # file of the project has changed.
            contents = {}
            for number, file in enumerate(coming):
                contents[file.name] = Path(arriving, str(number))
                _read_content(stream, file, contents[file.name])

            # The list of the new files is written before they are placed: if this process is killed
            # meanwhile, the next submission knows that slurmddp sent them, and replaces them.
            sent_code.begin(self._folder, list(self._files.values()))
            self._remove_gone()
            for file in self._files.values():
                self._place(file, contents.get(file.name))

        sent_code.complete(self._folder, list(self._files.values()))

    def _remove_gone(self) -> None:
        """Remove files of earlier submissions that are no longer part of the project."""
        for name in sorted(self._known.keys() - self._files.keys()):
            path = self._folder / name
            if (
                not _leads_through_folders(self._folder, name)
                or not os.path.lexists(path)
                or _is_folder(path)
            ):
                continue

            if not self._keep_if_changed(name):
                path.unlink()

            for parent in _folders_above(self._folder, name):
                if not _removed_if_empty(parent):
                    break

    def _place(self, file: SentFile, content: Path | None) -> None:
        """Put a file or a symbolic link of the project in its place.

        Args:
            file: name, mode and digest of the file.
            content: the file with the received content; None: the folder has the content already, or `file`
                is a symbolic link.
        """
        path = self._folder / file.name
        self._make_parents(file.name)
        if content is None and file.matches(path):
            if file.link is None:
                path.chmod(file.mode)
            return

        if _is_folder(path) and not _removed_if_empty(path):
            self._keep_under_new_name(path)
        elif os.path.lexists(path):
            self._keep_if_changed(file.name)

        if content is not None:
            # The rename is atomic: a program that reads the file meanwhile sees the old or the new content,
            # never a mixture.
            content.chmod(file.mode)
            content.replace(path)
        elif file.link is not None:
            path.unlink(missing_ok=True)
            path.symlink_to(file.link)

        # Python recompiles a module only if its size or modification time differs from the values in the .pyc
        # file. The new content may have the same size and time, so the .pyc files are removed.
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)

    def _make_parents(self, name: str) -> None:
        """Create the parent folders of a file; rename a file or link that has the name of such a folder."""
        for folder in reversed(_folders_above(self._folder, name)):
            if os.path.lexists(folder) and not _is_folder(folder):
                self._keep_under_new_name(folder)
            folder.mkdir(mode=0o755, exist_ok=True)
            _keep_others_out(folder)

    def _keep_if_changed(self, name: str) -> bool:
        """Rename a file if slurmddp has not sent its present content; return whether it was renamed."""
        path = self._folder / name
        sent = self._known.get(name, [])
        if any(file.matches(path) for file in sent):
            return False

        self._keep_under_new_name(path)
        return True

    def _keep_under_new_name(self, path: Path) -> None:
        """Rename a file or folder to a free name beside it, and report the new name."""
        aside = free_name(path)
        path.rename(aside)
        self._report(Note(f"{path} was changed on this host; the changed version is kept as {aside.name}."))


def _read_content(stream: IO[bytes], file: SentFile, path: Path) -> None:
    """Copy the content of a file from the stream to `path`.

    Raises:
        LoginNodeError: the stream ended too early, or the content has another digest.
    """
    digest = hashlib.sha256()
    remaining = file.size
    with path.open("wb") as target:
        while remaining and (block := stream.read(min(remaining, _BLOCK_BYTES))):
            target.write(block)
            digest.update(block)
            remaining -= len(block)

    if remaining or digest.hexdigest() != file.digest:
        raise LoginNodeError(
            f"{file.name} did not arrive completely. Nothing was changed or started.",
            hint="The same command sends it again.",
        )


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _folders_above(folder: Path, name: str) -> list[Path]:
    """Return the parent folders of `folder / name` that are inside `folder`, the innermost first."""
    return [folder / parent for parent in PurePosixPath(name).parents if parent.parts]


def _leads_through_folders(folder: Path, name: str) -> bool:
    """Return whether all parents of `folder / name` inside `folder` are folders, not symbolic links."""
    return all(_is_folder(parent) for parent in _folders_above(folder, name))


def _removed_if_empty(folder: Path) -> bool:
    with suppress(OSError):
        folder.rmdir()
        return True
    return False
