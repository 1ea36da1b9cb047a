"""Render the configuration files of a sandbox from its `Plan`; pure."""

from __future__ import annotations

from pathlib import Path

from slurmddp.sandbox.plan import Plan
from slurmddp.templates import template


def render_files(plan: Plan) -> dict[Path, str]:
    """Return the text of each configuration file, by path."""
    names = ["slurm.conf", "cgroup.conf", "task-prolog.sh", "epilog.sh"]
    if plan.request.gpus:
        names.append("gres.conf")
    if plan.request.accounting:
        names.append("slurmdbd.conf")
    if plan.request.shared == "glusterfs":
        names += ["glusterfs-server.vol", "glusterfs-client.vol"]
    values = {"plan": plan, "request": plan.request, "machine": plan.machine, "root": plan.root}

    return {plan.root / name: template(f"sandbox-{name}.j2").render(values) for name in names}
