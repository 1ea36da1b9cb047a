"""Search with Optuna: start trials, wait for their results, and choose the next trials by the results.

A trial is a run. The file of the sweep lists the trials, and their run folders hold the results. The same
command repeats the listed trials first, starts those that have not finished, and then chooses new trials.
Source of the sampler: Bergstra et al., Algorithms for Hyper-Parameter Optimization (2011), as in Optuna.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slurmddp.config.composition.search_space import Choices, Interval, Search
from slurmddp.control.admission import refuse_misfits
from slurmddp.control.conflicting_configs import refuse_collisions
from slurmddp.control.events import Note, Report, ignore
from slurmddp.control.start import (
    ENDED_BY_PERSON,
    PointBegins,
    claim_for_start,
    start_claimed,
)
from slurmddp.control.status import status_of
from slurmddp.control.sweep import SweepBegins, common_name
from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED, ConfigError, SlurmddpError, combine_exit_codes
from slurmddp.near_matches import near_matches
from slurmddp.runs import sweeps
from slurmddp.runs.folder.code_changes import changed_since
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.compared_metric import ComparedMetric, compared_metric
from slurmddp.runs.status.metrics import Metrics, read
from slurmddp.runs.status.run_end import end_of
from slurmddp.runs.text_format import counted
from slurmddp.settings.arguments import on_one_line
from slurmddp.slurm import client

if TYPE_CHECKING:
    from slurmddp.settings.spec import Job

_POLL_S = 0.5
"""Seconds between two checks of a run folder. SLURM is queried at most twice a minute."""
_MAX_FAILED = 3
"""Number of trials after which a search ends if none of them has a result."""
_KEPT = "Finished trials are not run again."

JobsOf = Callable[[Sequence[Sequence[str]]], Sequence["Job"]]
"""A function that makes a job of each list of settings."""


class Sampler:
    """An Optuna study that suggests the settings of trials in batches, and learns from their results."""

    def __init__(self, search: Search) -> None:
        try:
            import optuna
        except ImportError as error:
            hint = "Install it: pip install 'slurmddp[optuna]'."
            raise ConfigError(
                "hydra/sweeper=optuna needs the package optuna, which is not installed.", hint=hint
            ) from error

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._search = search
        self._study = optuna.create_study()
        self._sampler = optuna.samplers.TPESampler
        self._trials: list[Any] = []
        """The trials that the last call of `suggest` has returned."""

    def suggest(self, count: int, known: Sequence[Sequence[str]] = ()) -> list[list[str]]:
        """Return the settings of the next batch of trials.

        Args:
            count: number of trials.
            known: the settings of the first trials of this batch, if an earlier search has chosen them.
        """
        for point in known:
            chosen = self._search.chosen(point)
            self._study.enqueue_trial(
                {word: _value(chosen[word], values) for word, values in self._search.parameters.items()}
            )

        with warnings.catch_warnings():
            # Optuna warns that the argument `constant_liar` below is experimental.
            warnings.simplefilter("ignore")
            # Each batch has its own seed. With one random stream for all batches, known trials, which the
            # sampler does not choose, would change the choice of later trials.
            seed = random.Random(f"{self._search.seed} {len(self._study.trials)}").getrandbits(32)
            # With `constant_liar`, Optuna assumes bad results for running trials, so that the trials of a
            # batch differ.
            self._study.sampler = self._sampler(seed=seed, constant_liar=True)

        self._trials = [self._study.ask() for _ in range(count)]
        return [
            self._search.point({
                word: _choose(trial, word, values) for word, values in self._search.parameters.items()
            })
            for trial in self._trials
        ]  # fmt: skip

    def learn(self, losses: Sequence[float | None]) -> None:
        """Record in the study the results of the trials that the last call of `suggest` returned.

        Args:
            losses: a value for each trial, smaller is better; None: the trial failed.
        """
        from optuna.trial import TrialState

        for trial, loss in zip(self._trials, losses, strict=True):
            self._study.tell(trial, loss, TrialState.FAIL if loss is None else TrialState.COMPLETE)


def _choose(trial: Any, word: str, values: Choices | Interval) -> str:
    """Return the setting, such as `seed=1`, that Optuna chooses for a trial.

    Args:
        trial: Optuna's trial.
        word: the typed word with several values; it is the name of the parameter in Optuna.
        values: the values.
    """
    if isinstance(values, Interval):
        suggest = trial.suggest_int if isinstance(values.low, int) else trial.suggest_float
        return values.setting(suggest(word, values.low, values.high, log=values.is_log))
    if values.is_ordered:
        return values.settings[int(trial.suggest_int(word, 0, len(values.settings) - 1))]

    chosen: str = trial.suggest_categorical(word, values.settings)
    return chosen


def _value(setting: str, values: Choices | Interval) -> Any:
    """Return the value of Optuna's parameter that stands for a setting; the inverse of `_choose`."""
    if isinstance(values, Interval):
        return type(values.low)(setting.partition("=")[2])
    if values.is_ordered:
        return values.settings.index(setting)
    return setting


@dataclass(frozen=True, kw_only=True)
class TrialEnded:
    """The run of a trial has ended."""

    run: str
    state: str
    """The state of the run, as `RunStatus.state`."""
    metric: str | None = None
    """Name of the compared metric; None if the trial has no result."""
    value: float | None = None
    """Value of the metric."""


@dataclass(frozen=True, kw_only=True)
class WaitsForTrials:
    """A search waits until the runs of its last batch, which SLURM has queued, have ended."""


@dataclass(frozen=True, kw_only=True)
class SearchLeft:
    """A search ends before its last trial, because a person ended its runs or SLURM refused a run."""


@dataclass(frozen=True, kw_only=True)
class BestTrial:
    """The trial with the best value of the compared metric."""

    run: str
    settings: str
    """The settings that the search chose, on one line."""
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The outcome of `search_best`."""

    sweep: str
    """Name of the sweep that lists the trials."""
    best: BestTrial | None = None
    """The best trial; None if the search ended before its last trial, or no trial has a result."""
    exit_code: int = EXIT_FINISHED


def first_jobs(search: Search, jobs_of: JobsOf) -> tuple[list[Job], str]:
    """Return the jobs of the first batch of trials, and the name of the sweep that lists the trials."""
    edges = jobs_of(search.edges())
    jobs = jobs_of(Sampler(search).suggest(min(search.at_once, search.trials)))
    return refuse_collisions(jobs), _name(search, edges)


def _name(search: Search, edges: Sequence[Job]) -> str:
    return sweeps.name_of(common_name(edges), [*search.overrides, f"seed {search.seed}"])


def search_best(search: Search, jobs_of: JobsOf, *, again: bool = False, report: Report = ignore) -> Searched:
    """Run the trials of a search in batches, and return the best trial.

    Args:
        search: the parameters, the metric and the number of trials.
        jobs_of: makes the job of each list of settings.
        again: whether to start trials that have finished once more.
        report: called with each event.

    Raises:
        ConfigError: Optuna is missing, a trial can't be started, or it is unknown which metric is compared
            or whether its smallest or its largest value is best.
        SlurmddpError: the first trials have failed, or have not logged the metric.
    """
    sampler = Sampler(search)
    edges = jobs_of(search.edges())
    refuse_misfits(edges, report)
    results = Results(search, edges, report)
    report(SweepBegins(sweep=results.sweep, runs=search.trials, is_search=True))

    claim = claim_for_start(again=again, report=report)
    tried = 0

    while tried < search.trials:
        count = min(search.trials - tried, search.at_once)
        jobs = jobs_of(sampler.suggest(count, results.known(tried)[:count]))
        refuse_misfits(jobs, report)
        to_start = [job for job in results.add(jobs) if again or not _is_finished(job, report)]

        points = {job.run_name: results.point(job, number) for number, job in enumerate(jobs, tried + 1)}
        outcomes = start_claimed(to_start, claim, sweep=results.sweep, points=points, report=report)
        codes = [run.exit_code for run in outcomes]
        refused = [run for run in outcomes if run.outcome == "refused"]
        if refused:
            report(SearchLeft())
            return Searched(sweep=results.sweep, exit_code=refused[0].exit_code)

        if ENDED_BY_PERSON.isdisjoint(codes):
            if any(job.launcher == "slurm" for job in to_start):
                report(WaitsForTrials())
            losses = [results.loss(job) for job in jobs]
            if to_start and all(_state(job) in ("stopped", "cancelled") for job in to_start):
                # A person has stopped or cancelled all runs of this batch. This ends the search, as a stopped
                # training on this machine does.
                codes = [EXIT_STOPPED]

        if not ENDED_BY_PERSON.isdisjoint(codes):
            report(SearchLeft())
            return Searched(sweep=results.sweep, exit_code=combine_exit_codes(codes))

        sampler.learn(losses)
        tried += len(jobs)
        results.refuse_failures(tried)

    searched = Searched(sweep=results.sweep, best=results.best())
    report(searched)

    return searched


def _is_finished(job: Job, report: Report) -> bool:
    """Return whether the run of a trial has finished; report a `Note` if the code has changed since then."""
    if _state(job) != "finished":
        return False

    changed = changed_since(RunFolder(job.run_dir), job)
    if changed:
        report(Note(f"{job.run_name}: {changed} --again runs all trials with the new code."))

    return True


def _state(job: Job) -> str:
    """Return the state of the run of a job, as `RunStatus.state`; "removed" if the run has no folder."""
    folder = RunFolder(job.run_dir)
    return status_of(folder).state if folder.path.exists() else "removed"


class Results:
    """The trials of a search, and the value of the compared metric for each."""

    def __init__(self, search: Search, edges: Sequence[Job], report: Report) -> None:
        """Store the search, and check that the file of its sweep belongs to it.

        Args:
            search: the parameters, the metric and the number of trials.
            edges: jobs that together contain each choice, and both ends of each range.
            report: called with `TrialEnded` for each trial.

        Raises:
            ConfigError: the file of the sweep belongs to another search.
        """
        self._report = report
        self.sweep = _name(search, edges)
        self._runs_dir = edges[0].run_dir.parent
        sweeps.refuse_other(self._runs_dir, self.sweep, lambda _, typed: search.has(typed))
        self._search = search
        self._trials: list[tuple[str, Sequence[str]]] = []
        self._jobs: dict[str, Job] = {}
        self._values: dict[str, float | None] = {}
        self._metric: ComparedMetric | None = None

    def known(self, tried: int) -> list[Sequence[str]]:
        """Return the settings of the trials in the file of the sweep, without the first `tried` trials."""
        return [settings for _, settings in sweeps.read(self._runs_dir, self.sweep).points[tried:]]

    def add(self, jobs: Sequence[Job]) -> list[Job]:
        """Add trials to the file of the sweep, and return the jobs that no earlier trial has run.

        Two trials with equal settings are the same run.
        """
        runs = refuse_collisions([*self._jobs.values(), *jobs])
        fresh = runs[len(self._jobs) :]
        self._jobs |= {job.run_name: job for job in fresh}
        self._trials += [(job.run_name, job.overrides) for job in jobs]
        self._write()

        return fresh

    def _write(self) -> None:
        before = sweeps.read(self._runs_dir, self.sweep)
        best = f"{self._metric.mode} {self._metric.name}" if self._metric else before.best
        points = [*self._trials, *before.points[len(self._trials) :]]
        sweeps.write(self._runs_dir, self.sweep, points, best)

    def point(self, job: Job, number: int) -> PointBegins:
        """Return the event `PointBegins` for the trial of a job; `number` is its number, from 1."""
        return PointBegins(
            run=job.run_name,
            number=number,
            total=self._search.trials,
            settings=self._chosen(job),
            is_trial=True,
        )

    def _chosen(self, job: Job) -> str:
        """Return the settings that the search chose for a job, without the fixed settings, on one line."""
        return on_one_line([word for word in job.overrides if word not in self._search.overrides])

    def loss(self, job: Job) -> float | None:
        """Wait for the end of a run, and return its metric as a loss: the negated value if more is better.

        Returns:
            None if the run did not finish, or has no value.
        """
        if job.run_name not in self._values:
            folder = RunFolder(job.run_dir)
            has_ended = end_of(folder, client.SlurmClient())
            while folder.path.exists() and not has_ended():
                time.sleep(_POLL_S)

            state = _state(job)
            value = self._value(folder, read(folder)) if state == "finished" else None
            self._values[job.run_name] = value
            metric = self._metric.name if self._metric is not None and state == "finished" else None
            self._report(TrialEnded(run=job.run_name, state=state, metric=metric, value=value))

        value = self._values[job.run_name]
        if value is not None and self._metric is not None and self._metric.mode == "max":
            return -value
        return value

    def _value(self, folder: RunFolder, metrics: Metrics) -> float | None:
        """Return the value of the compared metric for a finished run.

        The first finished run decides which metric is compared.
        """
        if self._metric is None:
            self._metric = self._choose_metric(folder, metrics)
            self._write()
        return self._metric.value(metrics)

    def _choose_metric(self, folder: RunFolder, metrics: Metrics) -> ComparedMetric:
        """Decide which metric the search compares, by the metrics that its first finished run logged.

        Raises:
            ConfigError: the run logged several metrics, or it is unknown whether more or less is better.
            SlurmddpError: the run logged no metric, or another one than the search names.
        """
        named = self._search.metric
        metric = compared_metric([folder], [metrics])
        if named and (metric is None or metric.name != named):
            metric = ComparedMetric(named, named, "min" if named in ("loss", "eval_loss") else "")

        if metric is None:
            hint = "Log a metric: distributon.log_metrics({'NAME': value}, step)."
            raise SlurmddpError(f"{folder.name} has finished and logged no metric.", hint=hint)
        if not len(metric.curve(metrics)):
            logged = {"loss": metrics.train, "eval_loss": metrics.held_out, **metrics.own}
            near = near_matches(
                metric.name, [name for name, curve in logged.items() if curve], prefix="hydra.sweeper.metric="
            )
            raise SlurmddpError(f"{folder.name} has finished and logged no metric {metric.name}.", hint=near)

        if not named and not metric.mode and len(metrics.own) > 1:
            raise ConfigError(
                f"{folder.name} has logged several metrics: {', '.join(metrics.own)}.",
                hint=f"Choose the one to compare: hydra.sweeper.metric={metric.name}. {_KEPT}",
            )

        mode = self._search.mode or metric.mode
        if not mode:
            raise ConfigError(
                f"It is unknown whether a larger or a smaller {metric.name} is better.",
                hint=f"Add hydra.sweeper.direction=maximize or hydra.sweeper.direction=minimize. {_KEPT}",
            )

        return replace(metric, mode=mode)

    def refuse_failures(self, tried: int) -> None:
        """Raise SlurmddpError if none of the first `_MAX_FAILED` trials, or of all if fewer, has a value.

        Args:
            tried: the number of trials that have ended.
        """
        if tried >= min(_MAX_FAILED, self._search.trials) and set(self._values.values()) == {None}:
            hint = f"`slurmddp list {self.sweep}` lists them. The same command starts failed trials again."
            raise SlurmddpError(f"None of the first {counted(tried, 'trial')} has a result.", hint=hint)

    def best(self) -> BestTrial | None:
        """Return the trial with the best value; None if no trial has a value."""
        if self._metric is None:
            return None

        values = {run: value for run, value in self._values.items() if value is not None}
        choose = max if self._metric.mode == "max" else min
        best = choose(values, key=lambda run: values[run])

        return BestTrial(
            run=best,
            settings=self._chosen(self._jobs[best]),
            metric=self._metric.name,
            value=values[best],
        )
