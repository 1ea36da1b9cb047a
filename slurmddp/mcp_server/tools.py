"""The tools of the server: each method calls one action of `slurmddp.control` and returns its result.

The module has no `from __future__ import annotations`, because pydantic reads annotations as objects.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field

from slurmddp.control.cancel import Cancelled, cancel
from slurmddp.control.check import Checked
from slurmddp.control.diff import Difference, diff
from slurmddp.control.events import CodeSent, HostUnknown, Info
from slurmddp.control.explain import Explanation, explain
from slurmddp.control.listing import Listing, list_runs
from slurmddp.control.logs import Logs, logs
from slurmddp.control.plan import StartPlan
from slurmddp.control.points import (
    check_points,
    plan_points,
    points_of_settings,
    resume_and_return,
    start_planned,
)
from slurmddp.control.report import Reported, report
from slurmddp.control.start import Started, warnings_of
from slurmddp.control.status import RunDetails, status
from slurmddp.control.stop import Stopped, stop
from slurmddp.errors import ConfigError, UsageError
from slurmddp.runs import ssh_runs
from slurmddp.runs.text_format import STATE_STYLES

Result = TypeVar("Result")

MOST_LINES = 400
"""Largest number of last lines of each log that `logs` reads."""
MOST_RUNS = 100
"""Largest number of runs that `list` returns."""

Settings = Annotated[
    Sequence[str],
    Field(
        description="settings as typed in a shell, one item each: ['+cluster=a100x8', 'nodes=3', "
        "'train.steps=1000']. With sweep, an item may have several values: 'seed=1,2'"
    ),
]
Program = Annotated[
    Sequence[str],
    Field(
        description="your own program and its arguments, one item each: ['train.py', '--lr', '1e-3'], or "
        "['-m', 'package.train']. Empty: slurmddp's trainer, with the model and data of the settings"
    ),
]
Sweep = Annotated[bool, Field(description="start one run for each combination of the values")]
RunName = Annotated[str, Field(description="name of a run, or its beginning")]
RunOrSweep = Annotated[str, Field(description="name of a run or a sweep, or its beginning")]
RunOrNewest = Annotated[
    str | None, Field(description="name of a run, or its beginning; null: the newest run")
]


class Tools:
    """The tools of one call.

    Attributes:
        messages: what the called action has reported, as sentences for the agent.

    Args:
        writes: whether the server has the tools that start or change runs. Without them, a plan may not copy
            code to a login node.
    """

    def __init__(self, *, writes: bool) -> None:
        self.messages: list[str] = []
        self._writes = writes

    def plan(self, settings: Settings = (), program: Program = (), sweep: Sweep = False) -> StartPlan:
        """Show what `submit` would do with these settings: runs, resources, the batch script, and notes.

        Nothing is queued or written. Read the script and the notes, then pass `id` to `submit`. A run with
        `exists: true` is resumed, or left as it is if it is active or has finished.
        """
        points = points_of_settings(settings, program, is_sweep=sweep)
        return self._with_settings(plan_points, points, is_sweep=sweep)

    def check(self, settings: Settings = (), program: Program = (), sweep: Sweep = False) -> Checked:
        """Ask SLURM whether it would start a job with these settings, and when; nothing is queued.

        `reasons` is empty if SLURM would start it. For jobs on a cluster (+cluster=NAME) only.
        """
        points = points_of_settings(settings, program, is_sweep=sweep)
        return self._with_settings(check_points, points)

    def submit(
        self,
        plan: Annotated[str, Field(description="the `id` that the tool `plan` returned")],
        settings: Settings = (),
        program: Program = (),
        sweep: Sweep = False,
    ) -> Started:
        """Start what `plan` has shown: submit the job, or train on this machine in the background.

        Takes the same settings, program and sweep as `plan`. If the settings, configuration files or code
        have changed since the plan, nothing is started; plan again. Returns once the job is queued. The
        person who started the server pays for the job: show the plan before you submit it.
        """
        points = points_of_settings(settings, program, is_sweep=sweep)
        return self._with_settings(start_planned, points, plan, is_sweep=sweep, reports=True)

    def list_runs(
        self,
        sweep: Annotated[str | None, Field(description="only the runs of this sweep")] = None,
        name: Annotated[str, Field(description="only runs whose names begin with this text")] = "",
        states: Annotated[
            Sequence[str], Field(description=f"only runs in these states: {', '.join(STATE_STYLES)}")
        ] = (),
        limit: Annotated[int, Field(ge=1, le=MOST_RUNS, description="largest number of runs")] = 20,
    ) -> Listing:
        """List the runs of this account, the most recently active first, with state, step and loss.

        `more` is the number of runs beyond `limit`.
        """
        unknown = [state for state in states if state not in STATE_STYLES]
        if unknown:
            raise UsageError(
                f"There is no state {unknown[0]!r}.", hint=f"States are {', '.join(STATE_STYLES)}."
            )

        host_of_sweep = ssh_runs.find(sweep) if sweep is not None else None
        if host_of_sweep is not None:
            return self._of_run(list_runs, sweep, name=name, states=list(states), limit=limit)

        over_ssh = []
        if sweep is None and ssh_runs.are_recorded():
            # Imported only if runs over ssh are recorded: the modules that connect to hosts load slowly.
            from slurmddp.control.ssh.statuses import statuses_over_ssh

            over_ssh = statuses_over_ssh(self._report)
        return list_runs(sweep, name=name, states=states, limit=limit, over_ssh=over_ssh)

    def status(
        self,
        run: Annotated[
            str | None, Field(description="name of a run or a sweep, or its beginning; null: the newest run")
        ] = None,
    ) -> RunDetails | Listing:
        """Return state, step, loss, attempts and failure of a run; of a sweep, the states of its runs.

        The state `unknown` means that nothing is known, not that the run has ended.
        """
        return self._of_run(status, run, write_report=False)

    def explain(self, run: RunOrNewest = None) -> Explanation:
        """Explain why a run waits: SLURM's reason, its place in the queue, limits, expected start."""
        return self._of_run(explain, run)

    def logs(
        self,
        run: RunOrNewest = None,
        ranks: Annotated[Sequence[int], Field(description="ranks; empty: rank 0")] = (),
        nodes: Annotated[Sequence[int], Field(description="nodes, whose agents' logs are read")] = (),
        everything: Annotated[bool, Field(description="all ranks, agents and the batch script")] = False,
        attempt: Annotated[int | None, Field(description="number of the attempt; null: the newest")] = None,
        lines: Annotated[int, Field(ge=1, le=MOST_LINES, description="last lines of each log")] = 40,
    ) -> Logs:
        """Return the last lines of the logs of a run, each with the label of its log."""
        return self._of_run(
            logs,
            run,
            ranks=list(ranks),
            nodes=list(nodes),
            everything=everything,
            attempt=attempt,
            lines=lines,
        )

    def diff(
        self,
        first: RunName,
        second: Annotated[
            str | None, Field(description="the other run; null: the newest run other than the first")
        ] = None,
    ) -> Difference:
        """Compare two runs: the settings in which they differ, and their results."""
        if second is None:
            return self._of_run(diff, first)

        hosts = [ssh_runs.find(first), ssh_runs.find(second)]
        if len({run and run.host for run in hosts}) > 1:
            raise UsageError(
                "The two runs are on different machines.",
                hint="Choose runs on one machine: the `path` of a run on a login node begins with its host.",
            )
        return self._of_run(diff, first, second if hosts[1] is None else hosts[1].name)

    def report(self, run: RunOrNewest = None) -> Reported:
        """Write the HTML report of a run, or of a sweep and its runs, and return its path for a person."""
        known = ssh_runs.find(run)
        if known is None:
            return report(run)

        from slurmddp.control.ssh.reports import fetch_report

        return fetch_report(known, self._report)

    def stop(self, run: RunOrSweep) -> Stopped:
        """Let a run, or the runs of a sweep, save a checkpoint and stop; they stay stopped until `resume`."""
        return self._of_run(stop, run, changes=True)

    def cancel(self, run: RunOrSweep) -> Cancelled:
        """End a run, or the runs of a sweep, at once. Steps after the last checkpoint may be lost.

        Prefer `stop`, which saves first.
        """
        return self._of_run(cancel, run, changes=True)

    def resume(
        self,
        run: RunOrSweep,
        changes: Annotated[
            Sequence[str],
            Field(
                description="settings with new values: ['time_limit=24:00:00', 'nodes=2', 'train.steps=800']"
            ),
        ] = (),
    ) -> Started:
        """Resume an ended run from its last checkpoint, or train a finished run further."""
        known = ssh_runs.find(run)
        if known is not None:
            return self._of_run(resume_and_return, run, list(changes), changes=True)
        return resume_and_return(run, changes, report=self._report)

    def _with_settings(
        self,
        action: Callable[..., Result],
        points: Any,
        *arguments: Any,
        reports: bool = False,
        **keywords: Any,
    ) -> Result:
        """Call an action with typed settings, here or on the login node that the settings name.

        Args:
            action: the action; its first argument is `points`.
            points: the typed settings of each job.
            arguments: its further positional arguments.
            reports: whether the action takes an argument `report`.
            keywords: its keyword arguments.
        """
        from slurmddp.config.composition.compose import login_node

        keys = login_node(points[0], Path.cwd())
        if keys is None:
            if reports:
                keywords["report"] = self._report
            return action(points, *arguments, **keywords)

        if not self._writes:
            raise ConfigError(
                f"The settings name the login node {keys['ssh']}. A plan or check there would first copy the "
                "project's code to it, but this server was started without --write. Nothing was copied.",
                hint="Start the server with `slurmddp mcp --write`, or on the login node itself.",
            )

        from slurmddp.control.ssh.start_jobs import call_with_code

        return call_with_code(keys, action, points, *arguments, report=self._report, silent=True, **keywords)[
            0
        ]

    def _of_run(
        self,
        action: Callable[..., Result],
        run: str | None,
        *arguments: Any,
        changes: bool = False,
        **keywords: Any,
    ) -> Result:
        """Call an action about a run, here or on the login node on which the run was submitted.

        Args:
            action: the action; its first argument is the name of the run.
            run: name of the run; None: the newest run.
            arguments: its further positional arguments.
            changes: whether the action continues if the connection to the login node breaks.
            keywords: its keyword arguments.
        """
        known = ssh_runs.find(run)
        if known is None:
            return action(run, *arguments, **keywords)

        from slurmddp.control.ssh.runs import call

        options = {"silent": True, "report": self._report}
        return call(known, action, known.name, *arguments, changes=changes, options=options, **keywords)

    def _report(self, event: object) -> None:
        """Add what an event reports to the messages."""
        self.messages += warnings_of(event)
        match event:
            case Info(text):
                self.messages.append(text)
            case HostUnknown(host, reason):
                self.messages.append(f"{host} does not answer: {reason}")
            case CodeSent(host, folder, left_out=names) if names:
                self.messages.append(
                    f"Not sent to {host}:{folder}, because they may hold passwords or keys: "
                    f"{', '.join(names)}"
                )


class Tool(NamedTuple):
    """A tool of the server: its method, and what it may change."""

    method: str
    """Name of the method of `Tools`."""
    writes: bool = False
    """Whether it starts, changes or writes something, so that only a server with `--write` has it."""
    destroys: bool = False
    """Whether it may end what cannot be brought back."""
    repeats: bool = True
    """Whether a second call with the same arguments changes nothing more."""


TOOLS = {
    "plan": Tool("plan"),
    "check": Tool("check"),
    "list": Tool("list_runs"),
    "status": Tool("status"),
    "explain": Tool("explain"),
    "logs": Tool("logs"),
    "diff": Tool("diff"),
    "report": Tool("report", writes=True),
    "submit": Tool("submit", writes=True),
    "resume": Tool("resume", writes=True, repeats=False),
    "stop": Tool("stop", writes=True),
    "cancel": Tool("cancel", writes=True, destroys=True),
}
"""The tools by the names that agents see."""
