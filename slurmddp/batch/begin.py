"""Claim an attempt before the ranks start; start nothing if the run is over or another job trains it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from slurmddp.batch.attempt import Attempt, BatchSettings, read_settings
from slurmddp.batch.node_exclusion import Exclusions, note_vanished
from slurmddp.batch.requeue import leave_no_held_job
from slurmddp.batch.slurm_job import SlurmJob, ask_at_once
from slurmddp.environments.names import (
    ATTEMPT_VARIABLE,
    END_TIME_VARIABLE,
    KILL_WAIT_VARIABLE,
    LEAD_VARIABLE,
    PREEMPT_GRACE_VARIABLE,
    SIGNALS_ALL_VARIABLE,
)
from slurmddp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_FINISHED
from slurmddp.runs.folder.late_files import look_again
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.command_output import parse_time
from slurmddp.slurm.job_script import may_be_of, script_of

_TURNS = ("submitted", "started", "ended")
"""The events by which a run changes to waiting, running or over."""
_SIGNALS_ALL = "proctrack/linuxproc"
"""With this ProctrackType SLURM signals every process of a step; with any other type only the tasks."""
_SLURM_ID = re.compile(r"\d+(_\d+)?")
"""The id of a job, or of an element of an array; local runs have other ids."""
_OVER = ("finished", "failed", "config", "no_progress")
"""Outcomes after which no job of the run trains."""


def begin(folder: RunFolder, job: SlurmJob, *, started_as: str = "") -> int:
    """Claim an attempt and print its variables for the shell; print nothing if no attempt may start.

    Args:
        folder: the run folder.
        job: the job that starts.
        started_as: the argument of the batch script: `resubmitted` if another job of the run submitted this
            job, `element` if the script of a sweep's array runs it.

    Returns:
        The exit code with which the batch script ends if nothing is printed.
    """
    if not job.id:
        job.log("SLURM_JOB_ID is not set. Submit this script with sbatch.")
        return EXIT_FAILED

    array = job.environ.get("SLURM_ARRAY_JOB_ID")
    if array and started_as != "element":
        job.log(
            f"Job {array} is an array, and its elements would all train in one run folder. Nothing was "
            "started. `slurmddp train -m` submits an array with a run for each element."
        )
        leave_no_held_job(job)
        return EXIT_CONFIG

    # The submission has just changed the folder, so this host may have an old listing in its cache.
    look_again(folder.path)
    settings = read_settings(folder)
    events = folder.readable_events()
    refusal = _refusal(folder, job, settings, events, started_as == "resubmitted")
    if refusal:
        job.log(refusal)
        return EXIT_FINISHED
    if _leaves_failed_nodes(folder, job, settings, events):
        return EXIT_FINISHED

    # The queries run in the background while the attempt is recorded.
    await_limits = limits(job, settings.signal_lead_s, settings.grace_s)
    try:
        number = folder.claim_attempt()
    except OSError as error:
        job.log(f"Cannot write to {folder.path}/logs on {os.uname().nodename}: {error.strerror}.")
        leave_no_held_job(job)
        return EXIT_FAILED

    Attempt(folder, number, settings, job.id, job.log).start(job.node_list, job.restart_count)

    for name, value in {ATTEMPT_VARIABLE: str(number), **await_limits()}.items():
        print(f"export {name}={shlex.quote(value)}")
    if settings.unset:
        print(f"unset -v {' '.join(settings.unset)}")
    return EXIT_FINISHED


def _refusal(
    folder: RunFolder,
    job: SlurmJob,
    settings: BatchSettings,
    events: list[dict[str, Any]],
    is_resubmitted: bool,
) -> str:
    """Return the reason why this job starts no attempt; empty if it may start one."""
    name = folder.path.name
    if folder.is_cancelled:
        return "This run was cancelled."
    if folder.is_stopped:
        return f"A person stopped this run; resume it with: slurmddp resume {name}"

    outcome = _final_outcome(events, job, is_resubmitted)
    if outcome:
        return f"This run has ended already ({outcome}); resume it with: slurmddp resume {name}"

    owner = _owner(events, job, {settings.name, name})
    if owner:
        return (
            f"Job {owner} runs this run already, so job {job.id} starts nothing. "
            f"To end the other job: slurmddp stop {name}"
        )
    return ""


def _final_outcome(events: list[dict[str, Any]], job: SlurmJob, is_resubmitted: bool) -> str:
    """Return the outcome of a run that is over, for a requeued or resubmitted job; empty otherwise.

    SLURM may restart a job whose run has ended (a site's RequeueExit, `scontrol requeue` by hand). A run may
    also end before a resubmitted job starts.
    """
    turns: list[Mapping[str, Any]] = [event for event in events if event.get("event") in _TURNS]
    if not turns or not (is_resubmitted or job.restart_count):
        return ""

    last = turns[-1]
    is_over = last["event"] == "ended" and last.get("next") == "none" and "requeued" not in last
    if is_over and last.get("outcome") in _OVER:
        return str(last["outcome"])
    return ""


def _owner(events: list[dict[str, Any]], job: SlurmJob, names: Collection[str]) -> str:
    """Return the other job that trains this run now, as `ID on NODES`; empty if no other job does.

    The other job counts if SLURM shows it as running and its newest attempt has no `ended` event.
    """
    last_events: dict[str, str] = {}
    for event in events:
        job_id = str(event.get("job_id", ""))
        if event.get("event") in ("started", "ended") and _SLURM_ID.fullmatch(job_id):
            last_events[job_id] = event["event"]
    open_jobs = [other for other, kind in last_events.items() if kind == "started" and other != job.id]
    if not open_jobs:
        return ""

    for queued in job.queue("--jobs", ",".join(sorted(open_jobs))) or ():
        # The id may now belong to a job of another run: another cluster uses the same ids, and so does a
        # slurmctld that has lost its state.
        is_ours = may_be_of(names, queued.run, script_of(queued.job_id, queued.script))
        if queued.state in ("RUNNING", "SUSPENDED", "STOPPED") and is_ours:
            return f"{queued.job_id} on {queued.nodes}"
    return ""


def _leaves_failed_nodes(
    folder: RunFolder, job: SlurmJob, settings: BatchSettings, events: list[dict[str, Any]]
) -> bool:
    """Requeue the job if it got a node that failed during the last attempt and other nodes are free soon.

    `Exclusions.others_are_free` decides whether other nodes are free soon.

    Returns:
        Whether SLURM has requeued the job.
    """
    exclusions = Exclusions(folder, job, settings, start_time=int(time.time()))
    is_noted = note_vanished(exclusions, folder, events)
    if not (is_noted and settings.requeue and exclusions.others_are_free()):
        return False

    exclusions.choose()
    # When SLURM grants the requeue, it sends SIGTERM to this process and to the commands that this process
    # has started. They must ignore it, because SLURM accepts a change of the job's excluded nodes only after
    # the requeue.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reply = job.scontrol("requeue", job.id)
    if reply.code == 0:
        exclusions.send()
        return True

    job.log(reply.err.strip())
    signal.signal(signal.SIGTERM, before)
    return False


def limits(job: SlurmJob, signal_lead_s: int, grace_s: int | None) -> Callable[[], dict[str, str]]:
    """Query SLURM for the end of the job, the time until SIGKILL, and which processes of a step it signals.

    The batch step asks SLURM once for all ranks: queries from a thousand ranks would load slurmctld.

    Args:
        job: the job.
        signal_lead_s: `policy.signal_lead_s`; returned as a variable, too.
        grace_s: `policy.grace_s`, instead of SLURM's KillWait and GraceTime; None: ask SLURM for both.

    Returns:
        A function that waits for the replies and returns the environment variables by name; an unknown value
        is empty.
    """

    def end_time() -> str:
        job.poll()
        end = parse_time(job.facts.get("EndTime", ""))
        return "" if end is None else f"{end:.0f}"

    def signals_all() -> str:
        return "1" if job.config("ProctrackType") == _SIGNALS_ALL else ""

    values = {LEAD_VARIABLE: str(signal_lead_s)}
    queries = {END_TIME_VARIABLE: end_time, SIGNALS_ALL_VARIABLE: signals_all}
    if grace_s is None:
        queries[KILL_WAIT_VARIABLE] = lambda: job.config("KillWait")
        queries[PREEMPT_GRACE_VARIABLE] = job.preemption_grace
    else:
        values.update({KILL_WAIT_VARIABLE: str(grace_s), PREEMPT_GRACE_VARIABLE: "0"})

    await_replies = ask_at_once(queries)
    return lambda: {**values, **await_replies()}
