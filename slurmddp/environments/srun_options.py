"""List the srun options of every step that slurmddp starts.

`slurm/options.py` adds the options of one job, such as `--cpu-bind` under `srun:` in its cluster file.
"""

from __future__ import annotations

STEP_OPTIONS = (
    # A task may end long after the first task that ends.
    "--wait=0",
    # Ranks find each other without MPI, so no MPI plugin of the site takes part in the start.
    "--mpi=none",
    # Tasks get all variables, even after `sbatch --export=NONE`.
    "--export=ALL",
)
