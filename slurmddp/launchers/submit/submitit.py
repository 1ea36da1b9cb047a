"""Submit through submitit's executor, for people whose tools and habits depend on submitit.

submitit's job runs the same `job.sbatch` with bash, so attempts, signals and requeues are the same. Three
parts of submitit are replaced:

- The default workload key, which strict sites reject, is left out.
- slurmddp's client calls sbatch, because it retries without queueing a job twice.
- submitit's signal handler, which would save and requeue from inside the handler, does nothing.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

from slurmddp.errors import SlurmError
from slurmddp.launchers.submit.sbatch import submit
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import Job
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.sbatch_options import Option, sbatch_options
from slurmddp.slurm.units import render_minutes

if TYPE_CHECKING:
    from submitit import SlurmExecutor


class RunScript:
    """The function that submitit pickles and calls in the job: it runs the batch script at a path."""

    def __init__(self, script: str) -> None:
        self.script = script

    def __call__(self) -> None:
        """Run the batch script and exit with its exit code, so that SLURM sees the code."""
        # Set a function that does nothing, not SIG_IGN: bash can't trap a signal that it inherits as ignored.
        for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, _ignore_signal)

        code = subprocess.run(["bash", self.script]).returncode
        # submitit's `except Exception`, which would change the code to 1, does not catch SystemExit.
        if code:
            sys.exit(code)


def _ignore_signal(_number: int, _frame: object) -> None:
    """Do nothing at a signal: SLURM signals the ranks itself, and the script waits for them."""


class SubmititSubmitter:
    """Submits a run as a job of submitit, which runs the run's batch script.

    submitit's files are in the folder `submitit/` of the run folder.
    """

    def __init__(self, slurm: SlurmClient) -> None:
        self._slurm = slurm

    def script(self, job: Job) -> str:
        executor = _executor(job, self._slurm, submits=False)
        return executor._make_submission_file_text(executor._submitit_command_str, "")

    def submit(self, job: Job) -> str:
        """Queue the run's script through submitit, record the job and return its id."""
        folder = RunFolder(job.run_dir)
        executor = _executor(job, self._slurm)
        job_id = str(executor.submit(RunScript(str(folder.script_file))).job_id)
        folder.add_event("submitted", job_id=job_id, submitter="submitit")
        return job_id


def _parameters(job: Job, known: set[str]) -> dict[str, Any]:
    """Return a job's sbatch options as parameters of submitit.

    Args:
        job: the job.
        known: the parameters that submitit knows; other options become its `additional_parameters`.
    """
    parameters: dict[str, Option | None] = {}
    additional: dict[str, Option] = {}
    for name, value in sbatch_options(job).items():
        parameter = name.replace("-", "_")
        if parameter in known:
            parameters[parameter] = value
        else:
            additional[name] = value

    # submitit's default workload key is "submitit". With None, its script has no line for the key.
    parameters.setdefault("wckey", None)
    return {
        **parameters,
        # Pass the time limit as a number of minutes, because submitit computes with it.
        "time": job.resources.time_limit_min,
        "signal_delay_s": job.policy.signal_lead_s,
        "stderr_to_stdout": True,
        "use_srun": False,
        "setup": ["trap : TERM USR1 USR2  # submitit's shell waits for the script, which decides"],
        "additional_parameters": additional,
    }


def _executor(job: Job, slurm: SlurmClient, *, submits: bool = True) -> SlurmExecutor:
    """Return a submitit executor for a job, which calls sbatch by slurmddp's client.

    Args:
        job: the job.
        slurm: the client.
        submits: whether the executor submits jobs. If not, it only renders the script, and works on a
            machine without SLURM.

    Raises:
        SlurmError: there is no SLURM, and `submits`.
    """
    import submitit
    from submitit.core.utils import JobPaths

    class Executor(submitit.SlurmExecutor):
        def _submit_command(self, command: str) -> Any:
            unique = uuid.uuid4().hex
            script = JobPaths.get_first_id_independent_folder(self.folder) / f".submission_file_{unique}.sh"
            script.write_text(self._make_submission_file_text(command, unique), encoding="utf-8")
            job_id = submit(job, script, slurm)
            submitted = self.job_class(folder=self.folder, job_id=job_id, tasks=[0])
            submitted.paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
            return submitted

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            text: str = super()._make_submission_file_text(command, uid)
            minutes = job.resources.time_limit_min
            if minutes is None:
                return text
            return text.replace(f"--time={minutes}\n", f"--time={render_minutes(minutes)}\n")

        @classmethod
        def affinity(cls) -> int:
            return super().affinity() if submits else 1

    try:
        executor = Executor(RunFolder(job.run_dir).path / "submitit", python=shlex.quote(job.python))
    except RuntimeError as error:
        raise SlurmError(
            f"submitit finds no SLURM: {error}.",
            hint="Go to a login node of the cluster, or start a SLURM here with `slurmddp sandbox up`.",
        ) from error

    executor.update_parameters(**_parameters(job, set(executor._valid_parameters())))
    return executor
