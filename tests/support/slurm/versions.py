"""The versions of SLURM on which the tests run: 22.05 in `make test`, 24.11 and 26.05 by `.ci/slurm`."""

from __future__ import annotations

import os
from typing import TypeVar

from slurmddp.sandbox.machine import search_path, slurm_version

_Value = TypeVar("_Value")


def by_version(v22_05: _Value, v24_11: _Value) -> _Value:
    """Return the value for the installed version; all after 22.05 count as 24.11.

    Example:
        assert code == by_version(0, 1)
    """
    # Don't ask `scontrol --version`: it needs a configuration file to answer.
    return v22_05 if slurm_version(search_path(os.environ)) <= (22, 5) else v24_11
