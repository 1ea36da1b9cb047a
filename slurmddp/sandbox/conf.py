"""Render the configuration files of a sandbox from its `Plan`; pure."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from slurmddp.sandbox.plan import Plan


def render_files(plan: Plan) -> dict[Path, str]:
    """Return the content of all configuration files by path."""
    names = {
        "slurm.conf": "sandbox-slurm.conf.j2",
        "cgroup.conf": "sandbox-cgroup.conf.j2",
        "task-prolog.sh": "sandbox-task-prolog.sh.j2",
        "epilog.sh": "sandbox-epilog.sh.j2",
    }
    if plan.request.gpus:
        names["gres.conf"] = "sandbox-gres.conf.j2"
    if plan.request.accounting:
        names["slurmdbd.conf"] = "sandbox-slurmdbd.conf.j2"
    return {plan.root / name: render(template, plan) for name, template in names.items()}


def render(template: str, plan: Plan) -> str:
    """Render one template for `plan`; raises an error for unknown names."""
    import jinja2

    source = (files("slurmddp.templates") / template).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    values = {"plan": plan, "request": plan.request, "machine": plan.machine, "root": plan.root}
    return environment.from_string(source).render(values)


def gpu_files(plan: Plan) -> tuple[Path, ...]:
    """Return the fake GPUs: links to /dev/null, because SLURM accepts only character devices."""
    return tuple(plan.root / "gpus" / f"gpu{index}" for index in range(plan.request.gpus))
