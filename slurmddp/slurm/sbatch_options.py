"""Return the sbatch and srun options of a job as plain values; pure.

The submitters sbatch and submitit both use these options, so a job's request does not depend on the
submitter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurmddp.errors import ConfigError
from slurmddp.settings.spec import Job
from slurmddp.slurm.job_script import job_name
from slurmddp.slurm.units import render_minutes

Option = str | int | bool
"""The value of an option; True stands for an option without a value."""

_OWN_KEYS = {
    "nodes": "nodes=", "time": "time_limit=", "partition": "partition=", "account": "account=", "qos": "qos=",
    "constraint": "constraint", "reservation": "reservation", "cpus-per-task": "cpus_per_node=",
    "gpus-per-node": "gpus_per_node=", "mem": "mem_gb=", "mem-per-cpu": "mem_gb= and mem_request",
    "mem-per-gpu": "mem_gb= and mem_request", "job-name": "name=",
    "signal": "policy.signal_lead_s=", "requeue": "policy.requeue= (or the value `expedite`)",
    "no-requeue": "policy.requeue=", "no-kill": "spare_nodes= or elastic=",
}  # fmt: skip
"""Options of sbatch that slurmddp writes itself, each with the key of the configuration that sets it."""
_MEMORY_SHARES = {"mem-per-cpu": "cpus_per_node", "mem-per-gpu": "gpus_per_node"}
"""Options that ask for memory per CPU or per GPU, each with the key that holds their number on a node."""
_SHAPE = ("ntasks", "ntasks-per-node")
"""Options that ask for one task on each node; `false` under `sbatch:` omits them, as some sites demand."""
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
"""Further options that ask for GPUs, which would contradict slurmddp's own request."""
_RESOURCE_LISTS = ("gres", "tres-per-task")
"""Options that list resources of any kind, such as `gres=nvme:1,gpu:2` and `tres-per-task=gres/gpu:1`."""
_RESERVED = frozenset({*_SHAPE, "output", "error", "open-mode"})
"""Further options of sbatch that slurmddp writes itself; no key replaces them."""
_ONE_CLUSTER = frozenset({"cluster", "clusters"})
"""Options that choose another SLURM: slurmddp's commands query one SLURM, and would not find the job."""
_SRUN_RESERVED = frozenset(
    {"nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "kill-on-bad-exit", "wait", "mpi", "export"}
    | {"output", "error", "input", "multi-prog", "pty", "label", "jobid", "chdir", "unbuffered"}
)
"""Options of srun that slurmddp writes itself, or that would break the start of the agents."""


def sbatch_options(job: Job) -> dict[str, Option]:
    """Return the job's options for sbatch, sorted by their long names; raise ConfigError for wrong values."""
    cluster = job.cluster
    resources = job.resources
    time_limit = None
    if resources.time_limit_min is not None:
        time_limit = render_minutes(resources.time_limit_min)

    options: dict[str, Option | None] = {
        "job-name": job_name(job.run_name),
        "nodes": resources.all_nodes,
        # Without --no-kill SLURM ends the job when it loses a node.
        "no-kill": job.tolerates_node_loss or None,
        # One task for each node: slurmddp's agent, which starts the ranks of its node.
        "ntasks": resources.all_nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": resources.cpus_per_node,
        "time": time_limit,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "reservation": cluster.reservation,
        "dependency": f"afterok:{':'.join(job.after)}" if job.after else None,
        # Without --open-mode=append SLURM would truncate the log at each requeue.
        "open-mode": "append",
        "output": _output(job),
        "signal": f"USR2@{_signal_lead(job)}",
        **_requeue(job),
        **_gpus(job),
        **_memory(job),
    }
    kept = {name: value for name, value in options.items() if value is not None and value != ""}
    taken = set(kept) | _RESERVED

    given = {name: value for name, value in cluster.sbatch.items() if not _is_expedited_requeue(name, value)}
    # Some sites demand that a job omits `ntasks` or `ntasks-per-node`. For them, `false` under `sbatch:`
    # removes the option.
    for name in [name for name, value in given.items() if value is False and _long_name(name) in _SHAPE]:
        del given[name]
        del kept[_long_name(name)]

    _refuse_other_gpus(job, given)
    kept.update(_others("sbatch", given, taken))
    return {name: _one_line(f"sbatch option {name}", kept[name]) for name in sorted(kept)}


def srun_options(job: Job) -> dict[str, Option]:
    """Return the options of srun from the cluster file, and `--no-kill` if the job tolerates node loss.

    Raises:
        ConfigError: the cluster file sets an option that slurmddp does not allow there.
    """
    options = _others("srun", job.cluster.srun, _SRUN_RESERVED)
    # Without srun --no-kill SLURM kills the step when it loses a node.
    if job.tolerates_node_loss:
        options["no-kill"] = True
    return dict(sorted(options.items()))


def note_on_cpus(job: Job) -> str:
    """Return a note if the ranks of a node share the CPUs that SLURM gives to one task; else empty."""
    ranks = job.resources.ranks_per_node
    gets_more = (
        job.resources.cpus_per_node or job.resources.gpus_per_node or "exclusive" in job.cluster.sbatch
    )
    if gets_more or ranks == 1:
        return ""

    return (
        f"The job asks for no CPUs, so the {ranks} ranks of a node share what SLURM gives to one task, often "
        f"one CPU. Set cpus_per_node={ranks} for one CPU each."
    )


def _output(job: Job) -> str:
    """Return the value of `--output`: the path of the batch script's log, where `%j` means the job id."""
    # In a path with a backslash SLURM does not replace patterns such as `%j`.
    if "\\" in str(job.run_dir):
        raise ConfigError(
            f"The run folder would be {job.run_dir}, and SLURM writes no logs into a path with a backslash.",
            hint="Rename the folder, or set runs_dir=/another/folder.",
        )
    return str(job.run_dir / "logs").replace("%", "%%") + "/slurm-%j.out"


def _signal_lead(job: Job) -> int:
    """Return how many seconds before the time limit SLURM must send its signal.

    Raises:
        ConfigError: SLURM does not accept the number of seconds, or it exceeds the time limit.
    """
    lead = job.policy.signal_lead_s
    limit = job.resources.time_limit_min
    # SLURM stores the seconds between the signal and the time limit in 16 bits.
    if not 0 < lead <= 65535:
        raise ConfigError(
            f"policy.signal_lead_s={lead} is not between 1 and 65535.",
            hint="Set it to the number of seconds that a save may take.",
        )
    if limit is not None and lead >= limit * 60:
        raise ConfigError(
            f"policy.signal_lead_s={lead} leaves no time to train within time_limit={render_minutes(limit)}.",
            hint="Lengthen time_limit= or shorten policy.signal_lead_s=.",
        )
    return lead


def _requeue(job: Job) -> dict[str, Option]:
    """Return the option that allows or forbids requeues of the job."""
    if not job.policy.requeue:
        return {"no-requeue": True}
    # Where the site allows it, an expedited requeue (SLURM 25.11) starts the job again without a delay.
    if any(_is_expedited_requeue(name, value) for name, value in job.cluster.sbatch.items()):
        return {"requeue": "expedite"}
    return {"requeue": True}


def _is_expedited_requeue(key: str, value: Option) -> bool:
    """Return whether an entry under `sbatch:` is `requeue: expedite`; `requeue` may have no other value."""
    return _long_name(key) == "requeue" and value == "expedite"


def _gpus(job: Job) -> dict[str, Option]:
    """Return the option of sbatch that asks for the GPUs of each node; empty if the job asks for none."""
    gpus = job.resources.gpus_per_node
    cluster = job.cluster
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
    """Return the option of sbatch that asks for the memory of each node; empty if the job asks for none."""
    mem_gb = job.resources.mem_gb
    dialect = job.cluster.mem_request
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
    # sbatch takes --mem=0 as a request for all memory of a node.
    if dialect == "mem":
        return {"mem": f"{megabytes}M" if megabytes else "0"}
    if not megabytes:
        return {}

    key = _MEMORY_SHARES[dialect]
    shares = getattr(job.resources, key)
    if not shares:
        raise ConfigError(
            f"mem_gb={mem_gb} can't be requested as {dialect}, because {key} is not set.",
            hint=f"Set {key}=N, or write `mem_request: mem` in the cluster file.",
        )
    # Round up, so that the job gets at least the memory that it asks for.
    return {dialect: f"{-(-megabytes // shares)}M"}


def _long_name(key: str) -> str:
    """Return a key of the cluster file, such as `--mail_type`, as sbatch spells the option: `mail-type`."""
    return str(key).removeprefix("--").replace("_", "-")


def _refuse_other_gpus(job: Job, given: Mapping[str, Option]) -> None:
    """Raise ConfigError if `given` requests GPUs with another option than the one that slurmddp writes."""
    for key, value in given.items():
        name = _long_name(key)
        is_second = name in _GPU_SHARES or (name in _RESOURCE_LISTS and lists_gpus(value))
        if is_second and value is not False and _gpus(job):
            raise ConfigError(
                f"cluster.sbatch sets {name}, and the job already asks for its GPUs with "
                f"{' '.join(f'--{option}={amount}' for option, amount in _gpus(job).items())}.",
                hint="Set gpu_request: none in the cluster file if the site wants the other option.",
            )


def lists_gpus(value: Option | None) -> bool:
    """Return whether a list of resources, such as the value of `--gres`, contains GPUs."""
    return re.search(r"(?:^|[,/:])gpu(?:$|[,:=])", str(value)) is not None


def _others(tool: str, given: Mapping[str, Option], taken: set[str] | frozenset[str]) -> dict[str, Option]:
    """Return the options that a cluster file sets for sbatch or srun, by their long names.

    Args:
        tool: the program, `sbatch` or `srun`.
        given: the options by the keys of the cluster file.
        taken: the options that slurmddp writes itself.

    Raises:
        ConfigError: the cluster file sets an option that slurmddp does not allow there.
    """
    options: dict[str, Option] = {}
    for key, value in given.items():
        name = _long_name(key)
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ConfigError(
                f"cluster.{tool} has the key {key!r}, which is not the long name of an option.",
                hint="Use long names without dashes at the beginning, such as mail-type.",
            )
        if value is False or value is None:
            continue

        if name in _ONE_CLUSTER:
            raise ConfigError(
                f"cluster.{tool} sets {name}: the job would go to another SLURM, where it can't be followed.",
                hint="Use `export SLURM_CLUSTERS=NAME`: then all commands query the SLURM of that cluster.",
            )
        if name == "array":
            raise ConfigError(
                f"cluster.{tool} sets array, but the elements of an array would all train in one run folder.",
                hint="Remove it there; `slurmddp train -m` submits an array with one run for each element.",
            )
        if tool == "sbatch" and name in _REFUSED:
            raise ConfigError(f"cluster.sbatch can't set {name}.", hint=f"Remove it there: {_REFUSED[name]}.")
        if name in taken or (tool == "sbatch" and name in _OWN_KEYS):
            hint = "Remove it there."
            if tool == "sbatch" and name in _OWN_KEYS:
                hint = f"Remove it there and set {_OWN_KEYS[name]} instead."
            raise ConfigError(f"cluster.{tool} sets {name}, which slurmddp writes itself.", hint=hint)

        options[name] = _one_line(f"cluster.{tool}.{key}", value)

    return options


def _one_line(what: str, value: Option) -> Option:
    """Return a value unchanged; raise ConfigError if it has more than one line."""
    if isinstance(value, str) and re.search(r"[\n\r\0]", value):
        raise ConfigError(
            f"{what} is {value!r}, which does not fit into one line of the script.",
            hint="Remove line breaks and NUL characters.",
        )
    return value
