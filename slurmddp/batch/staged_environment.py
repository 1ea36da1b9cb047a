"""Copy the Python environment of the ranks to the node's own disk, and start the agent from the copy.

Imports of torch read thousands of files. A shared disk serves them to all nodes at once, a node's own disk
serves one node. Each node keeps one copy for each state of an environment, which later jobs use again:

    FOLDER/slurmddp-UID/KEY          the copy, with a list of its files
    FOLDER/slurmddp-UID/KEY.part     a copy that is being made
    FOLDER/slurmddp-UID/KEY.lock     locked alone while the copy is made or put aside, shared while it is used
    FOLDER/slurmddp-UID/KEY-N.gone   a copy that was put aside, and is being removed

A copy gets its name when it is whole, and loses its name before its first file is removed. Nodes also have
programs that remove old files from /tmp, such as systemd-tmpfiles. So each use compares the copy with its
list, and holds a lock on the folder of the copy, which systemd-tmpfiles respects.
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

from slurmddp.batch.attempt import Attempt, said_if_not_recorded
from slurmddp.errors import EXIT_STOPPED, ConfigError, SlurmddpError, plain
from slurmddp.runs.folder.owner import other_writers

UNUSED_S = 7 * 24 * 3600
"""Seconds without a use after which the next job on the node removes a copy: a week."""
_MARKS = ("pyvenv.cfg", "conda-meta")
"""A file of each virtual environment, and a folder of each conda environment."""
_LISTED = ("conda-meta", "lib/python*/site-packages", "lib64/python*/site-packages")
"""Folders whose entries change when a package is installed, updated or removed."""
_LIST = "slurmddp-files.json"
"""A file in the copy: the size of each of its files by its path."""
_IN_USE_S = 5.0
"""Seconds after which a damaged copy counts as used by another job; jobs that start hold it for moments."""
_STOPS = (signal.SIGTERM, signal.SIGUSR2)


def start_agent(attempt: Attempt) -> None:
    """Replace this process by the node's agent, from the copy or, if there can't be one, from the original.

    A missing copy costs time and no result, so it is a warning: in the node's log and as an event.
    """
    python = attempt.settings.python
    try:
        with _stopping(attempt):
            python = staged(python, attempt.settings.stage, attempt)
    except (SlurmddpError, OSError) as error:
        _warn(attempt, f"{plain(error)}." if isinstance(error, OSError) else str(error))
    try:
        os.execvp(python, [python, "-m", "slurmddp.launchers.agent", str(attempt.folder.path)])
    except OSError as error:
        raise SystemExit(f"{python} can't be started on {os.uname().nodename}: {plain(error)}.") from error


def staged(python: str, folder: str, attempt: Attempt) -> str:
    """Return the interpreter of the copy, which is made if this node has none.

    Args:
        python: the interpreter of the environment, a path or a name on PATH.
        folder: a folder on the node's own disk; environment variables in it are replaced.
        attempt: the attempt that starts.

    Raises:
        ConfigError: the interpreter stands in no environment, or the folder is not safe to use.
        SlurmddpError: the copy failed.
        OSError: the folder can't be written.
    """
    environment = environment_of(python)
    place = _own_folder(folder)
    copy = place / key(environment)
    lock = os.open(f"{copy}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.utime(lock)  # No program that removes old files takes it for one.
        _make(environment, copy, lock, attempt)
        os.utime(copy)
        folder_lock = os.open(copy, os.O_RDONLY | os.O_DIRECTORY)
    except BaseException:
        os.close(lock)
        raise
    fcntl.flock(folder_lock, fcntl.LOCK_SH)
    for descriptor in (lock, folder_lock):
        os.set_inheritable(descriptor, True)  # The agent holds the locks as long as it lives.
    remove_unused(place)
    return str(copy / "bin" / Path(shutil.which(python) or python).name)


def _make(environment: Path, copy: Path, lock: int, attempt: Attempt) -> None:
    """Make the copy unless it is whole, and return with a shared lock.

    Raises:
        SlurmddpError: the copy failed, or a copy that is not whole is used by another job.
    """
    fcntl.flock(lock, fcntl.LOCK_SH)
    began = time.monotonic()
    while not is_whole(copy):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:  # Jobs that ask at once give way to each other for different times.
            if copy.exists() and time.monotonic() - began > _IN_USE_S:
                raise SlurmddpError(f"Files are missing in {copy}, which another job uses.") from error
            time.sleep(random.uniform(0, 0.1))
        else:
            if not is_whole(copy):
                if copy.exists():
                    _put_aside(copy)
                begin = time.monotonic()
                _copy(environment, copy)
                attempt.say(f"{environment} was copied to {copy} in {time.monotonic() - begin:.1f} s")
        fcntl.flock(lock, fcntl.LOCK_SH)  # Waits while another job makes the copy.


def is_whole(copy: Path) -> bool:
    """Return whether a copy has all the files that it had when it was made."""
    try:
        listed = json.loads((copy / _LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    files = _sizes(copy)
    return all(files.get(path, -1) >= size for path, size in listed.items())


def _sizes(copy: Path) -> dict[str, int]:
    """Return the size of each file by its path, without compiled modules, which Python replaces."""
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
    """Return the folder of the environment whose `bin` holds the interpreter; raises ConfigError."""
    path = shutil.which(python)
    if path is None:
        raise ConfigError(f"There is no interpreter {python} on this node.")
    found = Path(path).absolute().parent.parent  # A venv's python links to the base: don't follow it.
    if not any((found / mark).exists() for mark in _MARKS):
        raise ConfigError(f"{path} belongs to no virtual environment and no conda environment.")
    return found


def key(environment: Path) -> str:
    """Return the name of the copy: a hash of the environment's path and of its installed packages.

    Files that were edited within a package don't change the name.
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


def remove_unused(place: Path) -> None:
    """Remove what no job uses: copies without a use for a week, and the rest of interrupted calls.

    The removal goes on in the background, since an environment has tens of thousands of files.
    """
    for path in list(place.iterdir()):
        if path.suffix in ("", ".part"):
            with suppress(OSError), open(path.with_suffix(".lock"), "a") as lock:
                is_old = time.time() - path.stat().st_mtime >= UNUSED_S
                if path.suffix == ".part" or is_old:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _put_aside(path)
    gone = [str(path) for path in place.glob("*.gone")]
    if gone:
        # The shell ends at once, so that the agent gets no child that it does not know.
        command = ["sh", "-c", 'rm -rf -- "$@" </dev/null >/dev/null 2>&1 &', "sh", *gone]
        with suppress(OSError):
            subprocess.run(command, stdin=subprocess.DEVNULL, start_new_session=True, check=False)


def _put_aside(path: Path) -> None:
    """Take the name from a copy that is to be removed; raises BlockingIOError if a job uses it."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.rename(path.with_name(f"{path.stem}-{secrets.token_hex(4)}.gone"))
    finally:
        os.close(folder)


def _own_folder(folder: str) -> Path:
    """Return the user's folder below `folder`; in a `/tmp` another user may have put something there."""
    base = os.path.expandvars(folder)
    if not Path(base).is_absolute() or "$" in base:
        raise ConfigError(f"cluster.stage={folder} is {base!r} on this node, which is not an absolute path.")
    place = Path(base, f"slurmddp-{os.getuid()}")
    who = other_writers(Path(base))
    if who:
        raise ConfigError(f"{base} is writable for {who}, who can put other files in the place of {place}.")
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(f"{place} is not a folder that only you can write.")
    return place


def _copy(environment: Path, copy: Path) -> None:
    """Copy under another name, check that the interpreter runs there, list the files, then rename."""
    part = copy.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)  # Left by a job that was killed.
    try:
        # Times too, because Python compares a module's time with its compiled file.
        _run("cp", "-dR", "--preserve=mode,timestamps,links", f"{environment}/.", str(part))
        prefix = _run(str(part / "bin/python"), "-Ic", "import sys; print(sys.prefix)")
        if prefix != str(part):
            raise SlurmddpError(f"The interpreter of the copy {part} uses {prefix}.")
        sizes = _sizes(part)
        sizes.pop(_LIST, None)  # The environment may be such a copy itself.
        (part / _LIST).write_text(json.dumps(sizes), encoding="utf-8")
        part.rename(copy)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _run(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except subprocess.CalledProcessError as error:
        last = [error.returncode, *error.stderr.splitlines()][-1]
        raise SlurmddpError(f"`{words[0]}` failed: {last}.") from error


@contextmanager
def _stopping(attempt: Attempt) -> Iterator[None]:
    """End with 75 if SLURM ends the job during the copy: nothing has been trained, the run is requeued."""

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


def _warn(attempt: Attempt, why: str) -> None:
    host = os.uname().nodename
    text = f"The Python environment was not copied on {host}: {why} The ranks there use the original."
    attempt.say(text)
    with said_if_not_recorded("warned", attempt.say):
        attempt.folder.add_event("warned", attempt=attempt.number, about="stage", text=text)
