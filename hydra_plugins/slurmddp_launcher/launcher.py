"""Hydra's launcher `slurmddp`: each job of an application with @hydra.main is a run of slurmddp.

    python app.py -m hydra/launcher=slurmddp hydra.launcher.cluster=a100x8 hydra.launcher.nodes=2 lr=1e-3,1e-4

Each job is the run of `slurmddp run +cluster=a100x8 nodes=2 app.py lr=0.001`, and all of them are a sweep.
Any other setting of slurmddp is added with a sign: +hydra.launcher.policy.max_restarts=9.
Because Hydra imports all plugins in every application, slurmddp is imported only when it launches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

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
_WAITS = ("hydra_plugins.hydra_optuna", "hydra_plugins.hydra_ax", "hydra_plugins.hydra_nevergrad")
"""The beginnings of sweepers that need the result of each job."""


class SlurmddpLauncher(Launcher):
    """Submits each job, or without a cluster trains one after another on this machine."""

    def __init__(self, **settings: Any) -> None:
        self._settings = [f"{key}={text}" for key, text in _texts(settings)]
        self._config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the configuration of the application."""
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Start each job and return at once if they are submitted; the results hold the names of the runs."""
        from slurmddp.cli import messages, start_sweep
        from slurmddp.cli.commands import run, train
        from slurmddp.errors import EXIT_FINISHED, SlurmddpError

        try:
            _refuse_sweeper(self._config)
            programs = [_program(self._config, overrides) for overrides in job_overrides]
            with _without_the_application():
                _refuse_ssh(self._settings)
                jobs = train.jobs_of([*self._settings, *run.settings_of(program)] for program in programs)
                code = start_sweep.start(jobs, train.begin)
        except SlurmddpError as error:
            code = messages.report(error)
        if code != EXIT_FINISHED:
            sys.exit(code)
        return [
            JobReturn(overrides=one, status=JobStatus.COMPLETED, _return_value=job.run_name)
            for one, job in zip(job_overrides, jobs, strict=True)
        ]


def _refuse_sweeper(config: DictConfig | None) -> None:
    from slurmddp.errors import ConfigError

    name = str(OmegaConf.select(config or OmegaConf.create(), "hydra.sweeper._target_"))
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
    from slurmddp.config.script_arguments import spelled

    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", spelled(value)


def _program(config: DictConfig | None, overrides: Sequence[str]) -> list[str]:
    """Return the words that start the application for one job: program, flags, overrides."""
    given = OmegaConf.to_container((config or OmegaConf.create()).hydra.overrides, resolve=False)
    own, of_hydra = (list(given[part]) for part in ("task", "hydra")) if isinstance(given, dict) else ([], [])
    flags = [word for word in sys.argv[1:] if word not in {*own, *of_hydra, "-m", "--multirun"}]
    kept = [word for word in of_hydra if not word.lstrip("+~").startswith(_OF_A_SWEEP)]
    return [*_main(), *flags, *kept, *overrides, 'hydra.run.dir="{run_dir}/hydra"']


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
