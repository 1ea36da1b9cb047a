"""Describe rules of a site that no key of a cluster file changes, in sentences for a person; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

_CREDENTIAL_S = 120
"""SLURM's default lifetime of a credential, in seconds; SLURM delays a requeued job for as long."""
_PRIVATE_TMP = ("job_container/tmpfs", "namespace/tmpfs", "namespace/linux")
"""SLURM plugins that give each job its own copy of some folders, by default /tmp and /dev/shm."""


def requeue_delay(config: Mapping[str, str]) -> str:
    """Return a sentence on the delay before a requeued job may start again.

    Args:
        config: the facts of `scontrol show config`.
    """
    if "enable_expedited_requeue" in config.get("SlurmctldParameters", "").split(","):
        expedited = " With `requeue: expedite` under `sbatch:` it may start at once."
    else:
        expedited = ""

    # SLURM 25.11 introduced `requeue_delay`; without it the lifetime of a credential counts, as in older
    # versions.
    for key, option in (("SchedulerParameters", "requeue_delay"), ("AuthInfo", "cred_expire")):
        match = re.search(rf"(?:^|,){option}=(\d+)", config.get(key, ""))
        if match is not None:
            return f"A requeued job waits {match[1]} s at least ({key}={option}).{expedited}"
    return f"A requeued job waits {_CREDENTIAL_S} s at least (SLURM's default).{expedited}"


def private_tmp(config: Mapping[str, str]) -> str:
    """Return a sentence if each job has a /tmp of its own, which ends with the job; else an empty text.

    Args:
        config: the facts of `scontrol show config`.
    """
    # SLURM 25.11 has renamed JobContainerType.
    for key in ("NamespaceType", "JobContainerType"):
        plugin = config.get(key, "")
        if plugin in _PRIVATE_TMP:
            return (
                f"Each job has a /tmp and a /dev/shm of its own ({key}={plugin}), so a copy that `stage:` "
                "makes there serves one job only; a folder that outlives the job saves later copies."
            )
    return ""
