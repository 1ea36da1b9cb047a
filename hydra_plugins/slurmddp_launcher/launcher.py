"""Hydra's launcher `slurmddp`: each job of an application with @hydra.main is a run of slurmddp.

    python app.py -m hydra/launcher=slurmddp hydra.launcher.cluster=a100x8 hydra.launcher.nodes=2 lr=1e-3,1e-4

Each job is the run of `slurmddp run +cluster=a100x8 nodes=2 app.py lr=0.001`, and all of them are a sweep.
Any other setting of slurmddp is added with a sign: +hydra.launcher.policy.max_restarts=9.
Because Hydra imports all plugins in every application, slurmddp is imported only when it launches.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from slurmddp.settings.spec import Job

_SIZE = ("nodes", "gpus", "spare_nodes", "gpus_per_node", "ranks_per_node", "cpus_per_node", "mem_gb")
_PLACE = ("cluster", "time_limit", "partition", "account", "qos", "submitter")
_RUN = ("name", "runs_dir", "backend", "preflight")
"""Keys of slurmddp that need no `+`. Null leaves slurmddp's own default."""
ConfigStore.instance().store(
    group="hydra/launcher",
    name="slurmddp",
    node={
        "_target_": f"{__name__}.SlurmddpLauncher",
        "_convert_": "all",
        **dict.fromkeys((*_SIZE, *_PLACE, *_RUN)),
    },
    provider="slurmddp",
)
_OF_A_SWEEP = ("hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweep", "hydra.mode", "hydra.run")
"""The beginnings of overrides that a single job does not have."""
_IN_ONE_RUN = ("hydra.mode=RUN", 'hydra.run.dir="{run_dir}/hydra"')
"""Overrides that let the ranks of a job run the application once, whatever its files say."""
_READS_NUMBER = re.compile(r"hydra\s*[:.]\s*job\s*(?:\.\s*(?:num|id|\$)|[,}])")
"""A reference to the number or the id of the job, or to all of `hydra.job`."""
_WAITS = ("hydra_plugins.hydra_optuna", "hydra_plugins.hydra_ax", "hydra_plugins.hydra_nevergrad")
"""The beginnings of sweepers that need the result of each job."""


class SlurmddpLauncher(Launcher):
    """Submits each job, or without a cluster trains one after another on this machine."""

    def __init__(self, **settings: Any) -> None:
        self._values = settings
        self._settings = [f"{key}={text}" for key, text in _texts(settings)]
        self._config = OmegaConf.create()
        self._context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the configuration of the application, and what composes the configuration of a job."""
        self._config = config
        self._context = hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Start each job and return at once if they are submitted; the results hold the names of the runs."""
        from slurmddp.cli import messages
        from slurmddp.cli.start_view import StartView
        from slurmddp.config.checks.unquoted_values import refuse_respelled
        from slurmddp.control.jobs import jobs_of
        from slurmddp.control.sweep import start_sweep
        from slurmddp.errors import EXIT_FINISHED, SlurmddpError

        try:
            _refuse_rank()
            _refuse_sweeper(self._config)
            refuse_respelled(self._values, sys.argv[1:], _files(self._config))
            lines = [
                self._settings_of_job(overrides, number)
                for number, overrides in enumerate(job_overrides, initial_job_idx)
            ]
            with _without_the_application():
                _refuse_ssh(self._settings)
                points = ([*self._settings, *line] for line in lines)
                jobs = jobs_of(points, report=messages.print_event)
                _refuse_batches(self._config, jobs)
                code = start_sweep(jobs, report=StartView()).exit_code
        except SlurmddpError as error:
            code = messages.report(error)
        if code != EXIT_FINISHED:
            sys.exit(code)
        return [
            JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=job.run_name)
            for overrides, job in zip(job_overrides, jobs, strict=True)
        ]

    def _settings_of_job(self, overrides: Sequence[str], number: int) -> list[str]:
        """Return the settings of slurmddp for the application and one job.

        The number tells runs apart only if the configuration of the job refers to it. Otherwise the same
        job is the same run, wherever it stands in a sweep.
        """
        from slurmddp.control.jobs import settings_of_program
        from slurmddp.settings.arguments import FREE_ARGUMENTS, spelled

        program = _program(self._config, overrides)
        # Hydra's basic launcher gives the same number to both.
        numbers = [f"hydra.job.num={number}", f"hydra.job.id={number}"]
        if self._reads_number(overrides):
            return settings_of_program([*program, *numbers])
        return [*settings_of_program(program), f"{FREE_ARGUMENTS}={spelled(numbers)}"]

    def _reads_number(self, overrides: Sequence[str]) -> bool:
        """Return whether the configuration of a job refers to the number of the job."""
        if self._context is None:
            return False
        composed = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        content: Any = OmegaConf.to_container(composed, resolve=False)
        content["hydra"] = content["hydra"].get("job")
        return _READS_NUMBER.search(repr(content)) is not None


def _refuse_rank() -> None:
    """Refuse to launch inside a rank: its job would start as often as it has ranks, and never run."""
    from slurmddp.environments.names import RUN_DIR_VARIABLE
    from slurmddp.errors import ConfigError

    if folder := os.environ.get(RUN_DIR_VARIABLE):
        raise ConfigError(
            f"This process is a rank of the run {folder}, and its application would launch further jobs.",
            hint="Add hydra.mode=RUN to the arguments of the application, so that each rank runs it once.",
        )


def _refuse_batches(config: DictConfig, jobs: Sequence[Job]) -> None:
    """Refuse batches of jobs that should wait for each other: a submission does not wait."""
    from slurmddp.errors import ConfigError

    most = OmegaConf.select(config, "hydra.sweeper.max_batch_size")
    # A smaller batch is the only one, or the last one.
    if most is None or len(jobs) < most or jobs[0].launcher != "slurm":
        return
    raise ConfigError(
        f"hydra.sweeper.max_batch_size={most} starts a batch of jobs when the batch before has ended, "
        "and hydra/launcher=slurmddp returns when its jobs are queued.",
        hint=f"Remove it, and add +hydra.launcher.array_parallelism={most}: at most {most} run at once then.",
    )


def _refuse_sweeper(config: DictConfig) -> None:
    from slurmddp.errors import ConfigError

    name = str(OmegaConf.select(config, "hydra.sweeper._target_"))
    if name.startswith(_WAITS):
        raise ConfigError(
            f"The sweeper {name} needs the result of each job, and hydra/launcher=slurmddp returns at once.",
            hint="Use hydra/sweeper=basic.",
        )


def _refuse_ssh(settings: Sequence[str]) -> None:
    """Refuse a login node: the launcher submits on this machine only."""
    from slurmddp.config.composition.compose import login_node
    from slurmddp.errors import ConfigError
    from slurmddp.slurm import client

    there = login_node(settings, Path.cwd())
    is_typed = any(word.startswith("ssh=") for word in settings)
    # A cluster file may name the login node on which the application runs.
    if there is not None and (is_typed or not client.on_path()):
        raise ConfigError(
            f"hydra/launcher=slurmddp does not submit over ssh, and the settings name {there['ssh']}.",
            hint="Start the application on the login node, or `slurmddp run --multirun +cluster=NAME "
            f"ssh={there['ssh']} ... app.py` here.",
        )


def _texts(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the full key and the value, as Hydra's grammar writes it, of each setting that is not null."""
    from slurmddp.settings.arguments import spelled

    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", spelled(value)


def _files(config: DictConfig) -> Iterator[Path]:
    """Yield the application's own files of configuration."""
    sources: Any = OmegaConf.to_container(config.hydra.runtime.config_sources)
    for source in sources:
        folders = [source["path"]] if source["schema"] == "file" else []
        if source["schema"] == "pkg" and source["provider"] == "main":
            spec = find_spec(source["path"])
            folders = list((spec and spec.submodule_search_locations) or ())
        for folder in folders:
            yield from sorted(Path(folder).rglob("*.yaml"))


def _program(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return the words that start the application for one job: program, flags, overrides."""
    typed: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    flags = [
        word
        for word in sys.argv[1:]
        if word not in (*typed["task"], *typed["hydra"]) and not _is_multirun(word)
    ]
    kept = [word for word in typed["hydra"] if not word.lstrip("+~").startswith(_OF_A_SWEEP)]
    return [*_main(), *flags, *kept, *overrides, *_IN_ONE_RUN]


def _is_multirun(word: str) -> bool:
    """Return whether a word is Hydra's flag `--multirun`, which Hydra also takes shortened."""
    return word == "-m" or (word.startswith("--m") and "--multirun".startswith(word))


def _main() -> list[str]:
    """Return the words that name this program: a script, a module or a command."""
    spec = sys.modules["__main__"].__spec__
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    path = Path(sys.argv[0]).absolute()
    return [str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)]


@contextmanager
def _without_the_application() -> Iterator[None]:
    """Let slurmddp compose its own configuration: Hydra's state belongs to one application at a time."""
    application, config = GlobalHydra.instance(), HydraConfig.instance().cfg
    hydra = application.hydra
    application.clear()
    try:
        yield
    finally:
        application.hydra = hydra
        GlobalHydra.set_instance(application)
        HydraConfig.instance().cfg = config
