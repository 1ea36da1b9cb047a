"""List the environment variables of slurmddp, with their meaning and the process that sets them."""

from __future__ import annotations

# Variables that a person sets.

ENVIRONMENT_VARIABLE = "SLURMDDP_ENVIRONMENT"
"""The launcher, whatever other variables are set: `slurm`, `torchrun`, `mpi`, `single`, or the import path of
a function or class of your own (`environments/detect.py`)."""
MASTER_ADDR_VARIABLE = "SLURMDDP_MASTER_ADDR"
"""An address of rank 0's node that all other nodes can reach."""
BIND_VARIABLE = "SLURMDDP_BIND"
"""`off` means that ranks are not bound to processors."""
ALLOW_OTHER_CONFIG_VARIABLE = "SLURMDDP_ALLOW_OTHER_CONFIG"
"""`1` lets a run load a checkpoint of another configuration."""
DEBUG_VARIABLE = "SLURMDDP_DEBUG"
"""`1` makes the command line print the traceback of an error."""
OVER_SSH_VARIABLE = "SLURMDDP_OVER_SSH"
"""Set on a login node for a command that came by ssh, so that `ssh=` does not send it on again: `terminal` if
its output is shown on a terminal, else `1`."""

DETACHED_VARIABLE = "SLURMDDP_DETACHED"
"""`1` in a local run that `slurmddp.train` or `slurmddp.submit` started, whose output nobody reads."""

# Variables about an attempt, which the batch step passes to agents, and agents pass to ranks.

RUN_DIR_VARIABLE = "SLURMDDP_RUN_DIR"
"""The run folder."""
ATTEMPT_VARIABLE = "SLURMDDP_ATTEMPT"
"""The number of the attempt, from 0."""
EVENT_VARIABLE = "SLURMDDP_EVENT"
"""The event for which the command of `policy.on_event` runs: started, requeued, finished, failed, ..."""
SECRET_VARIABLE = "SLURMDDP_SECRET"
"""The random secret of the attempt. Processes that connect prove that they know it."""
SCRIPT_PID_VARIABLE = "SLURMDDP_SCRIPT_PID"
"""The process id of the batch script."""
PYTHON_VARIABLE = "SLURMDDP_PYTHON"
"""The Python interpreter of the batch step; the variable exists only in the batch script."""
END_TIME_VARIABLE = "SLURMDDP_END_TIME"
"""The time at which SLURM ends the job, in seconds since the epoch."""
LEAD_VARIABLE = "SLURMDDP_LEAD_S"
"""Seconds from SIGUSR2 to the end of the job."""
KILL_WAIT_VARIABLE = "SLURMDDP_KILL_WAIT_S"
"""Seconds from SIGTERM to SIGKILL."""
PREEMPT_GRACE_VARIABLE = "SLURMDDP_PREEMPT_GRACE_S"
"""Additional seconds before SIGKILL if the job is preempted."""
SIGNALS_ALL_VARIABLE = "SLURMDDP_SIGNALS_ALL"
"""`1` if SLURM signals every process of a step and not only the tasks (`proctrack/linuxproc`)."""

# Variables about a launch, which the launcher passes to the processes that it starts.

LAUNCHER_VARIABLE = "SLURMDDP_LAUNCHER"
"""`local` in the ranks that `Distributon.launch` starts."""
LAUNCH_ID_VARIABLE = "SLURMDDP_LAUNCH_ID"
"""An id that only the processes of one launch share."""
MPIEXEC_VARIABLE = "SLURMDDP_MPIEXEC"
"""The pid and start time of the mpiexec of a rank, which the rank finds by itself."""
EMULATED_VARIABLE = "SLURMDDP_EMULATED"
"""`1` in a step of SLURM that a local run emulates on this machine."""
CONTROLLER_VARIABLE = "SLURMDDP_CONTROLLER"
"""`FD:WORKERS` in a controller script: the listening socket to which the workers of its job connect."""

# Variables about a rank, which the agent passes to the ranks that it starts.

RESTART_COUNT_VARIABLE = "SLURMDDP_RESTART_COUNT"
"""The restart count of the worker group in this attempt, from 0."""
PREFLIGHT_VARIABLE = "SLURMDDP_PREFLIGHT"
"""`1` if the configured preflight is to run; `0` once the ranks of the attempt have completed a step."""
IMPORTS_VARIABLE = "SLURMDDP_IMPORTS_S"
"""Seconds that the agent needed to start and import, and the monotonic time at which it was ready."""
HEARTBEAT_VARIABLE = "SLURMDDP_HEARTBEAT_FD"
"""The descriptor of the rank's heartbeat page."""
CHANNEL_VARIABLE = "SLURMDDP_CHANNEL_FD"
"""The descriptor of the rank's channel to the checkpoint service of its node."""
MEMORY_VARIABLE = "SLURMDDP_MEMORY_FDS"
"""The descriptors of the shared memory for states, separated by commas."""

THREADS_BY_AGENT_VARIABLE = "SLURMDDP_THREADS_BY_AGENT"
"""`1` if the agent set OMP_NUM_THREADS, as torchrun does, because the user did not."""
SNAPSHOT_VARIABLE = "SLURMDDP_SNAPSHOT"
"""`1` if a Python program is to import from the snapshot of the code; the program never sees the variable."""

# Variables that identify the processes of a sandbox.

SANDBOX_ROOT_VARIABLE = "SLURMDDP_SANDBOX_ROOT"
"""The folder of the sandbox that started this process."""
SANDBOX_JOB_VARIABLE = "SLURMDDP_SANDBOX_JOB"
"""The sandbox, node and job of this process; the epilog reads it."""
SANDBOX_PATH_VARIABLE = "SLURMDDP_SANDBOX_PATH"
"""The folders that `slurmddp sandbox env` has added to PATH."""
