"""Describe every key of the configuration: type, default, meaning, bounds, and part in a run's identity.

A field of these dataclasses is the only description of a key. Defaults, checks, `slurmddp train --help`,
`docs/configuration.md`, a run's name, a checkpoint's identity and the trainer's settings follow from it.
To add a key, add a field.

Because `keys.py` reads annotations as objects, the module has no `from __future__ import annotations`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias

OWN_TRAINER = "slurmddp.training.trainer.train"
KEEP_LAST = 3
"""Checkpoints to keep, for the trainer and for `Distributon.save`."""
TargetNode: TypeAlias = Mapping[str, Any]
"""A mapping with a `_target_`, to which any key may be added."""
NamedTargetNodes: TypeAlias = Mapping[str, TargetNode]
"""Any number of nodes, each under a name of its own."""


class Identity(Enum):
    """The effect of another value of a key on an existing run."""

    COMPUTED = "another run"
    """The key decides numbers. It is part of the run's name and of the checkpoints' identity."""
    EXTENT = "another run, with checkpoints that fit"
    """The key says how long or how much. It is part of the run's name; a checkpoint fits any value."""
    FREE = "the same run"
    """The key changes no number. An existing run may change it."""
    FIXED = "only for a new run folder"
    """The key changes no number. It is used once, when the run folder is created."""


COMPUTED, EXTENT, FREE, FIXED = Identity


def key(default: Any, doc: str, identity: Identity = COMPUTED, **bounds: float) -> Any:
    """Declare a key with its default; `bounds` are `minimum`, `maximum`, `above` and `later` of `Key`."""
    facts = {"doc": doc, "identity": identity, **bounds}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=facts)
    return field(default=default, metadata=facts)


def section(doc: str, identity: Identity = COMPUTED, **facts: bool) -> Any:
    """Declare a key that holds the keys of a dataclass; `facts` are `trainer` and `is_open` of `Key`."""
    return field(metadata={"doc": doc, "identity": identity, **facts})


def group(
    choice: str | None, doc: str, identity: Identity = COMPUTED, *, trainer: bool = True, later: bool = False
) -> Any:
    """Declare a folder of `conf/`, with the file that is the default choice."""
    facts = {"doc": doc, "identity": identity, "trainer": trainer, "choice": choice, "is_group": True}
    return field(metadata=facts | {"later": later})


@dataclass(frozen=True, kw_only=True)
class ProgramSettings:
    """The program of every rank. Arguments of the function may stand beside these keys."""

    _target_: str = key(OWN_TRAINER, "import path of the function that every rank runs")
    script: str | None = key(
        None, "your own script (*.py), '-m package.module', or command, run unchanged instead of the function"
    )
    args: Any | None = key(
        [],
        "the script's arguments, a list or one line, as typed; {run_dir} and {attempt} are the run's",
    )
    resume_args: Any | None = key(
        [],
        "further arguments of later starts; with `checkpoints` only once such a file is there",
        FREE,
    )
    free_args: Any | None = key(
        [], "further arguments that decide no result: a run with others is the same run", FREE
    )
    resumable: bool = key(
        False, "the script resumes by itself from its files, so its ranks may restart in place", FREE
    )
    checkpoints: str | None = key(
        None, "files that your program saves, a path or glob: slurmddp sees its progress there", FREE
    )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The keys of `train`; steps are optimizer steps."""

    steps: int = key(400, "optimizer steps", EXTENT, minimum=1)
    max_time: int | str | None = key(
        None, "training time over all attempts after which it ends, written as time_limit", EXTENT, later=True
    )
    batch_size: int = key(16, "samples per rank and batch; with global_batch: at most", minimum=1)
    accumulate: int = key(1, "batches per optimizer step", minimum=1)
    global_batch: int | None = key(
        None, "samples per optimizer step over all ranks; null: from the ranks and batches", EXTENT, minimum=1
    )
    clip_norm: float | None = key(1.0, "largest norm of the gradient; null: don't clip", above=0)
    precision: Literal["32", "bf16", "fp16"] = key(
        "32", "number format of the forward passes; bf16 and fp16: autocast, fp16 scales losses", later=True
    )
    compile: bool = key(False, "run the model's training steps through torch.compile", EXTENT, later=True)
    ema: float | None = key(
        None,
        "decay of an average of the weights, such as 0.999, for evaluation and export; null: none",
        above=0,
        maximum=0.999999,
        later=True,
    )
    on_spike: Literal["fail", "skip", "rollback"] = key(
        "fail",
        "after a loss or gradient that is not finite: end, skip the update, or go back (also after a spike)",
        FREE,
    )
    flops: bool = key(False, "count the model's operations once, to show TFLOP/s and MFU", FREE)
    log_every: int = key(10, "steps between two log lines", FREE, minimum=1)
    eval_every: int = key(
        100, "steps between two evaluations; 0: before the first step and after the last", FREE, minimum=0
    )
    eval_batches: int = key(
        20, "held-out batches of an evaluation, over all ranks together; 0: none", EXTENT, minimum=0
    )
    save_every: int = key(
        100, "steps between two checkpoints; 0: at the end and at a stop only", FREE, minimum=0
    )
    memory_save_every: int | Literal["auto"] = key(
        "auto",
        "steps between two states kept in memory; auto: at most 1 % of the time; 0: none",
        FREE,
        minimum=0,
    )
    keep_last: int = key(KEEP_LAST, "checkpoints to keep", FREE, minimum=2)
    best: str | None = key(
        None, 'metric whose best checkpoint is kept too: eval_loss, "max accuracy", "min NAME"', FREE
    )
    sample_chars: int = key(400, "characters of text to write at the end; 0: none", FREE, minimum=0)
    workers: int = key(0, "data loader processes per rank", FREE, minimum=0)


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The reaction to stops and failures of the job."""

    max_restarts: int = key(
        3, "failures after which the job is tried again; preemptions and time limits don't count", minimum=0
    )
    max_restarts_in_place: int = key(
        10, "failures of one attempt after which its ranks restart within the job; 0: none", minimum=0
    )
    max_requeues_without_progress: int = key(
        3, "time limits in a row without a newer checkpoint before the run ends; 0: none", minimum=0
    )
    requeue: bool = key(True, "requeue the job after a preemption or a time limit")
    signal_lead_s: int = key(120, "seconds before the time limit at which to save and stop", minimum=1)
    grace_s: int | None = key(
        None,
        "seconds from SIGTERM to SIGKILL; null: as SLURM says (KillWait, GraceTime), in a local run no limit",
        minimum=1,
    )
    exclude_failed_h: int = key(
        24,
        "hours for which a failed node is avoided; the account's other runs avoid a lost node for one hour; "
        "0: not at all",
        minimum=0,
    )
    stall_timeout_s: float | None = key(
        None,
        "seconds without progress before a rank counts as hung; null: from measured steps; 0: never",
        minimum=0,
    )
    join_timeout_s: float = key(300, "seconds for which the nodes of a job wait for each other", minimum=1)
    rendezvous_timeout_s: float = key(60, "seconds for which the ranks wait for each other", minimum=1)
    collective_timeout_s: float = key(1800, "seconds that a collective may take", minimum=1)
    on_event: tuple[str, ...] = key(
        (), "command that runs when the run starts, is requeued or ends; it gets the event as JSON on stdin"
    )


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """One replica per rank. Gradients are averaged after every step."""

    name: Literal["ddp"] = key("ddp", "the strategy; docs/strategies.md compares all")
    find_unused_parameters: bool | None = key(None, "look for parameters that a step leaves out")
    bucket_mb: float | None = key(None, "MiB of gradients per message", above=0)
    static_graph: bool | None = key(None, "each step uses the same parameters in the same way")
    comm_hook: Literal["fp16", "bf16", "powersgd", "post_local_sgd"] | None = key(
        None, "how gradients are exchanged; null: averaged in float32"
    )
    hook_start_step: int | None = key(
        None, "steps before powersgd (null: 1000) or post_local_sgd (null: 100) begins", minimum=0
    )
    powersgd_rank: int | None = key(None, "rank of the factors of powersgd; null: 1", minimum=1)
    average_every: int | None = key(
        None, "steps between two averages of the weights by post_local_sgd; null: 4", minimum=2
    )
    group_ranks: int | None = key(
        None,
        "ranks that average gradients in each step of post_local_sgd; null: the ranks of a node",
        minimum=1,
    )
    zero_optimizer: bool | None = key(None, "the ranks share the optimizer's state")


@dataclass(frozen=True, kw_only=True)
class FsdpSettings:
    """Each rank keeps its shard of parameters, gradients and optimizer state."""

    name: Literal["fsdp"] = key("fsdp", "parameters, gradients and optimizer state in shards, one per rank")
    wrap: tuple[str, ...] | None = key(
        None, "classes of the modules to gather as one unit; null: the members of lists of equal modules"
    )
    param_dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        None, "type of gathered parameters; null: their own"
    )
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        None, "type in which gradients are summed; null: param_dtype"
    )
    reshard_after_forward: bool = key(True, "free gathered parameters between forward and backward pass")
    activation_checkpointing: bool = key(False, "compute activations again in the backward pass")


@dataclass(frozen=True, kw_only=True)
class RingSettings:
    """One replica per rank. An algorithm of slurmddp.collectives averages gradients after every step."""

    name: Literal["ring"] = key("ring", "gradients averaged by an algorithm that can be read and counted")
    algorithm: Literal[
        "ring", "halving_doubling", "tree", "central_server", "sharded_server", "all_gather"
    ] = key("ring", "how the ranks add up gradients")
    find_unused_parameters: bool | None = key(None, "look for parameters that a step leaves out")
    bucket_mb: float | None = key(None, "MiB of gradients per message", above=0)


@dataclass(frozen=True, kw_only=True)
class LocalSgdSettings:
    """One replica per rank, which trains alone; the ranks average their weights every few steps."""

    name: Literal["local_sgd"] = key("local_sgd", "weights averaged every few steps")
    every: int = key(8, "steps between two averages", minimum=1)
    warmup_steps: int = key(0, "first steps, after each of which the ranks average", minimum=0)


@dataclass(frozen=True, kw_only=True)
class DiLoCoSettings:
    """One replica per rank, which trains alone; an outer optimizer steps for all of them."""

    name: Literal["diloco"] = key("diloco", "an outer optimizer steps on the mean change of the weights")
    every: int = key(50, "steps between two outer steps", minimum=1)
    outer_lr: float = key(0.7, "learning rate of the outer optimizer", above=0)
    outer_momentum: float = key(0.9, "momentum of the outer optimizer, below 1", minimum=0)


@dataclass(frozen=True, kw_only=True)
class ParameterServerSettings:
    """All ranks send gradients to a server on rank 0, and take over its weights."""

    name: Literal["parameter_server"] = key("parameter_server", "weights and optimizer on rank 0")
    staleness: int = key(0, "steps by which a rank may be ahead of the slowest rank", minimum=0)


@dataclass(frozen=True, kw_only=True)
class SingleSettings:
    """One rank."""

    name: Literal["single"] = key("single", "one rank")


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings:
    """One rank, whose batches are split over its GPUs."""

    name: Literal["data_parallel"] = key("data_parallel", "one rank, for comparison")


StrategySettings: TypeAlias = (
    DdpSettings
    | RingSettings
    | FsdpSettings
    | LocalSgdSettings
    | DiLoCoSettings
    | ParameterServerSettings
    | SingleSettings
    | DataParallelSettings
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes of a site, and its way to request them; null leaves an option out."""

    name: str = key("unnamed", "the cluster's name")
    partition: str | None = key(None, "SLURM partition")
    account: str | None = key(None, "account that pays")
    qos: str | None = key(None, "quality of service")
    constraint: str | None = key(None, "features that the nodes must have")
    reservation: str | None = key(None, "reservation to run in")
    gpus_per_node: int = key(0, "GPUs on each node", minimum=0)
    gpu_type: str | None = key(None, "GPU type, where the site wants it named")
    gpu_request: Literal["gpus-per-node", "gres", "none"] = key(
        "gpus-per-node", "how to ask for GPUs; none: they come with the partition"
    )
    ranks_per_node: int | None = key(None, "ranks on each node without GPUs", minimum=1)
    max_nodes: int | None = key(None, "most nodes that one job may have", minimum=1)
    cpus_per_node: int | None = key(None, "CPUs on each node", minimum=1)
    mem_gb: float | None = key(None, "host memory of each node in GiB; 0: all of it", minimum=0)
    mem_request: Literal["mem", "mem-per-cpu", "mem-per-gpu", "none"] = key("mem", "how to ask for memory")
    time_limit: int | str | None = key(None, "time limit of the job, unless time_limit is set")
    setup: tuple[str, ...] = key((), "shell lines before the training (module load, source venv)")
    env: Mapping[str, str] = key({}, "environment variables of the ranks")
    sbatch: Mapping[str, str | int | bool] = key(
        {}, "any other sbatch option, by its long name; true: a flag"
    )
    srun: Mapping[str, str | int | bool] = key({}, "any other srun option, by its long name; true: a flag")
    python: str | None = key(None, "the interpreter on the nodes; null: the interpreter that submits")
    stage: str | None = key(
        None, "folder on each node's own disk to copy the Python environment to, such as /tmp; null: no copy"
    )
    ssh: str | None = key(None, "login node from which jobs are submitted, by your own ssh")
    ssh_folder: str | None = key(
        None, "folder of the project on the login node `ssh`; null: slurmddp/PROJECT in your home"
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration."""

    name: str | None = key(
        None, "first part of the run's name; null: the model's class or the script's name", FIXED
    )
    seed: int = key(0, "every random number follows from it", minimum=0, maximum=2**63 - 1)
    nodes: int | None = key(None, "machines; null: as many as `gpus` needs, else 1", EXTENT, minimum=1)
    gpus: int | None = key(
        None, "GPUs of the whole job, on as few nodes as hold them; null: from nodes and gpus_per_node", FREE,
        minimum=1,
    )  # fmt: skip
    spare_nodes: int = key(0, "further nodes that wait, and take the place of a lost one", FREE, minimum=0)
    gpus_per_node: int | None = key(
        None, "GPUs on each node; null: the cluster's, or this machine's", FREE, minimum=0
    )
    ranks_per_node: int | None = key(
        None, "ranks on each node; null: one per GPU, else the cluster's, else 2", EXTENT, minimum=1
    )
    cpus_per_node: int | None = key(None, "CPUs on each node; null: the cluster's", FREE, minimum=1)
    mem_gb: float | None = key(
        None, "host memory of each node in GiB; null: the cluster's; 0: all of it", FREE, minimum=0
    )
    time_limit: int | str | None = key(
        None, 'how long the job may run: "HH:MM:SS", "D-HH:MM:SS", "90m", "2h" or minutes', FREE
    )
    partition: str | None = key(None, "SLURM partition; null: the cluster's", FREE)
    account: str | None = key(None, "account that pays; null: the cluster's", FREE)
    qos: str | None = key(None, "quality of service; null: the cluster's", FREE)
    ssh: str | None = key(
        None,
        "login node from which the job is submitted, by your own ssh; null: the cluster's",
        FREE,
    )
    launcher: Literal["auto", "local", "slurm"] = key(
        "auto", "where the ranks run; auto: on SLURM if a cluster is chosen, else here", FREE
    )
    submitter: Literal["sbatch", "submitit"] = key("sbatch", "how a job is submitted", FREE)
    after: tuple[str, ...] = key(
        (), "runs or sweeps that must finish before the job starts, by their names", FREE
    )
    array_parallelism: int | None = key(
        None,
        "points that a sweep submits and SLURM runs at once, at most, but one of each array; null: no bound",
        FREE,
        minimum=1,
    )
    runs_dir: str = key("runs", "where the run folders are", FIXED)
    snapshot: bool = key(True, "keep a copy of the project's code in the run folder, and run it", FIXED)
    backend: str = key(
        "auto",
        "how ranks exchange tensors: gloo, nccl, shm on one node, hierarchical (shm in nodes, gloo between "
        "them), package.module.Class, or one for each device as in cpu:gloo,cuda:nccl; auto: nccl on GPUs, "
        "else gloo",
        EXTENT,
        later=True,
    )
    elastic: bool = key(
        False, "continue with fewer nodes when one is lost and no spare is left; steps keep their size", FREE
    )
    preflight: bool = key(False, "check every node before the training starts", FREE)
    loggers: Any | None = key(
        "auto",
        "tensorboard, csv, wandb, mlflow, or a list of these and mappings; auto: tensorboard if installed",
        FREE,
    )
    program: ProgramSettings = section("what every rank runs", is_open=True)
    train: TrainSettings = section("the training loop", trainer=True)
    policy: PolicySettings = section("stops and failures", FREE)
    model: TargetNode = group("gpt_small", "the model")
    data: TargetNode = group("stdlib", "the data set")
    loss: TargetNode | None = group("token_cross_entropy", "the loss function; null: the loss of the output")
    optimizer: TargetNode = group("adamw", "the optimizer")
    metrics: NamedTargetNodes | None = group(
        None, "further metrics of the held-out data, by name: functions of outputs and targets", FREE
    )
    callbacks: NamedTargetNodes | None = group(
        None,
        "objects of your own, by name, that the trainer calls at steps, evaluations and saves",
        later=True,
    )
    scheduler: TargetNode | None = group("cosine", "the learning rate over the steps")
    strategy: StrategySettings | TargetNode = group(
        "ddp", "how the replicas stay equal; also package.Class of your own"
    )
    cluster: Cluster | None = group(None, "the cluster, chosen with +cluster=NAME", FREE, trainer=False)
