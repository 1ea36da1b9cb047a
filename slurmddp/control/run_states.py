"""Refuse an action on a run whose state does not allow it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from slurmddp.errors import ConfigError, RunStateError, SlurmError
from slurmddp.runs.folder.layout import RunFolder

if TYPE_CHECKING:
    from slurmddp.runs.status.run_status import RunStatus


def refuse_unclear(status: RunStatus) -> None:
    """Raise an error if the state of a run is unknown, or if a stopped or cancelled run has not ended yet.

    Raises:
        ConfigError: a record of the run can't be read.
        SlurmError: SLURM does not answer.
        RunStateError: the run was asked to stop or was cancelled, and has not ended yet.
    """
    if status.state == "unknown" and status.job_id is None:
        raise ConfigError(
            f"The state of {status.name} is not known: {status.detail.rstrip('.')}.",
            hint="Repair the unreadable file, or start from step 0 with `slurmddp train ... --again`.",
        )
    if status.state == "unknown":
        raise SlurmError(
            f"The state of job {status.job_id} of {status.name} is not known: {status.detail}.",
            hint="Nothing was submitted. Run the command again when SLURM answers.",
        )

    shown = f"`slurmddp status {status.name}` shows"
    if status.active and RunFolder(status.path).is_stopped:
        reason = "was asked to stop and has not ended yet"
        hint = f"Nothing was started. Run the command again when {shown} stopped."
    elif status.state == "cancelled":
        reason = "is cancelled"
        hint = f"Nothing was submitted. Run the command again when {shown} that the run has ended."
    else:
        return

    raise RunStateError(f"{status.name} {reason}: {status.detail}.", hint=hint)


def refuse_active(status: RunStatus, *, unchanged: str, hint: str) -> None:
    """Raise an error if a run has a job or a process.

    Args:
        status: the status of the run.
        unchanged: a sentence for the message, such as "Nothing was changed."
        hint: advice to the person, as a sentence.

    Raises:
        RunStateError: the run is active, or still ending.
        ConfigError: the run may be active, but its record can't be read.
        SlurmError: the run may be active, but SLURM does not answer.
    """
    if status.active:
        refuse_unclear(status)
        raise RunStateError(f"{status.name} is {status.state}: {status.detail}. {unchanged}", hint=hint)


def refuse_finished(status: RunStatus, changes: Iterable[str] = ()) -> None:
    """Raise RunStateError if a run has finished, unless a changed setting makes it train further.

    Args:
        status: the status of the run.
        changes: the typed settings with new values.
    """
    from slurmddp.config.extension import keys_that_extend
    from slurmddp.settings.arguments import key_of

    if status.state != "finished":
        return

    program = RunFolder(status.path).config().get("program")
    step = status.step
    total = status.total_steps
    is_out_of_time = step is not None and total is not None and step < total
    extending = keys_that_extend(program, is_out_of_time=is_out_of_time)
    if not any(key_of(change) in extending for change in changes):
        raise RunStateError(
            f"{status.name} has finished: {status.detail}.",
            hint=_how_to_extend(status.name, extending)
            + f"`slurmddp rerun {status.name}` starts its command as a new run, also with other settings.",
        )


def _how_to_extend(name: str, keys: Collection[str]) -> str:
    """Return a sentence about how to train a finished run further.

    Args:
        name: name of the run.
        keys: the keys whose change extends the run; without keys, the sentence is empty.
    """
    if not keys:
        return ""

    key = next(iter(keys))
    if key.startswith("train."):
        return f"`slurmddp resume {name} {key}=...` with a greater value trains it further. "
    return (
        f"If an argument of its program sets how long it trains, `slurmddp resume {name} {key}='...'` starts "
        "the program again in the same folder, with that argument after the others. "
    )
