"""The lock of a run: only its holder may start the run, or train it on this machine.

Agents and ranks inherit the lock, and the kernel releases it when the last of them ends. On a file system
without locks a file names the holder. If that process has ended, another process may take the lock.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slurmddp.errors import RunNotFoundError, SlurmddpError
from slurmddp.host.file_lock import try_lock
from slurmddp.host.process import start_time
from slurmddp.host.regular_file import open_regular
from slurmddp.runs.folder.late_files import create_new
from slurmddp.runs.folder.layout import RunFolder

_POLL_S = 0.1
_MOMENT_S = 1.0
"""Seconds before a wait is announced: a submission takes about as long."""
_WRITING_S = 5.0
"""Age in seconds from which an incomplete file counts as left behind by an interrupted writer."""
_STALE_S = 900.0
"""Age in seconds from which a holder on another host counts as ended: a submission takes at most 120 s."""


class RunLock:
    """The lock of a run: one process at a time may start it. As a context manager, it releases the lock.

    Attributes:
        fileno: the descriptor of the lock file; a child process that inherits it holds the lock as well.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.fileno = -1
        self._path = folder.path / ".lock"
        self._holder = folder.path / ".lock-holder"
        self._holds_file = False

    def acquire(self) -> bool:
        """Take the lock if it is free; return whether it was taken. Does not wait.

        Raises:
            RunNotFoundError: another command has removed the run folder.
            SlurmddpError: a link or a folder has the name of the lock file.
        """
        try:
            self.fileno = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            # If another command has removed and recreated the folder, the open file is not the lock file any
            # more.
            if self._lock() and os.path.samestat(os.fstat(self.fileno), self._path.stat()):
                return True
        except FileNotFoundError:
            raise RunNotFoundError(
                f"{self._path.parent} was removed by another command.", hint="Run the command again."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR):
                raise
            raise SlurmddpError(
                f"{self._path} is not a regular file, so the run can't be locked: {error.strerror}.",
                hint="Another program created it: remove it.",
            ) from error

        self.release()
        return False

    def wait(self, is_taken: Callable[[], bool], *, waiting: Callable[[], None]) -> bool:
        """Wait for the lock and take it; return False if `is_taken` returns True before the lock is free.

        Args:
            is_taken: returns whether a launcher trains the run: the lock then stays taken.
            waiting: called once, if the wait takes longer than a second.
        """
        announced_at = time.monotonic() + _MOMENT_S
        while not self.acquire():
            if is_taken():
                return False

            if time.monotonic() >= announced_at:
                waiting()
                announced_at = math.inf
            time.sleep(_POLL_S)
        return True

    def hand_over(self) -> RunLock:
        """Return a new object that holds the lock and will release it; this object no longer holds it."""
        other = RunLock(RunFolder(self._path.parent))
        other.fileno = self.fileno
        other._holds_file = self._holds_file

        self.fileno = -1
        self._holds_file = False
        return other

    def release(self) -> None:
        """Release the lock, unless a child process has inherited it."""
        if self._holds_file:
            self._holder.unlink(missing_ok=True)
            self._holds_file = False
        if self.fileno >= 0:
            os.close(self.fileno)
            self.fileno = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _lock(self) -> bool:
        is_locked = try_lock(self.fileno)
        # None means that the file system has no locks.
        if is_locked is None:
            return self._lock_by_file()
        return is_locked

    def _lock_by_file(self) -> bool:
        """Take the lock, on a file system without locks, by creating a file that names this process.

        Returns:
            False if another holder may still run.
        """
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "process_start": start_time(os.getpid())}

        # The second try follows the removal of a file whose holder has ended.
        for _ in range(2):
            try:
                descriptor = create_new(self._holder, 0o600)
            except FileExistsError:
                if not _remove_stale(self._holder):
                    return False
                continue

            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                json.dump(holder, stream)
            self._holds_file = True
            return True
        return False


def _remove_stale(holder: Path) -> bool:
    """Remove the file `holder` if the process that it names has ended; return False if it may still run."""
    try:
        with open_regular(holder) as stream:
            text = stream.read().decode(errors="replace")
            written = os.fstat(stream.fileno()).st_mtime
    except FileNotFoundError:
        return True
    if not _has_ended(text, time.time() - written):
        return False

    aside = holder.with_name(f"{holder.name}.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        # The file is renamed first: if two processes remove the same file, the second rename fails.
        holder.rename(aside)
        # If a new holder has meanwhile written the file, the renamed file is the new holder's: put it back.
        if aside.read_text(encoding="utf-8") != text:
            with suppress(FileExistsError):
                os.link(aside, holder)
        aside.unlink()
    return True


def _has_ended(text: str, age_s: float) -> bool:
    """Return whether the process that a holder file names has ended.

    Args:
        text: the content of the file. If it is incomplete, the process counts as ended after `_WRITING_S`.
        age_s: the age of the file. A process on another host counts as ended after `_STALE_S`.
    """
    try:
        holder = json.loads(text)
        host = holder["host"]
        pid = int(holder["pid"])
        process_start = holder["process_start"]
    except (ValueError, KeyError, TypeError):
        return age_s > _WRITING_S

    # Of a process on another host, only the age of its file can be checked.
    if host != socket.gethostname():
        return age_s > _STALE_S
    # The start time is compared, because another process may have the same pid by now.
    return bool(start_time(pid) != process_start)
