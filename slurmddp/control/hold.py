"""Hold the lock of a run, so that two commands never start or change it at the same time."""

from __future__ import annotations

from slurmddp.control.events import Report, Waiting
from slurmddp.errors import ConfigError
from slurmddp.launchers.local.run import still_ending
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.lock import RunLock
from slurmddp.runs.folder.owner import refuse_foreign
from slurmddp.runs.status.run_status import status


def hold(folder: RunFolder, report: Report) -> RunLock:
    """Acquire the lock of a run; wait if another command holds it.

    Args:
        folder: the run.
        report: called with `Waiting` if another command holds the lock.

    Returns:
        The lock. Its `fileno` is negative if a launcher on this machine trains the run, and keeps the lock.

    Raises:
        ConfigError: the folder is not a run folder.
    """
    if not folder.config_file.is_file():
        raise ConfigError(
            f"{folder.path} exists, but it is no run folder: it has no config.yaml.",
            hint="Remove it, or choose another name= or runs_dir=.",
        )

    refuse_foreign(folder.path)

    def is_taken() -> bool:
        run = status(folder, None)
        return run.active and run.launcher == "local"

    def waiting() -> None:
        reason = f"Another command is starting {folder.name}; waiting for it."
        if status(folder, None).launcher == "local":
            reason = still_ending(folder)

        report(Waiting(folder.name, reason))

    lock = RunLock(folder)
    lock.wait(is_taken, waiting=waiting)

    return lock


def keep(lock: RunLock, name: str) -> RunLock:
    """Hand the lock of a run over to a new holder, which may outlive the context of `lock`.

    Args:
        lock: the lock.
        name: name of the run.

    Raises:
        ConfigError: another process of this machine trains the run, and holds the lock.
    """
    if lock.fileno < 0 and not lock.acquire():
        raise ConfigError(
            f"{name} is being trained by another process of this machine.",
            hint=f"Follow it with `slurmddp logs -f {name}`, or give this run another name=.",
        )

    return lock.hand_over()
