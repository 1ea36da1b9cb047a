"""Find the run folder of a configuration by its name, and compare the stored configuration with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmddp.config.extension import LENGTHS
from slurmddp.errors import SlurmddpError
from slurmddp.runs.folder.config_secrets import without_environment
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.identity import fingerprint, leaves, named, shown
from slurmddp.settings.spec import OLD_RUN_DIGITS

_CHANGED_LATER = frozenset({"nodes", "ranks_per_node", "train.global_batch", *LENGTHS})
"""Keys that `resume nodes=2`, `resume train.steps=800` and `elastic` change after a run got its name."""


def run_dir_of(runs_dir: Path, name: str, config: Mapping[str, Any]) -> Path:
    """Return the path of the run folder for a configuration, whether it exists or not.

    Earlier versions named run folders with fewer hex digits. If such a folder holds the run of this
    configuration, its path is returned.

    Args:
        runs_dir: the folder of all runs.
        name: the value of the key `name`, with which the run's name begins.
        config: the configuration, with the size of the job.
    """
    digits = fingerprint(config)
    old = RunFolder(runs_dir / f"{name}-{digits[:OLD_RUN_DIGITS]}")
    if old.config_file.is_file() and _is_run_of(old, config):
        return old.path
    return runs_dir / f"{name}-{digits}"


def _is_run_of(folder: RunFolder, config: Mapping[str, Any]) -> bool:
    """Return whether a folder holds the run of a configuration; also True if the folder can't be read."""
    try:
        return not differences_of_runs(folder.config(), config)
    except (SlurmddpError, OSError):
        # With False, a second run would start beside a damaged one. With True, the start refuses the damaged
        # folder.
        return True


def differences_of_runs(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the keys in which two configurations with the same run name differ; empty for the same run.

    The name of a run ends in a hash, so two different configurations may have the same name. If the stored
    configuration now has another hash, the run was resized or extended after its start. Then the keys of size
    and length are not compared.

    Args:
        stored: the configuration in the folder of a run.
        given: the configuration of a new job with the name of this run.

    Returns:
        For each key (key, stored value, given value), the values as text.
    """
    before = dict(leaves(named(stored)))
    now = dict(leaves(named(given)))
    compared = before.keys() | now.keys()
    if fingerprint(stored)[:OLD_RUN_DIGITS] != fingerprint(given)[:OLD_RUN_DIGITS]:
        compared -= _CHANGED_LATER
    different = [key for key in sorted(compared) if shown(before, key) != shown(now, key)]

    # Values of environment variables may be secrets, so only their digests are shown.
    before |= dict(leaves(named(without_environment(stored, digests=True))))
    now |= dict(leaves(named(without_environment(given, digests=True))))
    return [(key, shown(before, key), shown(now, key)) for key in different]
