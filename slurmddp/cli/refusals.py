"""Refuse to start or change a run in a state that does not allow it."""

from __future__ import annotations

from slurmddp.errors import ConfigError, RunStateError, SlurmError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import RunStatus


def refuse_unclear(found: RunStatus) -> None:
    """Raise if the state of a run is not known, or if the run is still ending."""
    if found.state == "unknown" and found.job_id is None:
        raise ConfigError(
            f"The state of {found.name} is not known: {found.detail.rstrip('.')}.",
            hint="Mend that file, or start the run from step 0 with `slurmddp train ... --again`.",
        )
    if found.state == "unknown":
        raise SlurmError(
            f"The state of job {found.job_id} of {found.name} is not known: {found.detail}.",
            hint="Try again when SLURM answers; nothing was submitted.",
        )
    if found.active and RunFolder(found.path).stop_file.exists():
        reason = "was asked to stop and has not ended yet"
        hint = f"Try again when `slurmddp status {found.name}` says stopped; nothing was started."
    elif found.state == "cancelled":
        reason, hint = "is cancelled", "Try again in a moment; nothing was submitted."
    else:
        return
    raise RunStateError(f"{found.name} {reason}: {found.detail}.", hint=hint)


def refuse_active(found: RunStatus, *, unchanged: str, hint: str) -> None:
    """Raise RunStateError if a run has a job or process.

    Args:
        found: the state of the run.
        unchanged: a sentence that says what was not done.
        hint: a sentence that says what to do first.
    """
    if found.active:
        refuse_unclear(found)
        raise RunStateError(f"{found.name} is {found.state}: {found.detail}. {unchanged}", hint=hint)


def refuse_finished(found: RunStatus) -> None:
    """Raise RunStateError if a run has done all its steps."""
    if found.state == "finished":
        raise RunStateError(
            f"{found.name} has finished: {found.detail}.",
            hint=f"`slurmddp rerun {found.name}` starts its command as a new run, also with other settings.",
        )
