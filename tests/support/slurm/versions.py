"""The versions of SLURM on which the tests run: 22.05 in `make test`, 24.11 and 26.05 by `.ci/slurm`."""

from __future__ import annotations

import os
from typing import TypeVar

from slurmddp.sandbox.machine import search_path, slurm_version

_Value = TypeVar("_Value")


def by_version(v22_05: _Value, v24_11: _Value, *v26_05: _Value) -> _Value:
    """Return the value for the installed version; without a value of its own, 26.05 has the value of 24.11.

    Example:
        assert code == by_version(0, 1)
    """
    # Don't ask `scontrol --version`: it needs a configuration file to answer.
    installed = slurm_version(search_path(os.environ))
    if installed <= (22, 5):
        return v22_05
    return [v24_11, *v26_05][-1] if installed >= (26, 5) else v24_11
