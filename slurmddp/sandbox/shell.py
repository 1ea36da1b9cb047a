"""Return the variables by which a process uses a sandbox, and shell lines that set and unset them; pure."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from slurmddp.environments.names import MASTER_ADDR_VARIABLE, SANDBOX_PATH_VARIABLE
from slurmddp.sandbox.plan import Plan


def variables(plan: Plan, folders: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process needs to use the sandbox as its SLURM.

    Args:
        plan: the plan of the sandbox.
        folders: the folders of SLURM's programs.
        environ: the variables of the process.
    """
    settings = {"SLURM_CONF": str(plan.conf)}
    # Without namespaces the node names have no address. All nodes are this machine, so ranks meet at its
    # address.
    if not plan.namespaces:
        settings[MASTER_ADDR_VARIABLE] = "127.0.0.1"

    path_folders = environ.get("PATH", "").split(os.pathsep)
    missing = [folder for folder in dict.fromkeys(folders) if folder not in path_folders]
    if missing:
        settings["PATH"] = os.pathsep.join([*filter(None, path_folders), *missing])
        # `unset_lines` removes these folders again.
        settings[SANDBOX_PATH_VARIABLE] = os.pathsep.join(missing)

    return settings


def export_lines(settings: Mapping[str, str]) -> list[str]:
    """Return shell lines that set variables, and unset SLURMDDP_MASTER_ADDR if another sandbox set it."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    if MASTER_ADDR_VARIABLE not in settings:
        lines.append(f"unset {MASTER_ADDR_VARIABLE}")
    return lines


def unset_lines(environ: Mapping[str, str]) -> list[str]:
    """Return shell lines that undo `export_lines` in a shell that has `environ`."""
    lines = [f"unset SLURM_CONF {MASTER_ADDR_VARIABLE} {SANDBOX_PATH_VARIABLE}"]
    added = environ.get(SANDBOX_PATH_VARIABLE, "").split(os.pathsep)
    if any(added):
        kept = [folder for folder in environ.get("PATH", "").split(os.pathsep) if folder not in added]
        lines.append(f"export PATH={shlex.quote(os.pathsep.join(kept))}")

    return lines
