"""Copy the Python environment of the ranks to the node's own disk, and start the agent from the copy.

Imports of torch read thousands of files. A shared disk serves them to all nodes at once, a node's own disk
serves one node. Each node keeps one copy for each state of an environment. Later jobs use the copy again:

    FOLDER/slurmddp-UID/KEY          the copy, with a list of its files
    FOLDER/slurmddp-UID/KEY.part     a copy that is being made
    FOLDER/slurmddp-UID/KEY.lock     exclusive lock while the copy is made or renamed, shared while in use
    FOLDER/slurmddp-UID/KEY-N.gone   a renamed copy, which is being removed

A copy gets its name when it is whole, and loses its name before its first file is removed. Some nodes run
programs that remove old files from /tmp, such as systemd-tmpfiles. So each use compares the copy with its
list of files, and holds a lock on the folder of the copy: systemd-tmpfiles leaves a locked folder alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import secrets
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slurmddp.batch.attempt import Attempt, log_write_error
from slurmddp.errors import EXIT_STOPPED, ConfigError, SlurmddpError, plain
from slurmddp.runs.folder.owner import other_writers

UNUSED_S = 7 * 24 * 3600
"""A job removes the copies of its node that no job has used for this many seconds: a week."""
_MARKS = ("pyvenv.cfg", "conda-meta")
"""Names that mark an environment: a file in each venv, and a folder in each conda environment."""
_LISTED = ("conda-meta", "lib/python*/site-packages", "lib64/python*/site-packages")
"""Folders whose entries change when a package is installed, updated or removed."""
_LIST = "slurmddp-files.json"
"""A file in the copy, with the sizes of the copy's files in bytes, by path."""
_IN_USE_S = 5.0
"""Seconds after which a damaged copy counts as used by another job; jobs that start lock it only briefly."""
_STOPS = (signal.SIGTERM, signal.SIGUSR2)
"""The signals by which SLURM asks a job to stop."""


def start_agent(attempt: Attempt) -> None:
    """Replace this process by the node's agent, run by the copy of the interpreter or else by the original.

    Without a copy the start takes longer, but the run is the same. So a copy that can't be made is a warning,
    in the node's log and as an event.
    """
    python = attempt.settings.python
    try:
        with _stopping(attempt):
            python = staged(python, attempt.settings.stage, attempt)
    except OSError as error:
        _warn(attempt, f"{plain(error)}.")
    except SlurmddpError as error:
        _warn(attempt, str(error))

    try:
        os.execvp(python, [python, "-m", "slurmddp.launchers.agent", str(attempt.folder.path)])
    except OSError as error:
        raise SystemExit(f"{python} can't be started on {os.uname().nodename}: {plain(error)}.") from error


def staged(python: str, folder: str, attempt: Attempt) -> str:
    """Return the interpreter in this node's copy of the environment; make the copy if it is missing.

    Args:
        python: the interpreter of the environment, a path or a name on PATH.
        folder: a folder on the node's own disk; environment variables in it are expanded.
        attempt: the attempt that starts.

    Raises:
        ConfigError: the interpreter belongs to no environment, or the folder is not safe to use.
        SlurmddpError: the copy failed.
        OSError: the folder can't be written.
    """
    environment = environment_of(python)
    copies = _private_folder(folder)
    copy = copies / key(environment)
    lock = os.open(f"{copy}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # A new time keeps programs that remove old files away from the lock file.
        os.utime(lock)
        _make(environment, copy, lock, attempt)
        os.utime(copy)
        folder_lock = os.open(copy, os.O_RDONLY | os.O_DIRECTORY)
    except BaseException:
        os.close(lock)
        raise

    fcntl.flock(folder_lock, fcntl.LOCK_SH)
    # The agent replaces this process, inherits the locks and holds them until it ends.
    for descriptor in (lock, folder_lock):
        os.set_inheritable(descriptor, True)

    remove_unused(copies)
    return str(copy / "bin" / Path(shutil.which(python) or python).name)


def _make(environment: Path, copy: Path, lock: int, attempt: Attempt) -> None:
    """Make the copy if it is missing or damaged; return with a shared lock on its lock file.

    Raises:
        SlurmddpError: the copy failed, or another job uses a copy that is not whole.
    """
    fcntl.flock(lock, fcntl.LOCK_SH)
    start = time.monotonic()
    while not is_whole(copy):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if copy.exists() and time.monotonic() - start > _IN_USE_S:
                raise SlurmddpError(
                    f"Files are missing in {copy}, which can't be replaced while another job uses it."
                ) from error
            # Jobs that ask at the same time wait for different times, so that one of them gets the lock.
            time.sleep(random.uniform(0, 0.1))
        else:
            # Another job may have made the copy before this process got the lock.
            if not is_whole(copy):
                _make_anew(environment, copy, attempt)

        # This call waits while another job makes the copy.
        fcntl.flock(lock, fcntl.LOCK_SH)


def _make_anew(environment: Path, copy: Path, attempt: Attempt) -> None:
    """Remove a damaged copy, and copy the environment again; the caller holds the exclusive lock."""
    if copy.exists():
        _rename_for_removal(copy)

    start = time.monotonic()
    _copy(environment, copy)
    attempt.log(f"{environment} was copied to {copy} in {time.monotonic() - start:.1f} s")


def is_whole(copy: Path) -> bool:
    """Return whether a copy still has all files that it was made with, none of them smaller."""
    try:
        listed = json.loads((copy / _LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False

    sizes = _sizes(copy)
    return all(sizes.get(path, -1) >= size for path, size in listed.items())


def _sizes(copy: Path) -> dict[str, int]:
    """Return the sizes of a copy's files in bytes, by path, without the compiled modules."""
    sizes: dict[str, int] = {}
    folders = [""]
    while folders:
        inside = folders.pop()
        with os.scandir(copy / inside) as entries:
            for entry in entries:
                path = f"{inside}{entry.name}"
                if not entry.is_dir(follow_symlinks=False):
                    sizes[path] = entry.stat(follow_symlinks=False).st_size
                elif entry.name != "__pycache__":
                    folders.append(f"{path}/")
    return sizes


def environment_of(python: str) -> Path:
    """Return the environment whose `bin` holds the interpreter; raise ConfigError if no environment does."""
    path = shutil.which(python)
    if path is None:
        raise ConfigError(f"There is no interpreter {python} on this node.")

    # The interpreter of a venv is a link to the base interpreter, which must not be followed.
    environment = Path(path).absolute().parent.parent
    if not any((environment / mark).exists() for mark in _MARKS):
        raise ConfigError(f"{path} belongs to no virtual environment and no conda environment.")
    return environment


def key(environment: Path) -> str:
    """Return the name of the copy: a hash of the environment's path and of its installed packages.

    An edited file within a package does not change the name.
    """
    digest = hashlib.sha256(os.fsencode(environment))
    with suppress(OSError):
        digest.update((environment / _MARKS[0]).read_bytes())
    for pattern in _LISTED:
        for folder in sorted(environment.glob(pattern)):
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                changed = entry.stat(follow_symlinks=False).st_mtime_ns
                digest.update(os.fsencode(f"{folder}/{entry.name}\0{changed}\0"))
    return digest.hexdigest()[:16]


def remove_unused(copies: Path) -> None:
    """Remove copies that no job has used for a week, and incomplete copies of interrupted jobs.

    Args:
        copies: the folder of all copies.
    """
    for path in list(copies.iterdir()):
        if path.suffix not in ("", ".part"):
            continue
        # A copy in use is locked: `flock` then raises an OSError, and the copy stays.
        with suppress(OSError), open(path.with_suffix(".lock"), "a") as lock:
            is_old = time.time() - path.stat().st_mtime >= UNUSED_S
            if path.suffix == ".part" or is_old:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _rename_for_removal(path)

    gone = [str(path) for path in copies.glob("*.gone")]
    if gone:
        # `rm` runs in the background, because an environment has tens of thousands of files. The shell ends
        # at once, so that the agent, which replaces this process, has no child that it did not start.
        command = ["sh", "-c", 'rm -rf -- "$@" </dev/null >/dev/null 2>&1 &', "sh", *gone]
        with suppress(OSError):
            subprocess.run(command, stdin=subprocess.DEVNULL, start_new_session=True, check=False)


def _rename_for_removal(path: Path) -> None:
    """Rename a copy that is to be removed; raise BlockingIOError if a job uses it."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.rename(path.with_name(f"{path.stem}-{secrets.token_hex(4)}.gone"))
    finally:
        os.close(folder)


def _private_folder(folder: str) -> Path:
    """Return the folder of this user's copies below `folder`; raise ConfigError if it is not private."""
    base = os.path.expandvars(folder)
    if not Path(base).is_absolute() or "$" in base:
        raise ConfigError(f"cluster.stage={folder} is {base!r} on this node, which is not an absolute path.")

    copies = Path(base, f"slurmddp-{os.getuid()}")
    writers = other_writers(Path(base))
    if writers:
        raise ConfigError(f"{base} is writable for {writers}, who can replace {copies} by other files.")

    # In /tmp another user may have created a folder or a link of this name, so what exists is checked.
    with suppress(FileExistsError):
        copies.mkdir(mode=0o700)
    status = copies.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(f"{copies} is not a folder that only you can write.")
    return copies


def _copy(environment: Path, copy: Path) -> None:
    """Copy an environment under a temporary name, test its interpreter, list its files, rename the copy."""
    part = copy.with_suffix(".part")
    # A job that was killed may have left an incomplete copy.
    shutil.rmtree(part, ignore_errors=True)
    try:
        # The times are kept, because Python compares the time of a module with the time in its compiled file.
        _run("cp", "-dR", "--preserve=mode,timestamps,links", f"{environment}/.", str(part))
        prefix = _run(str(part / "bin/python"), "-Ic", "import sys; print(sys.prefix)")
        if prefix != str(part):
            raise SlurmddpError(f"The interpreter in the copy {part} does not use the copy, but {prefix}.")

        sizes = _sizes(part)
        # If the environment is such a copy itself, its own list of files must not be part of the new list.
        sizes.pop(_LIST, None)
        (part / _LIST).write_text(json.dumps(sizes), encoding="utf-8")
        part.rename(copy)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _run(*command: str) -> str:
    """Run a command and return its output; if it fails, raise SlurmddpError with its last error line."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except subprocess.CalledProcessError as error:
        last_line = [error.returncode, *error.stderr.splitlines()][-1]
        raise SlurmddpError(f"`{command[0]}` failed: {last_line}.") from error


@contextmanager
def _stopping(attempt: Attempt) -> Iterator[None]:
    """Exit with code 75 if SLURM signals the job during the `with` block, so that the run is requeued."""

    def stop(number: int, _frame: object) -> None:
        node = os.environ.get("SLURM_NODEID", "0")
        with suppress(OSError):
            attempt.folder.exit_file(attempt.number, int(node)).write_text(f"{EXIT_STOPPED}\n")
        raise SystemExit(EXIT_STOPPED)

    for number in _STOPS:
        signal.signal(number, stop)

    yield

    for number in _STOPS:
        signal.signal(number, signal.SIG_DFL)


def _warn(attempt: Attempt, reason: str) -> None:
    """Log, and add as an event, that the ranks of this node use the original environment, and why."""
    host = os.uname().nodename
    text = f"The Python environment was not copied on {host}: {reason} The ranks there use the original."
    attempt.log(text)
    with log_write_error("The event `warned`", attempt.log):
        attempt.folder.add_event("warned", attempt=attempt.number, about="stage", text=text)
