"""The code that a submission sends: the laptop lists it with digests, the host takes what it lacks.

The host checks every digest before it changes a file. It replaces files one by one, each at once, while it
holds the lock of the folder until the submission has ended: the code of two submissions never mixes.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from slurmddp.control.events import Note, Report, Waiting
from slurmddp.errors import ConfigError, LoginNodeError, plain
from slurmddp.runs.folder import code_snapshot, secret_files, sent_code
from slurmddp.runs.folder.create import free_name
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.lock import RunLock
from slurmddp.runs.folder.owner import refuse_foreign, warn_if_exposed
from slurmddp.runs.folder.sent_code import SentFile

_BLOCK_BYTES = 1 << 20
_DEFAULT_PARENT = "slurmddp"
"""Folder of the home in which projects lie that name no other folder (see `default_folder`)."""


@dataclass(frozen=True)
class Delivery:
    """The code of a project on this machine."""

    project_dir: Path
    files: Sequence[SentFile]
    record: dict[str, bytes]
    """Content of the files that describe the code, by name: commit and difference."""
    left_out: Sequence[str]
    """Names of files and folders that may hold passwords or keys, and stay on this machine."""

    def content(self, file: SentFile) -> bytes:
        """Return the content of a file.

        Raises:
            LoginNodeError: the file has changed since it was listed.
        """
        if file.name in self.record:
            return self.record[file.name]
        content = (self.project_dir / file.name).read_bytes()
        if hashlib.sha256(content).hexdigest() != file.digest:
            raise LoginNodeError(
                f"{file.name} changed while it was sent. Nothing was started.",
                hint="The same command sends it again.",
            )
        return content


def default_folder(project_dir: Path) -> str:
    """Return the folder on the host for a project, relative to the home there."""
    return f"{_DEFAULT_PARENT}/{project_dir.name}"


def collect(project_dir: Path) -> Delivery:
    """List the code of a project with its digests, commit and difference.

    Raises:
        ConfigError: the project is or holds the home of this account, or its code is too large.
    """
    if Path.home().resolve().is_relative_to(project_dir.resolve()):
        raise ConfigError(
            f"{project_dir} is no project: all files of it would be sent.",
            hint="Run the command in a folder that holds the code of the training alone.",
        )
    project = code_snapshot.code_of(project_dir)
    record = {
        f"{sent_code.FOLDER}/{name}": content for name, content in code_snapshot.state_of(project_dir).items()
    }
    files = [_listed(project_dir, path) for path in project.code]
    files += [
        SentFile(name=name, size=len(content), digest=hashlib.sha256(content).hexdigest())
        for name, content in record.items()
    ]
    return Delivery(project_dir, files, record, secret_files.topmost(project.secrets, project_dir))


def _listed(project_dir: Path, path: Path) -> SentFile:
    name = str(path.relative_to(project_dir))
    if path.is_symlink():
        target = str(path.readlink())
        digest = hashlib.sha256(os.fsencode(target)).hexdigest()
        return SentFile(name=name, size=0, digest=digest, link=target)
    status = path.stat()
    return SentFile(
        name=name,
        size=status.st_size,
        digest=sent_code.digest_of(path),
        mode=stat.S_IMODE(status.st_mode) & 0o755,
    )


def open_folder(path: Path) -> None:
    """Create the folder of a project on this host, or take the one that code was sent to before.

    Raises:
        LoginNodeError: the folder can't be created.
        ConfigError: it holds files that were not sent by slurmddp, or belongs to another account.
    """
    if path.resolve() in (Path("/"), Path.home().resolve()):
        raise ConfigError(
            f"The code can't be sent to {path} itself.",
            hint="Name a folder below it in the cluster file: ssh_folder: /path/of/yours.",
        )
    try:
        _create(path)
        if not sent_code.is_marked(path):
            _refuse_filled(path)
        (path / sent_code.FOLDER).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise LoginNodeError(
            f"The folder {path} can't be created: {error.strerror or error}.",
            hint="Name another folder in the cluster file: ssh_folder: /path/of/yours.",
        ) from error


def _create(path: Path) -> None:
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        path.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(before)
    refuse_foreign(path, "Name a folder of your own in the cluster file: ssh_folder: /path/of/yours.")
    _keep_others_out(path)
    if path.parent == Path.home() / _DEFAULT_PARENT:
        _keep_others_out(path.parent)
    warn_if_exposed(path)


def _keep_others_out(folder: Path) -> None:
    """Take the rights to write from other accounts, also those that a default ACL or an old umask gave."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o022:
        folder.chmod(mode & ~0o022)


def _refuse_filled(path: Path) -> None:
    names = sorted(entry.name for entry in path.iterdir() if entry.name != sent_code.FOLDER)
    if not names:
        return
    raise ConfigError(
        f"{path} holds files that slurmddp has not sent, such as {names[0]}. Nothing was changed there.",
        hint="Name another folder in the cluster file (ssh_folder: /path/of/yours), or move the files away.",
    )


@contextmanager
def locked(folder: Path, report: Report) -> Iterator[None]:
    """Hold the lock of a project's folder, while code arrives there and is submitted.

    Args:
        folder: the folder.
        report: called with `Waiting` if another submission holds the lock.
    """
    waiting = Waiting(str(folder), f"Another submission from {folder} is in progress; waiting for it.")
    with RunLock(RunFolder(folder / sent_code.FOLDER)) as lock:
        lock.wait(lambda: False, waiting=lambda: report(waiting))
        yield


def missing(folder: Path, files: Sequence[SentFile]) -> list[SentFile]:
    """Return the files whose content has to be sent."""

    def is_in_place(file: SentFile) -> bool:
        # Behind a link the same content may lie; the link gives way to a folder.
        return _leads_through_folders(folder, file.name) and file.matches(folder / file.name)

    return [file for file in files if file.link is None and not is_in_place(file)]


class Receiver:
    """Takes the code of a submission into a folder of this host whose lock is held.

    It reports a `Note` on each file that was changed on this host.
    """

    def __init__(self, folder: Path, files: Sequence[SentFile], report: Report) -> None:
        self._folder = folder
        self._report = report
        self._files = {file.name: file for file in files}
        self._known: dict[str, list[SentFile]] = {}
        for file in sent_code.known(folder):
            self._known.setdefault(file.name, []).append(file)

    def receive(self, stream: IO[bytes], coming: Sequence[SentFile]) -> None:
        """Read the contents of `coming`, check them, and make the folder hold exactly the sent code.

        Raises:
            LoginNodeError: the connection broke, or a content is not what was announced, and nothing was
                changed; or the folder can't be written.
        """
        try:
            self._receive(stream, coming)
        except OSError as error:
            raise LoginNodeError(
                f"The code can't be written to {self._folder}: {plain(error)}. Nothing was started.",
                hint="Check the rights and the free space there. The same command sends what is missing.",
            ) from error

    def _receive(self, stream: IO[bytes], coming: Sequence[SentFile]) -> None:
        record = self._folder / sent_code.FOLDER
        with tempfile.TemporaryDirectory(prefix="arriving-", dir=record) as arriving:
            contents = {}
            for number, file in enumerate(coming):
                contents[file.name] = Path(arriving, str(number))
                _read_content(stream, file, contents[file.name])

            sent_code.begin(self._folder, list(self._files.values()))
            self._remove_gone()
            for file in self._files.values():
                self._place(file, contents.get(file.name))
        sent_code.complete(self._folder, list(self._files.values()))

    def _remove_gone(self) -> None:
        """Remove files that were sent before and are no longer part of the project."""
        for name in sorted(self._known.keys() - self._files.keys()):
            path = self._folder / name
            if (
                not _leads_through_folders(self._folder, name)
                or not os.path.lexists(path)
                or _is_folder(path)
            ):
                continue
            if not self._put_aside_if_changed(name):
                path.unlink()
            for parent in _folders_above(self._folder, name):
                if not _removed_if_empty(parent):
                    break

    def _place(self, file: SentFile, content: Path | None) -> None:
        path = self._folder / file.name
        self._make_parents(file.name)
        if content is None and file.matches(path):
            if file.link is None:
                path.chmod(file.mode)
            return

        if _is_folder(path) and not _removed_if_empty(path):
            self._put_aside(path)
        elif os.path.lexists(path):
            self._put_aside_if_changed(file.name)
        if content is not None:
            content.chmod(file.mode)
            content.replace(path)
        elif file.link is not None:
            path.unlink(missing_ok=True)
            path.symlink_to(file.link)
        # Python would use old compiled code if the new file has the same size and time.
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)

    def _make_parents(self, name: str) -> None:
        for folder in reversed(_folders_above(self._folder, name)):
            if os.path.lexists(folder) and not _is_folder(folder):
                self._put_aside(folder)
            folder.mkdir(mode=0o755, exist_ok=True)
            _keep_others_out(folder)

    def _put_aside_if_changed(self, name: str) -> bool:
        """Keep a file that was written on this host since it was sent; return whether it was put aside."""
        path = self._folder / name
        sent = self._known.get(name, [])
        if any(file.matches(path) for file in sent):
            return False

        self._put_aside(path)
        return True

    def _put_aside(self, path: Path) -> None:
        aside = free_name(path)
        path.rename(aside)
        self._report(Note(f"{path} was changed on this host; it is kept as {aside.name}."))


def _read_content(stream: IO[bytes], file: SentFile, path: Path) -> None:
    """Write the next `file.size` bytes of the stream to `path`; raise LoginNodeError if they are others."""
    digest = hashlib.sha256()
    left = file.size
    with path.open("wb") as target:
        while left and (block := stream.read(min(left, _BLOCK_BYTES))):
            target.write(block)
            digest.update(block)
            left -= len(block)
    if left or digest.hexdigest() != file.digest:
        raise LoginNodeError(
            f"{file.name} did not arrive whole. Nothing was changed or started.",
            hint="The same command sends it again.",
        )


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _folders_above(folder: Path, name: str) -> list[Path]:
    """Return the folders between `folder`, which may be a link, and a name inside it; the innermost first."""
    return [folder / parent for parent in PurePosixPath(name).parents if parent.parts]


def _leads_through_folders(folder: Path, name: str) -> bool:
    """Return whether a name inside `folder` passes no symbolic link, behind which other files lie."""
    return all(_is_folder(parent) for parent in _folders_above(folder, name))


def _removed_if_empty(folder: Path) -> bool:
    with suppress(OSError):
        folder.rmdir()
        return True
    return False
