"""Which keys a configuration has, what each may hold, and how a wrong one is refused.

The tables below are the schema; `check` holds a composed configuration against them. Nodes that a person's
own classes are built from (`model`, `data`, ...) stay open: any key may stand beside `_target_`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmddp.config.values import EXPECTED, Field, check_value
from slurmddp.errors import ConfigError, near_matches


def _text(doc: str, *, optional: bool = True, choices: tuple[str, ...] = ()) -> Field:
    return Field("text", doc, optional=optional, choices=choices)


def _whole(doc: str, minimum: int, *, optional: bool = False) -> Field:
    return Field("whole", doc, minimum=minimum, optional=optional)


OPEN_NODES = ("model", "data", "loss", "optimizer", "scheduler", "program")
GROUPS = ("model", "data", "loss", "optimizer", "scheduler", "strategy", "cluster")
SECTIONS = ("train", "policy", "strategy", "cluster")
"""Keys that hold a closed mapping: an unknown key inside is refused."""

TOP: dict[str, Field] = {
    "name": _text("first part of the run's name"),
    "seed": Field("whole", "every random number follows from it", 0, maximum=2**63 - 1),
    "nodes": _whole("machines", 1),
    "spare_nodes": _whole("further machines, to take the place of lost ones", 0),
    "gpus_per_node": _whole("GPUs on each node", 0, optional=True),
    "ranks_per_node": _whole("processes on each node", 1, optional=True),
    "cpus_per_node": _whole("CPUs on each node", 1, optional=True),
    "mem_gb": Field("number", "host memory of each node in GiB; 0 is all of it", 0, optional=True),
    "time_limit": Field("time", "how long SLURM lets the job run", optional=True),
    "partition": _text("instead of the cluster's"),
    "account": _text("instead of the cluster's"),
    "qos": _text("instead of the cluster's"),
    "launcher": _text("where it runs", optional=False, choices=("auto", "local", "slurm")),
    "submitter": _text("how it is submitted", optional=False, choices=("sbatch", "submitit")),
    "runs_dir": _text("where the run folders are", optional=False),
    "snapshot": Field("flag", "keep a copy of the code"),
    "elastic": Field("flag", "go on with fewer nodes when one is lost"),
    "preflight": Field("flag", "look at every node before the training starts"),
    "program": Field("node", "the function that every rank runs"),
    "train": Field("section", "the training loop"),
    "policy": Field("section", "stops and failures"),
    "model": Field("node", "the model"),
    "data": Field("node", "the data set"),
    "loss": Field("node", "the loss function", optional=True),
    "optimizer": Field("node", "the optimizer"),
    "scheduler": Field("node", "the learning rate over the steps", optional=True),
    "strategy": Field("section", "how the replicas agree"),
    "cluster": Field("section", "the cluster, chosen with +cluster=NAME", optional=True),
}

TRAIN: dict[str, Field] = {
    "steps": _whole("optimizer steps", 1),
    "batch_size": _whole("samples per rank and batch", 1),
    "accumulate": _whole("batches per step", 1),
    "global_batch": _whole("samples per step over all ranks", 1, optional=True),
    "clip_norm": Field("number", "largest norm of the gradient", optional=True, above=0),
    "log_every": _whole("steps between two log lines", 1),
    "eval_every": _whole("steps between two evaluations; 0: only at the ends", 0),
    "eval_batches": _whole("batches of one evaluation; 0: none", 0),
    "save_every": _whole("steps between two checkpoints; 0: only at the end", 0),
    "memory_save_every": Field("interval", "steps between two states kept in memory; 0: none", 0),
    "keep_last": _whole("checkpoints to keep", 2),
    "sample_chars": _whole("characters of text to write at the end", 0),
    "workers": _whole("loader processes per rank", 0),
}

POLICY: dict[str, Field] = {
    "max_restarts": _whole("failures after which the job is tried again", 0),
    "max_restarts_in_place": _whole("failures of an attempt after which its ranks start again; 0: none", 0),
    "max_requeues_without_progress": _whole("time limits in a row without progress; 0: never", 0),
    "requeue": Field("flag", "go on by itself after a stop"),
    "signal_lead_s": _whole("seconds before the time limit at which to save", 1),
    "grace_s": _whole("seconds from SIGTERM to SIGKILL, where SLURM does not say", 1, optional=True),
    "exclude_failed_h": _whole("hours without a node that failed under the run; 0: take it again", 0),
    "stall_timeout_s": Field(
        "number", "seconds in which a rank has to get on; null: learnt; 0: for ever", 0, optional=True
    ),
    "join_timeout_s": Field("number", "seconds for which nodes wait for each other", 1),
}

STRATEGY: dict[str, dict[str, Field]] = {
    "ddp": {
        "find_unused_parameters": Field("flag", "look for parameters that a step leaves out", optional=True),
        "bucket_mb": Field("number", "MiB of gradients per message", optional=True, above=0),
    },
    "single": {},
}
"""The strategies, each with its options."""

CLUSTER: dict[str, Field] = {
    "name": _text("what the cluster is called"),
    "partition": _text("SLURM partition"),
    "account": _text("who pays"),
    "qos": _text("quality of service"),
    "constraint": _text("features that the nodes must have"),
    "reservation": _text("reservation to run in"),
    "gpus_per_node": _whole("GPUs on each node", 0),
    "gpu_type": _text("GPU type, where the site wants it named"),
    "gpu_request": _text("the site's dialect", optional=False, choices=("gpus-per-node", "gres", "none")),
    "ranks_per_node": _whole("ranks on each node without GPUs", 1, optional=True),
    "max_nodes": _whole("most nodes that one job may have", 1, optional=True),
    "cpus_per_node": _whole("CPUs on each node", 1, optional=True),
    "mem_gb": Field("number", "host memory of each node in GiB; 0 is all of it", 0, optional=True),
    "mem_request": _text("the site's dialect", optional=False, choices=("mem", "mem-per-cpu", "none")),
    "time_limit": Field("time", "time limit of a job that names none", optional=True),
    "setup": Field("lines", "shell lines before the training"),
    "env": Field("texts", "environment variables"),
    "sbatch": Field("flags", "any other sbatch option"),
    "srun": Field("flags", "any other srun option"),
    "python": _text("the interpreter on the nodes"),
}
CLUSTER_DEFAULTS: dict[str, Any] = {
    "gpus_per_node": 0,
    "gpu_request": "gpus-per-node",
    "mem_request": "mem",
    "setup": [],
    "env": {},
    "sbatch": {},
    "srun": {},
}


def check(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with every value in its own type; ConfigError on the first wrong one."""
    checked = check_fields(config, TOP, "")
    checked["train"] = check_fields(checked["train"], TRAIN, "train.")
    checked["policy"] = check_fields(checked["policy"], POLICY, "policy.")
    checked["strategy"] = _check_strategy(checked["strategy"])
    if checked["cluster"] is not None:
        checked["cluster"] = check_cluster(checked["cluster"])
    return checked


def _check_strategy(strategy: Mapping[str, Any]) -> dict[str, Any]:
    name = _text("how the replicas agree", optional=False, choices=tuple(STRATEGY))
    check_value("strategy.name", strategy.get("name"), name)
    fields = {"name": name, **STRATEGY[strategy["name"]]}
    checked = check_fields(strategy, fields, "strategy.")
    return {key: value for key, value in checked.items() if value is not None}


def check_cluster(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cluster's mapping, whole and in its own types."""
    given = {key: value for key, value in cluster.items() if value is not None or key not in CLUSTER_DEFAULTS}
    return check_fields({**dict.fromkeys(CLUSTER), **CLUSTER_DEFAULTS, **given}, CLUSTER, "cluster.")


def check_fields(section: Mapping[str, Any], fields: Mapping[str, Field], prefix: str) -> dict[str, Any]:
    """Return `section` in the order of `fields`, each value in its own type."""
    for key in section:
        if key not in fields:
            raise unknown_key(str(key), fields, prefix)
    missing = [key for key, field in fields.items() if key not in section and not field.optional]
    if missing:
        raise ConfigError(
            f"`{prefix}{missing[0]}` is missing: {fields[missing[0]].doc}.",
            hint=f"Give it {EXPECTED[fields[missing[0]].kind]}.",
        )
    return {key: check_value(prefix + key, section.get(key), field) for key, field in fields.items()}


def unknown_key(key: str, fields: Mapping[str, Field], prefix: str) -> ConfigError:
    """Return the error for a key that the schema doesn't have."""
    full = prefix + key
    inner = [f"{name}.{key}" for name, table in (("train", TRAIN), ("policy", POLICY)) if key in table]
    if inner and not prefix:
        return ConfigError(f"`{key}` is not a key of the configuration.", hint=f"Did you mean {inner[0]}?")
    hint = near_matches(key, fields, prefix=prefix)
    if not hint.startswith("Did"):
        hint += " Values for code of your own go beside its `_target_`: model.x=..., program.x=..."
    return ConfigError(f"`{full}` is not a key of the configuration.", hint=hint)
