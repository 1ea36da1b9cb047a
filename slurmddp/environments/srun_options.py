"""List the srun options of every step that slurmddp starts.

`slurm/sbatch_options.py` adds the options of one job, such as `--cpu-bind` under `srun:` in its cluster file.
"""

from __future__ import annotations

STEP_OPTIONS = (
    # srun must not kill the other tasks some time after the first task has ended (WaitTime in slurm.conf).
    "--wait=0",
    # Ranks find each other without MPI, so no MPI plugin of the site takes part in the start.
    "--mpi=none",
    # Tasks get all variables, even after `sbatch --export=NONE`.
    "--export=ALL",
)
