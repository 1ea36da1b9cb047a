"""The sbatch and srun options of a job as plain values; pure.

Both submitters send these, each in its own way, so a job asks for the same whichever sends it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurmddp.errors import ConfigError
from slurmddp.settings.spec import Job
from slurmddp.slurm.job_script import job_name
from slurmddp.slurm.units import render_minutes

Option = str | int | bool
"""True stands for a bare flag."""

_OWN_KEYS = {
    "nodes": "nodes=", "time": "time_limit=", "partition": "partition=", "account": "account=", "qos": "qos=",
    "constraint": "constraint", "reservation": "reservation", "cpus-per-task": "cpus_per_node=",
    "gpus-per-node": "gpus_per_node=", "mem": "mem_gb=", "mem-per-cpu": "mem_gb= and mem_request",
    "mem-per-gpu": "mem_gb= and mem_request", "job-name": "name=",
    "signal": "policy.signal_lead_s=", "requeue": "policy.requeue=",
    "no-requeue": "policy.requeue=", "no-kill": "spare_nodes= or elastic=",
}  # fmt: skip
"""sbatch options that slurmddp writes itself, and the setting of ours that a person wants instead."""

_MEMORY_SHARES = {"mem-per-cpu": "cpus_per_node", "mem-per-gpu": "gpus_per_node"}
"""Options that ask for memory by a part of the node, and the key with the number of parts."""

_SHAPE = ("ntasks", "ntasks-per-node")
"""Options with one agent for each node; `false` under `sbatch:` leaves one out, as some sites demand."""
_REFUSED = {
    "export": "ranks get the variables of the command; set others under `env:` in the cluster file",
    "export-file": "ranks get the variables of the command; set others under `env:` in the cluster file",
    "chdir": "ranks start in the folder of the command; change to that folder first",
    "wait": "a submission returns at once; `slurmddp logs -f RUN` follows the run to its end",
    "test-only": "`--check` asks SLURM without queueing the job",
    "hetjob": "all nodes of a run are of one kind",
    "het-group": "all nodes of a run are of one kind",
    "ntasks-per-gpu": "each node has one agent, which starts a rank for each GPU",
    "overcommit": "each node has one agent, which starts the ranks; set ranks_per_node",
    "wrap": "slurmddp writes the script; `slurmddp run -- COMMAND` runs a command",
    "input": "ranks have no input",
    "parsable": "slurmddp reads the answer of sbatch itself",
    "help": "it prints help instead of submitting a job",
    "version": "it prints a version instead of submitting a job",
}
"""Options of sbatch that no job of slurmddp can have, with the reason and what to do instead."""
_GPU_SHARES = ("gpus", "gpus-per-task", "gpus-per-socket")
"""Other ways to ask for GPUs, which contradict the number for each node."""
_RESOURCE_LISTS = ("gres", "tres-per-task")
"""Options that list resources of any kind, such as `gres=nvme:1,gpu:2` and `tres-per-task=gres/gpu:1`."""
_RESERVED = frozenset({*_SHAPE, "output", "error", "open-mode"})
_ONE_CLUSTER = frozenset({"cluster", "clusters"})
"""The commands ask one SLURM, here and in the job, and would not find a job of another."""
_SRUN_RESERVED = frozenset(
    {"nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "kill-on-bad-exit", "wait", "mpi", "export"}
    | {"output", "error", "input", "multi-prog", "pty", "label", "jobid", "chdir", "unbuffered"}
)


def sbatch_options(job: Job) -> dict[str, Option]:
    """Return the job's options for sbatch, by their long names, sorted; raises ConfigError."""
    cluster, resources = job.cluster, job.resources
    options: dict[str, Option | None] = {
        "job-name": job_name(job.run_name),
        "nodes": resources.all_nodes,
        "no-kill": True if job.tolerates_node_loss else None,
        "ntasks": resources.all_nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": resources.cpus_per_node,
        "time": None if resources.time_limit_min is None else render_minutes(resources.time_limit_min),
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "reservation": cluster.reservation,
        "dependency": f"afterok:{':'.join(job.after)}" if job.after else None,
        "open-mode": "append",
        "output": _output(job),
        "signal": f"USR2@{_signal_lead(job)}",
        "requeue" if job.policy.requeue else "no-requeue": True,
        **_gpus(job),
        **_memory(job),
    }
    kept = {name: value for name, value in options.items() if value is not None and value != ""}
    own, given = set(kept) | _RESERVED, dict(cluster.sbatch)
    for name in [name for name, value in given.items() if value is False and _long_name(name) in _SHAPE]:
        del given[name]
        del kept[_long_name(name)]
    _refuse_other_gpus(job, given)
    kept.update(_others("sbatch", given, own))
    return {name: _one_line(f"sbatch option {name}", kept[name]) for name in sorted(kept)}


def srun_options(job: Job) -> dict[str, Option]:
    """Return the options of srun from the cluster file, and `--no-kill` where needed; raises ConfigError."""
    own: dict[str, Option] = {"no-kill": True} if job.tolerates_node_loss else {}
    return dict(sorted({**_others("srun", job.cluster.srun, _SRUN_RESERVED), **own}.items()))


def note_on_cpus(job: Job) -> str:
    """Return a note if a node's ranks share the CPUs that SLURM gives to one task by default; else empty."""
    ranks = job.resources.ranks_per_node
    gets_more = (
        job.resources.cpus_per_node or job.resources.gpus_per_node or "exclusive" in job.cluster.sbatch
    )
    if gets_more or ranks == 1:
        return ""
    return (
        f"No CPUs are asked for, so the {ranks} ranks of a node share what this SLURM gives to one task, "
        f"often one CPU: cpus_per_node={ranks} asks for one each."
    )


def _output(job: Job) -> str:
    """Return the log of the batch script; after a backslash SLURM would replace no `%j` and no `%n`."""
    if "\\" in str(job.run_dir):
        raise ConfigError(
            f"The run folder would be {job.run_dir}, and SLURM writes no logs into a path with a backslash.",
            hint="Rename the folder, or say runs_dir=/another/folder.",
        )
    return str(job.run_dir / "logs").replace("%", "%%") + "/slurm-%j.out"


def _signal_lead(job: Job) -> int:
    """Return the lead in seconds; it must leave time to train and fit into SLURM's two bytes."""
    lead, limit = job.policy.signal_lead_s, job.resources.time_limit_min
    if not 0 < lead <= 65535:
        raise ConfigError(
            f"policy.signal_lead_s={lead} is not between 1 and 65535.",
            hint="It is the seconds that a save may take.",
        )
    if limit is not None and lead >= limit * 60:
        raise ConfigError(
            f"policy.signal_lead_s={lead} leaves nothing of time_limit={render_minutes(limit)}.",
            hint="Lengthen time_limit= or shorten policy.signal_lead_s=.",
        )
    return lead


def _gpus(job: Job) -> dict[str, Option]:
    gpus, cluster = job.resources.gpus_per_node, job.cluster
    if not gpus or cluster.gpu_request == "none":
        return {}
    amount = f"{cluster.gpu_type}:{gpus}" if cluster.gpu_type else str(gpus)
    if cluster.gpu_request == "gres":
        return {"gres": f"gpu:{amount}"}
    if cluster.gpu_request == "gpus-per-node":
        return {"gpus-per-node": amount}
    raise ConfigError(
        f"cluster.gpu_request={cluster.gpu_request!r} is not known.", hint="Use gpus-per-node, gres or none."
    )


def _memory(job: Job) -> dict[str, Option]:
    mem_gb, dialect = job.resources.mem_gb, job.cluster.mem_request
    if dialect not in {"mem", "none", *_MEMORY_SHARES}:
        raise ConfigError(
            f"cluster.mem_request={dialect!r} is not known.",
            hint="Use mem, mem-per-cpu, mem-per-gpu or none.",
        )
    if mem_gb is None or dialect == "none":
        return {}
    if mem_gb < 0:
        raise ConfigError(f"mem_gb={mem_gb} is negative.", hint="Give GiB per node; 0 asks for all of it.")
    megabytes = round(mem_gb * 1024)
    if dialect == "mem":
        return {"mem": f"{megabytes}M" if megabytes else "0"}
    if not megabytes:
        return {}
    key = _MEMORY_SHARES[dialect]
    shares = getattr(job.resources, key)
    if not shares:
        raise ConfigError(
            f"mem_gb={mem_gb} can't be shared out by {dialect}: {key} is not set.",
            hint=f"Set {key}=, or mem_request: mem in the cluster file.",
        )
    return {dialect: f"{-(-megabytes // shares)}M"}


def _long_name(key: str) -> str:
    return str(key).removeprefix("--").replace("_", "-")


def _refuse_other_gpus(job: Job, given: Mapping[str, Option]) -> None:
    """Refuse a second request for GPUs beside the one that slurmddp writes."""
    for key, value in given.items():
        name = _long_name(key)
        names_gpus = re.search(r"(?:^|[,/:])gpu(?:$|[,:=])", str(value)) is not None
        is_second = name in _GPU_SHARES or (name in _RESOURCE_LISTS and names_gpus)
        if is_second and value is not False and _gpus(job):
            raise ConfigError(
                f"cluster.sbatch sets {name}, and the job already asks for its GPUs with "
                f"{' '.join(f'--{own}={amount}' for own, amount in _gpus(job).items())}.",
                hint="Set gpu_request: none in the cluster file if the site wants the other option.",
            )


def _others(tool: str, given: Mapping[str, Option], taken: set[str] | frozenset[str]) -> dict[str, Option]:
    found: dict[str, Option] = {}
    for key, value in given.items():
        name = _long_name(key)
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ConfigError(
                f"cluster.{tool} has the option {key!r}.", hint="Use long option names, without dashes."
            )
        if value is False or value is None:
            continue
        if name in _ONE_CLUSTER:
            raise ConfigError(
                f"cluster.{tool} sets {name}: the job would go to another SLURM, where it can't be followed.",
                hint="Say `export SLURM_CLUSTERS=NAME`, so that all commands ask the SLURM of that cluster.",
            )
        if name == "array":
            raise ConfigError(
                f"cluster.{tool} sets array, but the elements of an array would all train in one run folder.",
                hint="Remove it there; `slurmddp train -m` submits an array with one run for each element.",
            )
        if tool == "sbatch" and name in _REFUSED:
            raise ConfigError(f"cluster.sbatch sets {name}.", hint=f"Remove it there: {_REFUSED[name]}.")
        if name in taken or (tool == "sbatch" and name in _OWN_KEYS):
            own = _OWN_KEYS.get(name, "") if tool == "sbatch" else ""
            raise ConfigError(
                f"cluster.{tool} sets {name}, which slurmddp writes itself.",
                hint=f"Remove it there and set {own} instead." if own else "Remove it there.",
            )
        found[name] = _one_line(f"cluster.{tool}.{key}", value)
    return found


def _one_line(what: str, value: Option) -> Option:
    if isinstance(value, str) and re.search(r"[\n\r\0]", value):
        raise ConfigError(
            f"{what} is {value!r}.", hint="It goes into one line of the script: no line breaks, no NUL."
        )
    return value
