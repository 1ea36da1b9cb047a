"""Find misspelled options under `sbatch:` before the job is sent to a login node or submitted.

The known names are the options of sbatch in SLURM 22.05 to 25.11. A plugin of a site may add options, so an
unknown name gets a note only if it resembles a known name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmddp.near_matches import near_matches

_NAMES = """
account acctg-freq array batch bb bbf begin bell chdir cluster cluster-constraint clusters comment constraint
container container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline
delay-boot dependency distribution error exclude exclusive export export-file external extra extra-node-info
get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold
ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
mem-per-gpu mincpus network nice no-bell no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core
ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output overcommit oversubscribe
parsable partition power prefer priority profile propagate qos quiet reboot requeue reservation resv-ports
segment signal sockets-per-node spread-job spread-segments stepmgr switches test-only thread-spec
threads-per-core time time-min tmp tres-bind tres-per-task uid use-min-nodes verbose wait wait-all-nodes wckey
wrap consolidate-segments
"""
_KNOWN = frozenset(_NAMES.split())


def misspelled_options(config: Mapping[str, Any]) -> list[str]:
    """Return a note for each option under `cluster.sbatch` that is unknown, but similar to a known option.

    Args:
        config: a checked configuration.
    """
    given = (config.get("cluster") or {}).get("sbatch") or {}
    names = {str(key).removeprefix("--").replace("_", "-") for key in given}

    notes = []
    for name in sorted(names - _KNOWN):
        near = near_matches(name, _KNOWN, else_all=False)
        if near:
            notes.append(f"cluster.sbatch.{name} is not an option of SLURM's sbatch. {near}")
    return notes
