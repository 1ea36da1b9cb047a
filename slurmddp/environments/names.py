"""List the environment variables of slurmddp, with their meaning and the process that sets them."""

from __future__ import annotations

# Settings of the user.

ENVIRONMENT_VARIABLE = "SLURMDDP_ENVIRONMENT"
"""The launcher, against what other variables say: `slurm`, `torchrun`, `mpi`, `single`, or the import path of
a function or class of your own (`environments/detect.py`)."""
MASTER_ADDR_VARIABLE = "SLURMDDP_MASTER_ADDR"
"""An address of rank 0's node that all other nodes can reach."""
BIND_VARIABLE = "SLURMDDP_BIND"
"""`off` leaves the ranks unbound from processors."""
ALLOW_OTHER_CONFIG_VARIABLE = "SLURMDDP_ALLOW_OTHER_CONFIG"
"""`1` lets a run load a checkpoint of another configuration."""
DEBUG_VARIABLE = "SLURMDDP_DEBUG"
"""`1` lets the command line show the traceback of an error."""
OVER_SSH_VARIABLE = "SLURMDDP_OVER_SSH"
"""On a login node `1` for a command that came by ssh, so that `ssh=` does not send it on again; `terminal` if
its output is shown on a terminal."""

DETACHED_VARIABLE = "SLURMDDP_DETACHED"
"""`1` in a local run that `slurmddp.train` or `slurmddp.submit` started: nobody reads its output."""

# Facts of an attempt. The batch step gives them to the agents, and agents to their ranks.

RUN_DIR_VARIABLE = "SLURMDDP_RUN_DIR"
"""The run folder."""
ATTEMPT_VARIABLE = "SLURMDDP_ATTEMPT"
"""The number of the attempt, from 0."""
EVENT_VARIABLE = "SLURMDDP_EVENT"
"""The event for which the command of `policy.on_event` runs: started, requeued, finished, failed, ..."""
SECRET_VARIABLE = "SLURMDDP_SECRET"
"""The random secret of the attempt, which processes prove to know when they connect."""
SCRIPT_PID_VARIABLE = "SLURMDDP_SCRIPT_PID"
"""The process id of the batch script."""
PYTHON_VARIABLE = "SLURMDDP_PYTHON"
"""The interpreter of the batch step; only the batch script has the variable."""
END_TIME_VARIABLE = "SLURMDDP_END_TIME"
"""The time at which SLURM ends the job, in seconds since the epoch."""
LEAD_VARIABLE = "SLURMDDP_LEAD_S"
"""Seconds from SIGUSR2 to the end of the job."""
KILL_WAIT_VARIABLE = "SLURMDDP_KILL_WAIT_S"
"""Seconds from SIGTERM to SIGKILL."""
PREEMPT_GRACE_VARIABLE = "SLURMDDP_PREEMPT_GRACE_S"
"""Further seconds before SIGKILL if the job is preempted."""
SIGNALS_ALL_VARIABLE = "SLURMDDP_SIGNALS_ALL"
"""`1` if SLURM signals every process of a step, and not only its tasks (`proctrack/linuxproc`)."""

# Facts of a launch. The launcher gives them to the processes that it starts.

LAUNCHER_VARIABLE = "SLURMDDP_LAUNCHER"
"""`local` in the ranks that `Distributon.launch` starts."""
LAUNCH_ID_VARIABLE = "SLURMDDP_LAUNCH_ID"
"""An id that all processes of one launch share, and no others."""
MPIEXEC_VARIABLE = "SLURMDDP_MPIEXEC"
"""The pid and start time of the mpiexec of a rank; the rank finds them out by itself."""
EMULATED_VARIABLE = "SLURMDDP_EMULATED"
"""`1` in a SLURM step that a local run emulates on this machine."""
CONTROLLER_VARIABLE = "SLURMDDP_CONTROLLER"
"""`FD:WORKERS` in a controller script: the listening socket to which the workers of its job connect."""

# Facts of a rank. The agent gives them to the ranks that it starts.

RESTART_COUNT_VARIABLE = "SLURMDDP_RESTART_COUNT"
"""The restart count of the worker group in this attempt, from 0."""
PREFLIGHT_VARIABLE = "SLURMDDP_PREFLIGHT"
"""`1` if a configured preflight is due; `0` after the ranks of the attempt have completed a step."""
IMPORTS_VARIABLE = "SLURMDDP_IMPORTS_S"
"""Seconds that the agent took to start and import, and the monotonic time at which it was ready."""
HEARTBEAT_VARIABLE = "SLURMDDP_HEARTBEAT_FD"
"""The descriptor of the rank's heartbeat page."""
CHANNEL_VARIABLE = "SLURMDDP_CHANNEL_FD"
"""The descriptor of the rank's channel to the checkpoint service of its node."""
MEMORY_VARIABLE = "SLURMDDP_MEMORY_FDS"
"""The descriptors of the shared memory for states, separated by commas."""

THREADS_BY_AGENT_VARIABLE = "SLURMDDP_THREADS_BY_AGENT"
"""`1` if the agent has set OMP_NUM_THREADS, as torchrun does, and no person has."""
SNAPSHOT_VARIABLE = "SLURMDDP_SNAPSHOT"
"""`1` if a program of Python imports from the snapshot of the code; it never sees the variable."""

# Marks of the sandbox.

SANDBOX_ROOT_VARIABLE = "SLURMDDP_SANDBOX_ROOT"
"""The folder of the sandbox that started this process."""
SANDBOX_JOB_VARIABLE = "SLURMDDP_SANDBOX_JOB"
"""The sandbox, node and job of this process; the epilog reads it."""
SANDBOX_PATH_VARIABLE = "SLURMDDP_SANDBOX_PATH"
"""The folders that `slurmddp sandbox env` has added to PATH."""
