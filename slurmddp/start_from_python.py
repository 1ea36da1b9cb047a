"""Start runs from Python, for example from a notebook: `train`, `submit` and `map_array`.

    run = slurmddp.train("+cluster=a100x8", nodes=3)
    print(run.status().step, run.logs())
    score = slurmddp.submit("package.module.evaluate", "weights.safetensors", nodes=2).result()
    runs = slurmddp.map_array("package.module.evaluate", files, cluster="a100x8", array_parallelism=8)

A call does the same as `slurmddp train` or `slurmddp run` with the same settings; the same call finds the
same run. With `ssh="login1"`, the run is submitted on this login node. Without a cluster, it trains on this
machine, in a separate process that outlives the interpreter.
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.run_handle import Run, RunOverSsh
from slurmddp.runs.text_format import counted
from slurmddp.settings.spec import FUNCTION_CALL

log = logging.getLogger(__name__)


def train(*overrides: str, again: bool = False, **settings: Any) -> Run:
    """Start a training as `slurmddp train` does, and return a handle of its run.

    Args:
        overrides: settings as typed in a shell: "+cluster=a100x8", "train.steps=1000".
        again: whether to rename the folder of an existing run, and start the run anew.
        settings: further settings by name: `cluster="a100x8"`, `nodes=3`.

    Returns:
        The run, which is queued or active now, or had already finished.

    Raises:
        ConfigError: a setting is wrong; nothing was started.
        SlurmError: SLURM is missing, does not answer, or refused.
        LoginNodeError: `ssh=HOST` can't be reached, or can't run this version; nothing was started.

    Example:
        slurmddp.train("train.steps=1000", cluster="a100x8", nodes=3).wait()
    """
    from slurmddp.control.detached_training import start_detached
    from slurmddp.control.jobs import jobs_of
    from slurmddp.control.ssh.start_jobs import start_over_ssh
    from slurmddp.control.start import start

    point = [*overrides, *_typed(settings)]
    ssh_runs = start_over_ssh([point], again=again, report=_log)
    if ssh_runs:
        return RunOverSsh(ssh_runs[0])

    (job,) = jobs_of([point], report=_log)
    if job.launcher == "slurm":
        start(job, again=again, report=_log)
    else:
        start_detached(job, again=again, report=_log)

    return Run(job.run_dir)


def submit(function: Callable[..., Any] | str, *arguments: Any, again: bool = False, **settings: Any) -> Run:
    """Start a run that calls a function on every rank; `Run.result` returns the return value of rank 0.

    Args:
        function: a function of a module, or its import path. The ranks import it by this path.
        arguments: the positional arguments: plain values (numbers, texts, lists, dictionaries), because the
            run folder stores them as text. The same function with the same arguments and settings is the same
            run.
        again: whether to rename the folder of an existing run, and start the run anew.
        settings: settings of the run: `cluster="a100x8"`, `nodes=2`, `time_limit="01:00:00"`.

    Returns:
        The run, which is queued or active now, or had already finished.

    Raises:
        ConfigError: the function can't be imported by its path, or does not take the arguments; an argument
            is no plain value; a setting is wrong. Nothing was started.
        SlurmError: SLURM is missing, does not answer, or refused.

    Example:
        slurmddp.submit(package.module.evaluate, "weights.safetensors", nodes=2).result()
    """
    path = _import_path(function)
    call = _call(path, arguments)
    _refuse_misfit(function, path, arguments, settings)
    return train(*call, again=again, **{"name": _name(path), **settings})


def map_array(
    function: Callable[..., Any] | str,
    iterable: Iterable[Any],
    *iterables: Iterable[Any],
    again: bool = False,
    **settings: Any,
) -> list[Run]:
    """Call a function once for each set of arguments, and return a run for each call, in this order.

    On a cluster, the calls are the elements of a job array, and `map_array` returns at once. Without a
    cluster, they run on this machine one after another, and `map_array` returns when all have ended. The runs
    form a sweep. Its name begins with the value of `name=`; `slurmddp list`, `cancel`, `resume` and `report`
    accept it.

    Args:
        function: a function of a module, or its import path, as for `submit`.
        iterable: the first argument of each call, plain values as for `submit`.
        iterables: the further arguments of each call, with as many values as `iterable`.
        again: whether to rename the folders of existing runs, and start the runs anew.
        settings: settings of all runs: `cluster="a100x8"`, `nodes=2`. `array_parallelism=8` lets at most 8
            calls run at once.

    Returns:
        The runs, in the order of the calls. Equal arguments are the same run, which is computed once.

    Raises:
        ConfigError: the iterables differ in length, the function can't be imported by its path or does not
            take the arguments, an argument is no plain value, or a setting is wrong. Nothing was started.
        SlurmError: SLURM is missing, does not answer, or refused.
        SlurmddpError: a call on this machine has failed.
        LoginNodeError: `ssh=HOST` can't be reached, or can't run this version; nothing was started.

    Example:
        runs = slurmddp.map_array(package.module.evaluate, ["a.safetensors", "b.safetensors"], [1, 2])
        scores = [run.result() for run in runs]
    """
    from slurmddp.control.conflicting_configs import refuse_collisions
    from slurmddp.control.detached_training import finish_detached
    from slurmddp.control.jobs import jobs_of
    from slurmddp.control.ssh.start_jobs import start_over_ssh
    from slurmddp.control.sweep import raise_if_incomplete, start_sweep

    path = _import_path(function)
    rows = _rows(iterable, *iterables)
    calls = [_call(path, arguments) for arguments in rows]
    for arguments in rows:
        _refuse_misfit(function, path, arguments, settings)

    shared = _typed({"name": _name(path), **settings})
    if not calls:
        return []

    distinct = list({call[-1]: call for call in calls}.values())
    points = [[*call, *shared] for call in distinct]
    ssh_runs = start_over_ssh(points, is_sweep=True, again=again, report=_log)
    if ssh_runs:
        return [RunOverSsh(ssh_runs[distinct.index(call)]) for call in calls]

    jobs = jobs_of(([*call, *shared] for call in calls), report=_log)
    start_here = partial(finish_detached, again=again, report=_log)
    started = start_sweep(refuse_collisions(jobs), again=again, start_here=start_here, report=_log)
    raise_if_incomplete(started)

    return [Run(job.run_dir) for job in jobs]


def _typed(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as typed in a shell, such as `nodes=2`."""
    from slurmddp.settings.arguments import spelled

    return [f"{key}={spelled(value)}" for key, value in settings.items()]


def _rows(*columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return the arguments of each call: its value from each iterable, as `zip` does.

    Raises:
        ConfigError: the iterables differ in length.
    """
    rows: list[tuple[Any, ...]] = []
    end = object()
    for row in itertools.zip_longest(*columns, fillvalue=end):
        if any(value is end for value in row):
            raise ConfigError(
                "The iterables of map_array have different lengths: the shortest one ends after "
                f"{counted(len(rows), 'value')}.",
                hint="Pass iterables of equal lengths.",
            )

        rows.append(row)

    return rows


def _refuse_misfit(
    function: Callable[..., Any] | str, path: str, arguments: Sequence[Any], settings: Mapping[str, Any]
) -> None:
    """Raise ConfigError if a function refuses its arguments, or a setting may be meant as an argument.

    Args:
        function: the function or its import path.
        path: its import path.
        arguments: the positional arguments. The function must accept them.
        settings: the settings of the run. None may have the name of an argument of the function that
            `arguments` does not contain, because the caller may have meant the argument.
    """
    from slurmddp import plugins

    hint = "Pass arguments of the function by position. Keywords are settings of the run, such as nodes=2."
    called = plugins.locate(function) if isinstance(function, str) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        # Some built-in functions have no signature, so their arguments can't be checked.
        return

    try:
        bound = signature.bind(*arguments).arguments
    except TypeError as error:
        raise ConfigError(f"{path} can't be called with these arguments: {error}.", hint=hint) from error

    ambiguous = [key for key in settings if key in signature.parameters and key not in bound]
    if ambiguous:
        raise ConfigError(
            f"{ambiguous[0]}= is a setting of the run, but {path} also has an argument {ambiguous[0]}.",
            hint=hint,
        )


def _call(path: str, arguments: Sequence[Any]) -> list[str]:
    """Return the settings of a run that calls a function with arguments, which are stored as JSON.

    Raises:
        ConfigError: an argument is no plain value.
    """
    from slurmddp.control.jobs import settings_of_program

    try:
        _refuse_keys(arguments)
        text = json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"An argument of {path} can't be stored as text: {error}.",
            hint="Pass numbers, texts, lists and dictionaries; pass large data as the path of a file.",
        ) from error

    return settings_of_program([*FUNCTION_CALL.split(), "{run_dir}", path, text])


def _refuse_keys(value: Any) -> None:
    """Raise TypeError if a dictionary in a value has a key that JSON would convert to text, such as 1."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} of a dictionary is not a string")
            _refuse_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _refuse_keys(item)


def _name(path: str) -> str:
    """Return the default `name=` of runs that call a function: the last name of its import path."""
    return re.sub(r"\W+", "-", path.rpartition(".")[2])


def _import_path(function: Callable[..., Any] | str) -> str:
    """Return the import path by which the ranks import a function.

    Raises:
        ConfigError: the function can't be imported by a path, for example a lambda or a function of the main
            program.
    """
    from slurmddp import plugins

    if isinstance(function, str):
        plugins.locate(function, key="The function")
        return function

    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    owner = getattr(function, "__self__", None)
    is_bound_method = inspect.ismethod(function) and not isinstance(owner, type)
    if not module or not name or module == "__main__" or "<" in name or is_bound_method:
        raise ConfigError(
            f"The ranks can't import {function!r}, because it is not defined by name in a module.",
            hint="Make it a function of a module (a .py file of the project) and import it from there. "
            "`Distributon.launch(function)` calls any function on this machine.",
        )

    return f"{module}.{name}"


def _log(event: object) -> None:
    """Log an event that a start reports: warnings and failures at level WARNING, other texts at level INFO.

    Events without a text for people are not logged.
    """
    from slurmddp.control.events import CodeSent, HostSilent, Info
    from slurmddp.control.start import PointFailed, warnings_of
    from slurmddp.control.sweep import SweepBegins

    for warning in warnings_of(event):
        log.warning("%s", warning)

    match event:
        case PointFailed(run, error):
            log.warning("%s: %s", run, error)
        case Info(text):
            log.info("%s", text)
        case HostSilent(host, seconds):
            log.warning("%s has not answered for %g s; nothing was started.", host, seconds)
        case CodeSent(host, left_out=names) if names:
            log.warning(
                "Files not sent to %s, because they may hold passwords or keys: %s", host, ", ".join(names)
            )
        case SweepBegins(sweep=sweep):
            log.info("The runs form the sweep %s.", sweep)
