"""Search with Optuna: start some trials, wait for their results, and choose the next ones by them.

A trial is a run, and the runs are the memory of the search: the same command line suggests the same trials,
reads the results of the runs that are finished, and goes on with the others. Source of the sampler: Bergstra
et al., Algorithms for Hyper-Parameter Optimization (2011), as Optuna implements it.
"""

from __future__ import annotations

import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slurmddp.cli import start_run, start_sweep
from slurmddp.config.composition.search_space import Choices, Interval, Search
from slurmddp.config.script_arguments import as_typed
from slurmddp.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    ConfigError,
    SlurmddpError,
    combine_exit_codes,
    near_matches,
)
from slurmddp.runs import sweeps
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.compared_metric import ComparedMetric, compared_metric
from slurmddp.runs.status.metrics import Metrics, read
from slurmddp.runs.status.run_end import end_of
from slurmddp.runs.text_format import counted, number
from slurmddp.slurm import client

if TYPE_CHECKING:
    from slurmddp.spec import Job

_POLL_S = 0.5
"""Seconds between two looks at a run folder; SLURM is asked at most twice a minute."""
_MOST_FAILED = 3
"""After so many trials a search ends if none of them has finished."""
JobsOf = Callable[[Sequence[Sequence[str]]], Sequence["Job"]]
"""Makes the job of each command line."""


class Sampler:
    """Suggests command lines, and learns from their results."""

    def __init__(self, search: Search) -> None:
        try:
            import optuna
        except ImportError as error:
            hint = "Install it: pip install 'slurmddp[optuna]'."
            raise ConfigError("hydra/sweeper=optuna needs the package optuna.", hint=hint) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._search = search
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # Trials that are not told yet count as bad ones, so that those of one batch differ.
            sampler = optuna.samplers.TPESampler(seed=search.seed, constant_liar=True)
        self._study = optuna.create_study(sampler=sampler)
        self._asked: list[Any] = []

    def suggest(self, count: int) -> list[list[str]]:
        """Return the command lines of the next trials."""
        self._asked = [self._study.ask() for _ in range(count)]
        return [
            self._search.point({
                word: _choose(trial, word, values) for word, values in self._search.parameters.items()
            })
            for trial in self._asked
        ]  # fmt: skip

    def tell(self, losses: Sequence[float | None]) -> None:
        """Give the results of the trials of the last `suggest`: less is better; None: it has failed."""
        from optuna.trial import TrialState

        for trial, loss in zip(self._asked, losses, strict=True):
            self._study.tell(trial, loss, TrialState.FAIL if loss is None else TrialState.COMPLETE)


def _choose(trial: Any, word: str, values: Choices | Interval) -> str:
    if isinstance(values, Interval):
        suggest = trial.suggest_int if isinstance(values.low, int) else trial.suggest_float
        return values.setting(suggest(word, values.low, values.high, log=values.is_log))
    if values.is_ordered:
        return values.settings[int(trial.suggest_int(word, 0, len(values.settings) - 1))]
    chosen: str = trial.suggest_categorical(word, values.settings)
    return chosen


def first_jobs(search: Search, jobs_of: JobsOf) -> list[Job]:
    """Return the jobs of the first trials, which start together."""
    jobs = jobs_of(Sampler(search).suggest(min(search.at_once, search.trials)))
    return list({job.run_name: job for job in jobs}.values())


def start(search: Search, jobs_of: JobsOf, begin: start_sweep.Begin, *, again: bool = False) -> int:
    """Run all trials, print the best one, and return the exit code.

    Args:
        search: what is searched.
        jobs_of: makes the job of each command line.
        begin: starts one run, or submits it.
        again: whether finished runs are started once more.

    Raises:
        ConfigError: Optuna is missing, a trial can't be started, or nothing says which value is best.
        SlurmddpError: a trial has finished and has not logged the metric, or the first trials have failed.
    """
    sampler, results, tried = Sampler(search), Results(search), 0
    while tried < search.trials:
        jobs = jobs_of(sampler.suggest(min(search.trials - tried, search.at_once)))
        start_sweep.refuse_misfits(jobs)
        fresh = results.add(jobs)
        if not tried:
            print(f"sweep   {results.sweep}  ({counted(search.trials, 'trial')})")
        lines = {
            job.run_name: f"trial   {at} of {search.trials}  {results.line(job)}"
            for at, job in enumerate(jobs, tried + 1)
        }
        left = [job for job in fresh if again or not _is_finished(job)]
        codes = start_sweep.start_points(left, begin, results.sweep, lines)
        if not start_sweep.GIVEN_UP.isdisjoint(codes):
            print("slurmddp: the search stops here; the same command continues it.", file=sys.stderr)
            return combine_exit_codes(codes)
        if any(job.launcher == "slurm" for job in left):
            print("The search waits for these runs. After Ctrl-C the same command continues it.", flush=True)
        sampler.tell([results.loss(job) for job in jobs])
        tried += len(jobs)
        results.refuse_failures(tried)
    return results.show()


def _is_finished(job: Job) -> bool:
    folder = RunFolder(job.run_dir)
    return folder.path.exists() and start_run.status_of(folder).state == "finished"


class Results:
    """The runs of a search and their values of the compared metric."""

    def __init__(self, search: Search) -> None:
        self.sweep = ""
        self._search = search
        self._jobs: dict[str, Job] = {}
        self._values: dict[str, float | None] = {}
        self._metric: ComparedMetric | None = None

    def add(self, jobs: Sequence[Job]) -> list[Job]:
        """Add the runs of trials to the sweep; return the new ones: two trials may be the same run."""
        fresh = {job.run_name: job for job in jobs if job.run_name not in self._jobs}
        self._jobs |= fresh
        if not self.sweep:
            parts = [*self._search.words, f"seed {self._search.seed}"]
            self.sweep = sweeps.name_of(start_sweep.common_name(jobs), parts)
        self._write()
        return list(fresh.values())

    def _write(self) -> None:
        runs = [(job.run_name, job.overrides) for job in self._jobs.values()]
        best = f"{self._metric.mode} {self._metric.name}" if self._metric else ""
        sweeps.write(next(iter(self._jobs.values())).run_dir.parent, self.sweep, runs, best)

    def line(self, job: Job) -> str:
        """Return the name of the run and the settings that the search has chosen."""
        own = [word for word in job.overrides if word not in self._search.words]
        return f"{job.run_name}  {shlex.join(as_typed(own))}"

    def loss(self, job: Job) -> float | None:
        """Wait for the end of a run, and return its value so that less is better; None if it has failed."""
        if job.run_name not in self._values:
            folder = RunFolder(job.run_dir)
            has_ended = end_of(folder, client.SlurmClient())
            while not has_ended():
                time.sleep(_POLL_S)
            state = start_run.status_of(folder).state
            value = self._value(folder, read(folder)) if state == "finished" else None
            self._values[job.run_name] = value
            shown = state if self._metric is None or value is None else f"{self._metric.name} {number(value)}"
            print(f"result  {job.run_name}  {shown}", flush=True)
        value = self._values[job.run_name]
        return -value if value is not None and self._metric and self._metric.mode == "max" else value

    def _value(self, folder: RunFolder, metrics: Metrics) -> float:
        if self._metric is None:
            self._metric = self._choose_metric(folder, metrics)
            self._write()
        value = self._metric.value(metrics)
        if value is None:
            logged = {"loss": metrics.train, "eval_loss": metrics.held_out, **metrics.own}
            near = near_matches(
                self._metric.name,
                [name for name, curve in logged.items() if curve],
                prefix="hydra.sweeper.metric=",
            )
            raise SlurmddpError(f"{folder.name} has finished and logged no {self._metric.name}.", hint=near)
        return value

    def _choose_metric(self, folder: RunFolder, metrics: Metrics) -> ComparedMetric:
        named = self._search.metric
        found = ComparedMetric(named, named, "") if named else compared_metric([folder], [metrics])
        if found is None:
            hint = "Log one: distributon.log_metrics({'NAME': value}, step)."
            raise SlurmddpError(f"{folder.name} has finished and logged no metric.", hint=hint)
        if not (mode := self._search.mode or found.mode):
            raise ConfigError(
                f"Nothing says whether more or less of {found.name} is better.",
                hint="Add hydra.sweeper.direction=maximize or minimize; finished trials are not run again.",
            )
        return replace(found, mode=mode)

    def refuse_failures(self, tried: int) -> None:
        """Raise SlurmddpError if no trial has finished, because the others would fail as well."""
        if tried >= _MOST_FAILED and set(self._values.values()) == {None}:
            hint = f"`slurmddp list {self.sweep}` shows them. The same command starts them again."
            raise SlurmddpError(f"None of the first {counted(tried, 'trial')} has finished.", hint=hint)

    def show(self) -> int:
        """Print the best run and return the exit code: a failure if no trial has finished."""
        known = {run: value for run, value in self._values.items() if value is not None}
        if self._metric is None:
            return EXIT_FAILED
        best = (max if self._metric.mode == "max" else min)(known, key=lambda run: known[run])
        print(f"\nbest    {self.line(self._jobs[best])}  {self._metric.name} {number(known[best])}")
        print(f"sweep   slurmddp report {self.sweep}")
        return EXIT_FINISHED
