"""The text of every configuration file of a sandbox, rendered from a `Plan`; pure, so tests can read it."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from slurmddp.sandbox.plan import Plan


def render_files(plan: Plan) -> dict[Path, str]:
    """Return path -> content of all files that the daemons of `plan` read."""
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
    """Return one template filled in for `plan`; a name the template can't resolve is an error."""
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
    """Return the files that stand for GPUs: links to /dev/null, as SLURM counts only character devices."""
    return tuple(plan.root / "gpus" / f"gpu{index}" for index in range(plan.request.gpus))
