"""The lock of a run: one process at a time decides whether to start it, or trains it on this machine.

The kernel releases the lock when its last holder ends; agents and ranks inherit it. On a filesystem without
locks a file names the holder, and a holder that has ended is recognised.
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
from slurmddp.runs.folder.layout import RunFolder

_POLLED_S = 0.1
_MOMENT_S = 1.0
"""Seconds before a wait is announced: a submission takes about as long."""
_STALE_S = 900.0
"""Age from which a holder on another host counts as ended: a submission takes two minutes at most."""


class RunLock:
    """The lock of one run; a context manager that releases it.

    Attributes:
        fileno: the descriptor that a child process has to inherit to hold the lock as well.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.fileno = -1
        self._path = folder.path / ".lock"
        self._holder = folder.path / ".lock-holder"
        self._holds_file = False

    def acquire(self) -> bool:
        """Take the lock if it is free, without a wait.

        Raises:
            RunNotFoundError: the run folder is gone, since the process that created it took it away again.
            SlurmddpError: the name of the lock file belongs to a link or a folder.
        """
        try:
            self.fileno = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            if self._lock() and os.path.samestat(os.fstat(self.fileno), self._path.stat()):
                return True
        except FileNotFoundError:
            raise RunNotFoundError(
                f"{self._path.parent} was removed by another command.", hint="Type the command again."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR):
                raise
            raise SlurmddpError(
                f"{self._path} is no file, so the run can't be locked: {error.strerror}.",
                hint="slurmddp did not leave it so: remove it.",
            ) from error
        self.release()
        return False

    def wait(self, is_taken: Callable[[], bool], *, waiting: Callable[[], None]) -> bool:
        """Take the lock, waiting while another process holds it and `is_taken` says no.

        Args:
            is_taken: whether a launcher trains the run, so that a wait is useless; False is returned then.
            waiting: called once, when the wait lasts longer than a moment.
        """
        told_at = time.monotonic() + _MOMENT_S
        while not self.acquire():
            if is_taken():
                return False
            if time.monotonic() >= told_at:
                waiting()
                told_at = math.inf
            time.sleep(_POLLED_S)
        return True

    def hand_over(self) -> RunLock:
        """Return the lock as another object; this object no longer releases it."""
        other = RunLock(RunFolder(self._path.parent))
        other.fileno, other._holds_file = self.fileno, self._holds_file
        self.fileno, self._holds_file = -1, False
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
        return self._lock_by_file() if is_locked is None else is_locked

    def _lock_by_file(self) -> bool:
        me = {"host": socket.gethostname(), "pid": os.getpid(), "process_start": start_time(os.getpid())}
        for _ in range(2):
            try:
                descriptor = os.open(
                    self._holder, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
                )
            except FileExistsError:
                if not _remove_stale(self._holder):
                    return False
                continue
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                json.dump(me, stream)
            self._holds_file = True
            return True
        return False


def _remove_stale(holder: Path) -> bool:
    """Remove the file of a holder that has ended; False if it may still live."""
    try:
        with open_regular(holder) as stream:
            text, written = stream.read().decode(errors="replace"), os.fstat(stream.fileno()).st_mtime
    except FileNotFoundError:
        return True
    if not _has_ended(text, time.time() - written):
        return False
    aside = holder.with_name(f"{holder.name}.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        holder.rename(aside)  # Of two processes that remove the same file, one fails here.
        if aside.read_text(encoding="utf-8") != text:  # A new holder was faster: give its file back.
            with suppress(FileExistsError):
                os.link(aside, holder)
        aside.unlink()
    return True


def _has_ended(text: str, age_s: float) -> bool:
    try:
        holder = json.loads(text)
        host, pid, began = holder["host"], int(holder["pid"]), holder["process_start"]
    except (ValueError, KeyError, TypeError):
        return age_s > _POLLED_S * 50  # Its writer was interrupted, or is still writing.
    if host != socket.gethostname():
        return age_s > _STALE_S
    return bool(start_time(pid) != began)
