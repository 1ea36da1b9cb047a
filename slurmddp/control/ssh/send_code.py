"""List the code of a submission on the laptop, with digests, and read the files that the host requests."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmddp.control.ssh.files_to_send import files_to_send
from slurmddp.errors import ConfigError, LoginNodeError
from slurmddp.runs.folder import code_snapshot, secret_files, sent_code
from slurmddp.runs.folder.sent_code import SentFile


@dataclass(frozen=True)
class Delivery:
    """The list of a project's files on this machine, from which they are sent to a login node."""

    project_dir: Path
    files: Sequence[SentFile]
    record: dict[str, bytes]
    """Contents, by name, of the files that record the git commit and the uncommitted changes of the code."""
    left_out: Sequence[str]
    """Names of files and folders that are not sent, because they may hold passwords or keys."""

    def content(self, file: SentFile) -> bytes:
        """Read the content of a listed file.

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


def collect(project_dir: Path) -> Delivery:
    """List the files of a project's code with their digests, and record git commit and uncommitted changes.

    Raises:
        ConfigError: the project folder is the home directory or contains it, or the code is too large.
    """
    if Path.home().resolve().is_relative_to(project_dir.resolve()):
        raise ConfigError(
            f"{project_dir} contains your home directory, so all your files would be sent.",
            hint="Run the command in a folder that holds only the code of the training.",
        )

    project = files_to_send(project_dir)
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
    """Return name, size, digest and mode of a file; for a symbolic link, its target instead of a mode."""
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
