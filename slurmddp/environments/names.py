"""The names of all environment variables of slurmddp, with who sets each and who reads it."""

from __future__ import annotations

# Settings of a person.

ENVIRONMENT_VARIABLE = "SLURMDDP_ENVIRONMENT"
"""The launcher to believe, `slurm`, `torchrun`, `mpi` or `single`, whatever the other variables say."""
MASTER_ADDR_VARIABLE = "SLURMDDP_MASTER_ADDR"
"""An address of rank 0's node that all other nodes reach."""
BIND_VARIABLE = "SLURMDDP_BIND"
"""`off` leaves the ranks unbound from processors."""
ALLOW_OTHER_CONFIG_VARIABLE = "SLURMDDP_ALLOW_OTHER_CONFIG"
"""`1` lets a run load a checkpoint of another configuration."""
DEBUG_VARIABLE = "SLURMDDP_DEBUG"
"""`1` lets the command line show the traceback of an error."""

# Facts of an attempt, which the batch step gives to the agents, and agents to their ranks.

RUN_DIR_VARIABLE = "SLURMDDP_RUN_DIR"
"""The run folder."""
ATTEMPT_VARIABLE = "SLURMDDP_ATTEMPT"
"""The number of the attempt, from 0."""
SECRET_VARIABLE = "SLURMDDP_SECRET"
"""The random secret of the attempt; processes that connect to each other prove that they know it."""
SCRIPT_PID_VARIABLE = "SLURMDDP_SCRIPT_PID"
"""The process id of the batch script."""
PYTHON_VARIABLE = "SLURMDDP_PYTHON"
"""The interpreter of the batch step, in the batch script alone."""
END_TIME_VARIABLE = "SLURMDDP_END_TIME"
"""When SLURM ends the job, in seconds since the epoch."""
LEAD_VARIABLE = "SLURMDDP_LEAD_S"
"""How many seconds before the end SLURM sends SIGUSR2."""
KILL_WAIT_VARIABLE = "SLURMDDP_KILL_WAIT_S"
"""How many seconds after SIGTERM SLURM sends SIGKILL."""
PREEMPT_GRACE_VARIABLE = "SLURMDDP_PREEMPT_GRACE_S"
"""How many seconds later SIGKILL comes if the job is preempted."""

# Facts of a launch, which the launcher gives to the processes that it starts.

LAUNCHER_VARIABLE = "SLURMDDP_LAUNCHER"
"""`local` in the ranks that `Distributon.launch` starts."""
LAUNCH_ID_VARIABLE = "SLURMDDP_LAUNCH_ID"
"""A text that all processes of one launch share, and no others."""
EMULATED_VARIABLE = "SLURMDDP_EMULATED"
"""`1` in a SLURM step that a local run pretends on this machine."""

# Facts of a rank, which the agent gives to the ranks that it forks.

GENERATION_VARIABLE = "SLURMDDP_GENERATION"
"""How often the ranks of the attempt were started again in place, from 0; only an agent sets it."""
PREFLIGHT_VARIABLE = "SLURMDDP_LOOK"
"""`1` if a configured preflight is due; `0` after ranks of the attempt have completed a step."""
IMPORTS_VARIABLE = "SLURMDDP_IMPORTS_S"
"""How many seconds the agent took to start and import, and the monotonic time at which it was ready."""
HEARTBEAT_VARIABLE = "SLURMDDP_PULSE_FD"
"""The descriptor of the rank's heartbeat page."""
CHANNEL_VARIABLE = "SLURMDDP_CHANNEL_FD"
"""The descriptor of the rank's channel to the checkpoint service of its node."""
MEMORY_VARIABLE = "SLURMDDP_MEMORY_FDS"
"""The descriptors of the shared memory that holds states, separated by commas."""

# Marks of the sandbox.

SANDBOX_ROOT_VARIABLE = "SLURMDDP_SANDBOX_ROOT"
"""The folder of the sandbox that started this process."""
SANDBOX_JOB_VARIABLE = "SLURMDDP_SANDBOX_JOB"
"""The sandbox, node and job of this process, for the epilog."""
SANDBOX_PATH_VARIABLE = "SLURMDDP_SANDBOX_PATH"
"""What `slurmddp sandbox env` has added to PATH."""
