"""Render the configuration files of a sandbox from its `Plan`; pure."""

from __future__ import annotations

from pathlib import Path

from slurmddp.sandbox.plan import Plan
from slurmddp.templates import template


def render_files(plan: Plan) -> dict[Path, str]:
    """Return the content of all configuration files by path."""
    names = ["slurm.conf", "cgroup.conf", "task-prolog.sh", "epilog.sh"]
    names += ["gres.conf"] if plan.request.gpus else []
    names += ["slurmdbd.conf"] if plan.request.accounting else []
    values = {"plan": plan, "request": plan.request, "machine": plan.machine, "root": plan.root}
    return {plan.root / name: template(f"sandbox-{name}.j2").render(values) for name in names}
