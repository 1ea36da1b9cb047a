"""The variables by which a shell or process uses a sandbox, and shell lines that unset them; pure."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from slurmddp.environments.names import MASTER_ADDR_VARIABLE, SANDBOX_PATH_VARIABLE
from slurmddp.sandbox.plan import Plan


def variables(plan: Plan, folders: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set in `environ`, given the folders of SLURM's programs."""
    wanted = {"SLURM_CONF": str(plan.conf)}
    if not plan.namespaces:
        wanted[MASTER_ADDR_VARIABLE] = "127.0.0.1"
    here = environ.get("PATH", "").split(os.pathsep)
    missing = [folder for folder in dict.fromkeys(folders) if folder not in here]
    if missing:
        wanted["PATH"] = os.pathsep.join([*filter(None, here), *missing])
        wanted[SANDBOX_PATH_VARIABLE] = os.pathsep.join(missing)
    return wanted


def export_lines(wanted: Mapping[str, str]) -> list[str]:
    """Return shell lines that set `wanted`, and unset variables of another sandbox."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in wanted.items()]
    return lines if MASTER_ADDR_VARIABLE in wanted else [*lines, f"unset {MASTER_ADDR_VARIABLE}"]


def unset_lines(environ: Mapping[str, str]) -> list[str]:
    """Return shell lines that undo `export_lines` in a shell that has `environ`."""
    lines = [f"unset SLURM_CONF {MASTER_ADDR_VARIABLE} {SANDBOX_PATH_VARIABLE}"]
    added = environ.get(SANDBOX_PATH_VARIABLE, "").split(os.pathsep)
    if any(added):
        kept = [folder for folder in environ.get("PATH", "").split(os.pathsep) if folder not in added]
        lines.append(f"export PATH={shlex.quote(os.pathsep.join(kept))}")
    return lines
