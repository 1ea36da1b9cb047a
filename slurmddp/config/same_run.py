"""Find the run folder of a configuration by its name, and compare the configurations to be sure."""

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
"""The keys that `resume nodes=2`, `resume train.steps=800` and `elastic` change after the run was named."""


def run_dir_of(runs_dir: Path, name: str, config: Mapping[str, Any]) -> Path:
    """Return the folder of the run with this configuration; its name may be of an earlier version.

    Args:
        runs_dir: the folder of all runs.
        name: the first part of the run's name.
        config: the configuration, with the size of the job.
    """
    digits = fingerprint(config)
    old = RunFolder(runs_dir / f"{name}-{digits[:OLD_RUN_DIGITS]}")
    if old.config_file.is_file() and _is_run_of(old, config):
        return old.path
    return runs_dir / f"{name}-{digits}"


def _is_run_of(folder: RunFolder, config: Mapping[str, Any]) -> bool:
    """Return whether a folder holds the run of a configuration, or can't be read, which its start refuses."""
    try:
        return not differences_of_runs(folder.config(), config)
    except (SlurmddpError, OSError):
        return True


def differences_of_runs(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the keys in which two configurations are different runs, each with both values as text.

    A name proves nothing: digits of a hash are equal for different configurations now and then. A stored
    configuration with other digits than the given one was resized or extended, so neither is compared.

    Args:
        stored: the configuration in the folder of a run.
        given: the configuration of a job with the name of this run.
    """
    before = dict(leaves(named(stored)))
    now = dict(leaves(named(given)))
    is_changed = fingerprint(stored)[:OLD_RUN_DIGITS] != fingerprint(given)[:OLD_RUN_DIGITS]
    compared = (before.keys() | now.keys()) - (_CHANGED_LATER if is_changed else frozenset())
    different = [key for key in sorted(compared) if shown(before, key) != shown(now, key)]

    # Values of the environment may be secrets.
    before |= dict(leaves(named(without_environment(stored, digests=True))))
    now |= dict(leaves(named(without_environment(given, digests=True))))
    return [(key, shown(before, key), shown(now, key)) for key in different]
