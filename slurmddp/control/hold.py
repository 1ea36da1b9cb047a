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
    """Acquire the lock of a run; wait while another command holds it.

    If a launcher on this machine trains the run, it keeps the lock until the training ends. The call does not
    wait for it.

    Args:
        folder: the run folder.
        report: called with `Waiting` if the wait takes longer than a second.

    Returns:
        The lock. If its `fileno` is negative, a launcher holds the lock instead of the caller.

    Raises:
        ConfigError: the folder is not a run folder, or belongs to another account.
    """
    if not folder.config_file.is_file():
        raise ConfigError(
            f"{folder.path} exists, but it is no run folder: it has no config.yaml.",
            hint="Remove this folder, or choose another name= or runs_dir=.",
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
    """Move the lock of a run to a new object, so that the `with` block of `lock` does not release it.

    Args:
        lock: the lock that `hold` returned. If a launcher held it, this call tries once more to acquire it.
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
