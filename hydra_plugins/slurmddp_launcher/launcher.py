"""Hydra's launcher `slurmddp`: each job of an application with @hydra.main is a run of slurmddp.

    python app.py -m hydra/launcher=slurmddp hydra.launcher.cluster=a100x8 hydra.launcher.nodes=2 lr=1e-3,1e-4

Each job is the run of `slurmddp run +cluster=a100x8 nodes=2 app.py lr=0.001`, and all jobs are a sweep.
Other settings of slurmddp are added with a plus sign: +hydra.launcher.policy.max_restarts=9.
Hydra imports all plugins in every application, so slurmddp itself is imported only when it launches jobs.
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
"""Settings of slurmddp that need no plus sign. Null stands for slurmddp's default."""
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
"""Prefixes of overrides that belong to the sweep, not to a single job."""
_IN_ONE_RUN = ("hydra.mode=RUN", 'hydra.run.dir="{run_dir}/hydra"')
"""Overrides with which a rank runs the application once, even if its config files ask for a sweep."""
_READS_NUMBER = re.compile(r"hydra\s*[:.]\s*job\s*(?:\.\s*(?:num|id|\$)|[,}])")
"""Matches a reference to the number or id of the job, or to all of `hydra.job`."""
_WAITS = ("hydra_plugins.hydra_optuna", "hydra_plugins.hydra_ax", "hydra_plugins.hydra_nevergrad")
"""Prefixes of the import paths of sweepers that need the result of each job."""


class SlurmddpLauncher(Launcher):
    """Submits the jobs of an application; without a cluster, trains them on this machine one after another.

    Args:
        settings: settings of slurmddp.
    """

    def __init__(self, **settings: Any) -> None:
        self._values = settings
        self._settings = [f"{key}={text}" for key, text in _texts(settings)]
        self._config = OmegaConf.create()
        self._context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the application's configuration, and the context that composes the configuration of a job."""
        self._config = config
        self._context = hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Start the jobs, and return once they are queued or, on this machine, have ended.

        Args:
            job_overrides: the overrides of each job.
            initial_job_idx: the number of the first job.

        Returns:
            A result for each job, whose return value is the name of the run.
        """
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
        """Return the settings of slurmddp for a job of the application.

        The number of the job makes a separate run only if the configuration of the job refers to the number.
        Otherwise, the same overrides are the same run, at any position of a sweep.
        """
        from slurmddp.control.jobs import settings_of_program
        from slurmddp.settings.arguments import FREE_ARGUMENTS, spelled

        program = _program(self._config, overrides)
        # Hydra's basic launcher uses the number as the id, too.
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
    """Raise ConfigError inside a rank of a run, which would launch jobs instead of its application."""
    from slurmddp.environments.names import RUN_DIR_VARIABLE
    from slurmddp.errors import ConfigError

    folder = os.environ.get(RUN_DIR_VARIABLE)
    if folder:
        raise ConfigError(
            f"This process is a rank of the run {folder}, but its application would launch further jobs.",
            hint="Add hydra.mode=RUN to the arguments of the application, so that each rank runs it once.",
        )


def _refuse_batches(config: DictConfig, jobs: Sequence[Job]) -> None:
    """Raise ConfigError if the sweeper waits between batches of jobs: a submission does not wait."""
    from slurmddp.errors import ConfigError

    batch_size = OmegaConf.select(config, "hydra.sweeper.max_batch_size")
    # A batch below the largest size is the only or the last batch, after which nothing waits.
    if batch_size is None or len(jobs) < batch_size or jobs[0].launcher != "slurm":
        return

    raise ConfigError(
        f"hydra.sweeper.max_batch_size={batch_size} starts a batch of jobs when the last batch has ended, "
        "but hydra/launcher=slurmddp returns when its jobs are queued.",
        hint=f"Replace it by +hydra.launcher.array_parallelism={batch_size}: then at most {batch_size} jobs "
        "run at once.",
    )


def _refuse_sweeper(config: DictConfig) -> None:
    """Raise ConfigError if the sweeper needs the results of jobs."""
    from slurmddp.errors import ConfigError

    name = str(OmegaConf.select(config, "hydra.sweeper._target_"))
    if name.startswith(_WAITS):
        raise ConfigError(
            f"The sweeper {name} needs the result of each job, but hydra/launcher=slurmddp returns at once.",
            hint="Use hydra/sweeper=basic.",
        )


def _refuse_ssh(settings: Sequence[str]) -> None:
    """Raise ConfigError if the settings name a login node: the launcher submits only on this machine."""
    from slurmddp.config.composition.compose import login_node
    from slurmddp.errors import ConfigError
    from slurmddp.slurm import client

    keys = login_node(settings, Path.cwd())
    is_typed = any(word.startswith("ssh=") for word in settings)
    # A cluster file may name the login node on which the application runs already.
    if keys is not None and (is_typed or not client.on_path()):
        raise ConfigError(
            f"hydra/launcher=slurmddp does not submit over ssh, but the settings name ssh={keys['ssh']}.",
            hint="Start the application on the login node, or run `slurmddp run --multirun +cluster=NAME "
            f"ssh={keys['ssh']} ... app.py` on this machine.",
        )


def _texts(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the full key of each setting that is not null, and its value in Hydra's grammar."""
    from slurmddp.settings.arguments import spelled

    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", spelled(value)


def _files(config: DictConfig) -> Iterator[Path]:
    """Yield the paths of the application's config files, which decide about its jobs."""
    sources: Any = OmegaConf.to_container(config.hydra.runtime.config_sources)
    for source in sources:
        folders: list[str] = []
        if source["schema"] == "file":
            folders = [source["path"]]
        elif source["schema"] == "pkg" and source["provider"] == "main":
            spec = find_spec(source["path"])
            folders = list((spec and spec.submodule_search_locations) or ())
        for folder in folders:
            yield from sorted(Path(folder).rglob("*.yaml"))


def _program(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return the command line that runs the application for a job: program, flags, overrides."""
    typed: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    flags = [
        word
        for word in sys.argv[1:]
        if word not in (*typed["task"], *typed["hydra"]) and not _is_multirun(word)
    ]
    kept = [word for word in typed["hydra"] if not word.lstrip("+~").startswith(_OF_A_SWEEP)]

    return [*_main(), *flags, *kept, *overrides, *_IN_ONE_RUN]


def _is_multirun(word: str) -> bool:
    """Return whether a word is Hydra's flag `--multirun`, which Hydra also accepts shortened."""
    return word == "-m" or (word.startswith("--m") and "--multirun".startswith(word))


def _main() -> list[str]:
    """Return the words that start this program, without its arguments: a script, a module or a command."""
    spec = sys.modules["__main__"].__spec__
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]

    path = Path(sys.argv[0]).absolute()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return [str(path)]


@contextmanager
def _without_the_application() -> Iterator[None]:
    """Let slurmddp compose its own configuration during the block: Hydra has one global state."""
    application = GlobalHydra.instance()
    config = HydraConfig.instance().cfg
    hydra = application.hydra
    application.clear()
    try:
        yield
    finally:
        application.hydra = hydra
        GlobalHydra.set_instance(application)
        HydraConfig.instance().cfg = config
